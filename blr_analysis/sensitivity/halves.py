"""Retrainings on random halves of the data, kept in a file so that none is made twice.

The file is a safetensors file: ``halves`` says which examples each half has, bool ``[K, N]``;
``losses`` are those of the test examples after each retraining, in nats, float64 ``[K, S, M]``,
NaN where one has not been made yet. It is written after every retraining.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blr_analysis.backprop.loss import evaluated
from blr_analysis.checks import path_of
from blr_analysis.errors import InputError, StorageError
from blr_analysis.files import drafted
from blr_analysis.files.shards import save_file
from blr_analysis.posterior.recognition import differs, fingerprint
from blr_analysis.progress import duration, track
from blr_analysis.recipe import Recipe
from blr_analysis.sensitivity.first_weights import drawn
from blr_analysis.sensitivity.training import Part, seconds_of, trained
from blr_analysis.task import Task

FIRST_SEED = 1000  # of the retrainings: none that a rerun or a what-if takes
DESCRIPTION = "retrained_on_halves"  # of the file, in its header


def random_halves(n_data: int, count: int) -> Tensor:
    """Which examples each half keeps, bool ``[count, N]``; the first ones of a larger count are
    the same."""
    generator = torch.Generator().manual_seed(0)
    n_kept = n_data // 2
    orders = [torch.randperm(n_data, generator=generator) for _ in range(count)]
    return torch.stack([order < n_kept for order in orders])


@dataclass(frozen=True)
class Retraining:
    """How halves are retrained, and where the losses are measured.

    Attributes:
        task: model and data.
        test: the examples whose losses are measured, under the task's model.
        recipe: of each retraining.
        n_halves: how many halves.
        seeds: trainings of each half.
    """

    task: Task
    test: Task
    recipe: Recipe
    n_halves: int
    seeds: int

    @property
    def count(self) -> int:
        """How many retrainings there are in all."""
        return self.n_halves * self.seeds

    @property
    def examples(self) -> int:
        """How many examples all retrainings run, in all their epochs; 0 of a ``train=``."""
        n_half = self.task.n_data // 2
        return math.ceil(self.count * n_half * self.recipe.epochs)

    def in_words(self, missing: int) -> str:
        """How many retrainings there are to be made."""
        if missing == 0:
            return "all retrainings are in the file: none is made"
        return f"{missing} retrainings on half of the data"

    def cost(self, missing: int | None = None) -> str:
        """How many retrainings there are to be made, and how long they take, in a line."""
        count = self.count if missing is None else missing
        retrainings = self.in_words(count)
        if count == 0:
            return retrainings
        if self.recipe.train is not None:
            return f"{retrainings} by your train=; the first one shows how long they take"
        first_half = random_halves(self.task.n_data, 1)[0]
        seconds_each = seconds_of(self.task, self._parts(first_half), self.recipe, FIRST_SEED)
        total = duration(count * seconds_each)
        return f"{retrainings}, {duration(seconds_each)} each by its first steps: {total} in all"

    def losses(self, file: HalvesFile | None) -> Tensor:
        """The losses of the test examples, ``[K, S, M]``; what the file has is not made again."""
        losses = self.empty() if file is None else file.read(self)
        halves = random_halves(self.task.n_data, len(losses))
        places = self._missing(losses)
        label = "retraining on halves"
        for k, seed in track(places, total=len(places), label=label, show=self.task.progress):
            losses[k, seed] = self._retrained(halves[k], seed)
            if file is not None:
                file.write(self, halves, losses)
        return losses[: self.n_halves, : self.seeds]

    def count_missing(self, file: HalvesFile | None) -> int:
        """How many retrainings have not been made yet."""
        losses = self.empty() if file is None else file.read(self)
        return len(self._missing(losses))

    def _missing(self, losses: Tensor) -> list[tuple[int, int]]:
        """The half and the seed of each retraining that has not been made yet."""
        is_missing = losses[: self.n_halves, : self.seeds].isnan().any(2)
        return [(k, seed) for k, seed in is_missing.nonzero().tolist()]

    def empty(self) -> Tensor:
        """Losses of which none is known yet, ``[K, S, M]``."""
        shape = (self.n_halves, self.seeds, self.test.n_data)
        return torch.full(shape, math.nan, dtype=torch.float64)

    def _retrained(self, half: Tensor, seed: int) -> Tensor:
        """The losses of the test examples after one retraining, ``[M]``.

        Raises:
            ModelError: a training that diverges.
        """
        parts = self._parts(half)
        state = trained(self.task.quiet, parts, self.recipe, FIRST_SEED + seed)
        return evaluated(self.test.quiet, dict(state))[0].losses.double()

    def _parts(self, half: Tensor) -> list[Part]:
        """The data of a retraining."""
        indices = half.nonzero().flatten()
        return [(self.task, indices, indices)]


@dataclass(frozen=True)
class HalvesFile:
    """The file of the retrainings."""

    path: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str] | None) -> HalvesFile | None:
        """The file of this name, which need not be there yet; None where none was named.

        Raises:
            InputError: no name of a safetensors file.
        """
        if path is None:
            return None
        place = Path(path_of(path)).expanduser()
        if place.suffix != ".safetensors":
            raise InputError(f"keep must name a .safetensors file, got {str(path)!r}")
        return cls(place)

    def read(self, retraining: Retraining) -> Tensor:
        """What was kept before, with room for all that is asked for.

        Raises:
            StorageError: a damaged file, or one of another recipe or of other data.
        """
        losses = retraining.empty()
        if not self.path.exists():
            return losses
        description, losses_before = self._content()
        difference = _difference(description, description_of(retraining))
        if difference:
            raise StorageError(f"{str(self.path)!r} is of {difference}: name another file")
        n_halves = max(len(losses), len(losses_before))
        seeds = max(losses.shape[1], losses_before.shape[1])
        larger = torch.full((n_halves, seeds, losses.shape[2]), math.nan, dtype=torch.float64)
        larger[: len(losses_before), : losses_before.shape[1]] = losses_before
        return larger

    def _content(self) -> tuple[dict[str, Any], Tensor]:
        try:
            with safe_open(self.path, framework="pt") as file:
                description = json.loads((file.metadata() or {})[DESCRIPTION])
                return description, file.get_tensor("losses")
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise StorageError(
                f"{str(self.path)!r} holds no retrained halves: name another file"
            ) from error

    def write(self, retraining: Retraining, halves: Tensor, losses: Tensor) -> None:
        """Replace the file."""
        metadata = {DESCRIPTION: json.dumps(description_of(retraining))}
        with drafted(self.path) as draft:
            save_file({"halves": halves, "losses": losses}, draft, metadata)


def description_of(retraining: Retraining) -> dict[str, Any]:
    """What a file's retrainings are known again by: the recipe, the model and its data, of which a
    few outputs at the first weights tell."""
    task = retraining.task
    weights = _first_weights(task, retraining.recipe)
    return {
        "recipe": repr(retraining.recipe),
        "n_data": task.n_data,
        "n_test": retraining.test.n_data,
        "data": fingerprint(task, weights),
        "test": fingerprint(retraining.test, weights),
    }


def _first_weights(task: Task, recipe: Recipe) -> Mapping[str, Tensor]:
    """Those that a training by the recipe may begin with; of a ``train=`` the model's own."""
    if recipe.train is not None:
        return task.parameters()
    return drawn(task, FIRST_SEED) if recipe.initial is None else recipe.initial


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """In what two descriptions differ, in words; "" where they do not."""
    if before["recipe"] != now["recipe"]:
        return "another recipe"
    if before["n_data"] != now["n_data"] or differs(before["data"], now["data"], strictly=True):
        return "another model or other training data"
    if before["n_test"] != now["n_test"] or differs(before["test"], now["test"], strictly=True):
        return "other test data"
    return ""

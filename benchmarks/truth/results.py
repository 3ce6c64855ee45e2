"""The truth of a case as tensors, for whoever compares with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.truth import plan, store
from benchmarks.truth.objective import unflattener
from benchmarks.truth.recipes import CASES, Recipe, recipe
from benchmarks.truth.sources import Split
from blr_analysis.errors import DataError
from blr_analysis.likelihoods import Likelihood


@dataclass(frozen=True)
class Retrained:
    """K retrainings of one kind.

    Attributes:
        names: of their files; ``notes``: the class, "random" or "top", or the subset's start.
        removed: which examples each was trained without.
        relabelled: pairs (example, its new target) of each.
        train_losses: ``[K, N]`` of every example under its own target, removed or not.
        test_losses: ``[K, M]``.
        left_out_outputs: ``[R, C]`` each: outputs on the removed or relabelled examples.
        evaluations: ``[K]`` gradient evaluations (forward and backward over the kept data).
        gradient_norm, start_norm, converged: ``[K]`` at the end, at the start, as was asked.
        traces: ``[iterations, 3]`` each: evaluations so far, objective, gradient norm.
        theta: ``[K, P]`` in the order of the model's parameters.
    """

    names: list[str]
    notes: list[str]
    removed: list[Tensor]
    relabelled: list[list[tuple[int, float]]]
    train_losses: Tensor
    test_losses: Tensor
    test_accuracy: Tensor
    left_out_outputs: list[Tensor]
    evaluations: Tensor
    gradient_norm: Tensor
    start_norm: Tensor
    converged: Tensor
    traces: list[Tensor]
    theta: Tensor

    def __len__(self) -> int:
        return len(self.names)

    @property
    def test_nll(self) -> Tensor:
        """Mean test loss after each, ``[K]``."""
        return self.test_losses.mean(1)

    @property
    def kept(self) -> Tensor:
        """Which examples each was trained on, bool ``[K, N]``."""
        kept = torch.ones(self.train_losses.shape, dtype=torch.bool)
        for row, removed in zip(kept, self.removed, strict=True):
            row[removed] = False
        return kept

    @property
    def left_out_losses(self) -> Tensor:
        """Of single removed (or relabelled) examples under their own target, ``[K]``."""
        which = [
            int(gone[0]) if len(gone) else pairs[0][0]
            for gone, pairs in zip(self.removed, self.relabelled, strict=True)
        ]
        return self.train_losses[torch.arange(len(self)), torch.tensor(which)]

    def evaluations_until(self, relative: float) -> Tensor:
        """Evaluations until the gradient's norm first fell to ``relative`` of the start, ``[K]``.

        -1 where it never did.
        """
        found = []
        for trace in self.traces:
            below = (trace[:, 2] <= relative * trace[0, 2]).nonzero().flatten()
            found.append(int(trace[below[0], 0]) if len(below) else -1)
        return torch.tensor(found)


@dataclass(frozen=True)
class Truth:
    """A trained model, its data, and what retraining gave.

    Attributes:
        name, recipe: the case and its settings.
        train, test: inputs and targets, float64.
        likelihood, prior_precision: what the model was trained with.
        theta: the trained weights ``[P]``.
        train_losses, test_losses: ``[N]`` and ``[M]`` at the trained weights.
        record: of the training: evaluations, gradient norm, converged.
    """

    name: str
    recipe: Recipe
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    likelihood: Likelihood
    prior_precision: float
    theta: Tensor
    train_losses: Tensor
    test_losses: Tensor
    record: dict[str, Any]

    def model(self, theta: Tensor | None = None) -> nn.Module:
        """A new model at the trained weights (or others, ``[P]``), float64, in eval mode."""
        model = self.recipe.build()
        weights = unflattener(model)(self.theta if theta is None else theta)
        model.load_state_dict(weights, strict=False)
        return model.eval()

    def task(self) -> blr.Task:
        """The trained model and its training data."""
        return blr.Task(self.model(), self.train, likelihood=self.likelihood)

    def test_task(self) -> blr.Task:
        """The trained model and the test data."""
        return blr.Task(self.model(), self.test, likelihood=self.likelihood)

    @property
    def test_nll(self) -> float:
        """Mean test loss of the trained model."""
        return float(self.test_losses.mean())

    @cached_property
    def loo(self) -> Retrained:
        """Left out one by one."""
        return self.retrained("loo")

    @cached_property
    def classes(self) -> Retrained:
        """Every class removed."""
        return self.retrained("class")

    @cached_property
    def relabel(self) -> Retrained:
        """Relabelled one by one."""
        return self.retrained("relabel")

    def subsets(self, start: str = "A") -> Retrained:
        """Random halves from first weights "A" or "B", or from the trained ones ("warm")."""
        return self.retrained("subset", f"{start}-")

    def retrained(self, kind: str, prefix: str = "") -> Retrained:
        """All retrainings of a kind that are on disk.

        Raises:
            DataError: there are none.
        """
        folder = store.folder(self.name) / kind
        found = {
            path.stem: file
            for path in sorted(folder.glob(f"{prefix}*.safetensors"))
            if (file := store.read(path, self.recipe.hash)) is not None
        }
        if not found:
            raise DataError(f"{self.name} has not been retrained yet. {_how(self.name, kind)}")
        rows = list(found.values())

        def stacked(name: str) -> Tensor:
            return torch.stack([row.tensors[name] for row in rows])

        def numbers(name: str) -> Tensor:
            return torch.tensor([row.record[name] for row in rows])

        return Retrained(
            names=list(found),
            notes=[row.record["note"] for row in rows],
            removed=[row.tensors["removed"] for row in rows],
            relabelled=[[(int(i), new) for i, new in row.record["relabelled"]] for row in rows],
            train_losses=stacked("train_losses"),
            test_losses=stacked("test_losses"),
            test_accuracy=torch.tensor([self._accuracy(row.tensors["theta"]) for row in rows]),
            left_out_outputs=[row.tensors["left_out_outputs"] for row in rows],
            evaluations=numbers("evaluations"),
            gradient_norm=numbers("gradient_norm"),
            start_norm=numbers("start_norm"),
            converged=numbers("converged"),
            traces=[row.tensors["trace"] for row in rows],
            theta=stacked("theta"),
        )

    def _accuracy(self, theta: Tensor) -> float:
        x, y = self.test
        with torch.no_grad():
            outputs = self.model(theta)(x)
        correct = self.likelihood.correct(outputs, self.likelihood.prepare_targets(y, outputs))
        return float("nan") if correct is None else float(correct.double().mean())


def load(name: str) -> Truth:
    """The truth of a case, as far as it has been computed.

    Raises:
        InputError: there is no such case.
        DataError: its model has not been trained yet; the message names the command.
    """
    settings = recipe(name)
    folder = store.folder(name)
    base = store.read(folder / "base.safetensors", settings.hash)
    data = store.read(folder / "data.safetensors", settings.hash)
    if base is None or data is None:
        raise DataError(f"{name} has not been trained yet. {_how(name)}")
    split = Split(**data.tensors)
    return Truth(
        name=name,
        recipe=settings,
        train=(split.x, split.y),
        test=(split.x_test, split.y_test),
        likelihood=settings.observed(),
        prior_precision=settings.delta,
        theta=base.tensors["theta"],
        train_losses=base.tensors["train_losses"],
        test_losses=base.tensors["test_losses"],
        record=base.record,
    )


def available() -> dict[str, dict[str, int]]:
    """How many retrainings of each kind are on disk, by case."""
    found = {}
    for name, settings in CASES.items():
        folder = store.folder(name)
        if store.record_of(folder / "base.safetensors", settings.hash) is None:
            continue
        found[name] = {
            kind: sum(
                store.record_of(path, settings.hash) is not None
                for path in (folder / kind).glob("*.safetensors")
            )
            for kind in plan.KINDS
        }
    return found


def _how(name: str, kind: str = "") -> str:
    what = f" --what {kind}" if kind else ""
    return f"Run `python -m benchmarks.truth --case {name}{what}` in the repository's root."

"""Retrainings by a case's own recipe, kept on disk: what is there is not trained again."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.agreement.cases import retrained
from benchmarks.field.cases import Case, Data, losses
from benchmarks.truth import store
from blr_analysis.likelihoods import resolve
from blr_analysis.sensitivity.training import trained

# the last: test examples of the halves
HALVES = 32
FOLDS = 20
ALONE = 40
ASKED = 150
SEEDS = {"halves": 3, "folds": 2, "groups": 2}  # from 10 on
FEW_SEEDS = dict.fromkeys(SEEDS, 1)

Retrain = Callable[[Tensor, int], nn.Module]  # the examples that stay, the seed


def by_recipe(case: Case, task: blr.Task) -> Retrain:
    """A model trained by the recipe on some of a task's examples, minibatches as of all."""

    def retrain(keep: Tensor, seed: int) -> nn.Module:
        kept = keep.nonzero().flatten()
        state = trained(task.quiet, [(task, kept, kept)], task.recipe, seed)  # type: ignore[arg-type]
        model = case.network()
        model.load_state_dict(state, strict=False)
        return model

    return retrain


def to_the_minimum(case: Case, data: Data, start: dict[str, Tensor]) -> Retrain:
    """The minimum of Σ ℓ_i + δ/2 ‖θ‖² of some examples that a descent from ``start`` reaches."""

    def retrain(keep: Tensor, seed: int) -> nn.Module:
        model = case.network()
        model.load_state_dict(start)
        likelihood = resolve("categorical")
        return retrained(model, data.x[keep], data.y[keep], likelihood, case.delta)

    return retrain


def halves(n: int) -> Tensor:
    """Which examples each random half keeps, bool ``[HALVES, N]``."""
    generator = torch.Generator().manual_seed(7)
    return torch.stack([torch.randperm(n, generator=generator) < n // 2 for _ in range(HALVES)])


def left_out(n: int, alone: bool) -> list[Tensor]:
    """The examples of each fold; or single ones, of a model whose retraining has no noise."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(5))
    return list(order[:ALONE].split(1) if alone else order.chunk(FOLDS))


class Truths:
    """What retraining gave; each kind is trained when it is first asked for.

    Attributes:
        halves: losses of the first test examples, ``[seeds, HALVES, ASKED]``; not of the converged.
        folds: the left-out loss of each example, ``[seeds, N]``; NaN where it was not left out.
        groups: the mean test loss without each group, ``[seeds, G]``.
        seconds: of one training.
    """

    def __init__(
        self,
        name: str,
        case: Case,
        data: Data,
        retrain: Retrain,
        how: str,
        folder: Path,
        seeds: Mapping[str, int],
    ) -> None:
        self.name = name
        self.data = data
        self.retrain = retrain
        self.folder = folder
        self.seeds = seeds
        self.alone = case.delta > 0
        self.seconds = 0.0
        self.parts = left_out(len(data.x), self.alone)
        told = f"{how} {case.patience} {case.base} {case.delta} {len(data.x)}"
        self.made = hashlib.sha256(told.encode()).hexdigest()[:16]

    @cached_property
    def halves(self) -> Tensor:
        return self._kept("halves", self._halves)

    @cached_property
    def folds(self) -> Tensor:
        return self._kept("folds", self._folds)

    @cached_property
    def groups(self) -> Tensor:
        return self._kept("groups", self._groups)

    def _kept(self, kind: str, how: Callable[[int], list[Tensor]]) -> Tensor:
        found = []
        if self.alone and kind == "halves":
            return torch.empty(0)
        for seed in range(10, 11 if self.alone else 10 + self.seeds[kind]):
            path = self.folder / self.name.replace(" ", "_") / f"{kind}-{seed}.safetensors"
            stored = store.read(path, self.made)
            if stored is None:
                start = time.process_time()
                rows = how(seed)
                about = {"hash": self.made, "seconds": (time.process_time() - start) / len(rows)}
                whole = self._joined(rows) if kind == "folds" else torch.stack(rows)
                stored = store.Stored({"losses": whole}, about)
                store.write(path, stored.tensors, stored.record)
            found.append(stored.tensors["losses"])
            self.seconds = stored.record["seconds"]
        return torch.stack(found)

    def _without(self, gone: Tensor, seed: int) -> nn.Module:
        keep = torch.ones(len(self.data.x), dtype=torch.bool)
        keep[gone] = False
        print(f"{self.name}: without {int((~keep).sum())}", file=sys.stderr, flush=True)
        return self.retrain(keep, seed)

    def _halves(self, seed: int) -> list[Tensor]:
        x = self.data.x_test[:ASKED]
        y = self.data.y_test[:ASKED]
        return [losses(self._without(~kept, seed), x, y) for kept in halves(len(self.data.x))]

    def _folds(self, seed: int) -> list[Tensor]:
        x = self.data.x
        y = self.data.y
        return [losses(self._without(part, seed), x[part], y[part]) for part in self.parts]

    def _joined(self, rows: list[Tensor]) -> Tensor:
        each = torch.full((len(self.data.x),), torch.nan, dtype=torch.float64)
        each[torch.cat(self.parts)] = torch.cat(rows)
        return each

    def _groups(self, seed: int) -> list[Tensor]:
        x = self.data.x_test
        y = self.data.y_test
        groups = self.data.groups
        members = [(groups == g).nonzero().flatten() for g in groups.unique()]
        return [losses(self._without(m, seed), x, y).mean() for m in members]

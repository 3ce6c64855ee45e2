"""Retrainings by a case's own recipe, kept on disk: what is there is not trained again."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.agreement.cases import retrained
from benchmarks.field.cases import Case, Data, losses
from benchmarks.truth import store
from blr_analysis.likelihoods import resolve
from blr_analysis.sensitivity.training import trained

HALVES, FOLDS, ALONE, ASKED = 32, 20, 40, 150  # the last: test examples of the halves
SEEDS = (10, 11)

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
    """What retraining gave.

    Attributes:
        seeds: of the retrainings.
        halves: losses of the first test examples, ``[seeds, HALVES, ASKED]``.
        folds: the left-out loss of each example, ``[seeds, N]``; NaN where it was not left out.
        groups: the mean test loss without each group, ``[seeds, G]``.
        seconds: of one training.
    """

    def __init__(self, name: str, case: Case, data: Data, retrain: Retrain, folder: Path) -> None:
        self.name, self.data, self.retrain = name, data, retrain
        alone = case.delta > 0
        self.seeds = SEEDS[:1] if alone else SEEDS
        self.parts = left_out(len(data.x), alone)
        told = f"{case.recipe} {case.patience} {case.base} {case.delta} {len(data.x)}"
        made = hashlib.sha256(told.encode()).hexdigest()[:16]
        path = folder / f"{name.replace(' ', '_')}.safetensors"
        found = store.read(path, made)
        if found is None:
            start = time.process_time()
            tensors = {"halves": self._halves(), "folds": self._folds(), "groups": self._groups()}
            count = len(self.seeds) * (HALVES + len(self.parts) + tensors["groups"].shape[1])
            seconds = (time.process_time() - start) / count
            found = store.Stored(tensors, {"hash": made, "seconds": seconds})
            store.write(path, found.tensors, found.record)
        self.halves, self.folds = found.tensors["halves"], found.tensors["folds"]
        self.groups, self.seconds = found.tensors["groups"], found.record["seconds"]

    def _without(self, gone: Tensor, seed: int) -> nn.Module:
        keep = torch.ones(len(self.data.x), dtype=torch.bool)
        keep[gone] = False
        print(f"{self.name}: without {int((~keep).sum())}", file=sys.stderr, flush=True)
        return self.retrain(keep, seed)

    def _halves(self) -> Tensor:
        x, y = self.data.x_test[:ASKED], self.data.y_test[:ASKED]
        rows = [[losses(self._without(~kept, s), x, y) for kept in halves(len(self.data.x))]
                for s in self.seeds]  # fmt: skip
        return torch.stack([torch.stack(row) for row in rows])

    def _folds(self) -> Tensor:
        x, y, found = self.data.x, self.data.y, []
        for seed in self.seeds:
            each = torch.full((len(x),), torch.nan, dtype=torch.float64)
            for part in self.parts:
                each[part] = losses(self._without(part, seed), x[part], y[part])
            found.append(each)
        return torch.stack(found)

    def _groups(self) -> Tensor:
        x, y, groups = self.data.x_test, self.data.y_test, self.data.groups
        members = [(groups == g).nonzero().flatten() for g in groups.unique()]
        rows = [[losses(self._without(m, s), x, y).mean() for m in members] for s in self.seeds]
        return torch.tensor(rows)

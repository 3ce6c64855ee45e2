"""Training and retraining to convergence, and what is kept of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.truth import store
from benchmarks.truth.cases import CASES, Recipe, recipe
from benchmarks.truth.minimise import Memory, Minimum, minimise
from benchmarks.truth.objective import Objective, cut, flat_parameters
from blr_analysis.errors import DataError

KINDS = ("class", "loo", "A", "B")  # the last: random halves from two sets of first weights
# The gradient norm at which a descent ends, relative to that where it starts: the first training,
# another from fresh weights, one from the trained weights.
TRAINED = 1e-9
FRESH = 1e-6
RETRAINED = 1e-5


class Job(NamedTuple):
    """One retraining: its file's name, what is left out, the seed of the first weights (None: the
    trained ones)."""

    name: str
    removed: Tensor
    seed: int | None = None


def jobs(kind: str, recipe: Recipe, y: Tensor) -> list[Job]:
    """The retrainings of one kind; the same list on every run."""
    if kind == "class":
        return [Job(f"{int(c):03d}", (y == c).nonzero().flatten()) for c in y.unique()]
    if kind == "loo":
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
        return [Job(f"{int(i):06d}", i[None]) for i in order[: recipe.loo]]
    found = []
    for k in range(recipe.subsets):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(100 + k))
        seed = 10_000 * KINDS.index(kind) + k
        found.append(Job(f"{k:03d}", order[len(y) // 2 :].sort().values, seed))
    return found


def fresh(recipe: Recipe, seed: int) -> Tensor:
    """First weights, ``[P]``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return flat_parameters(recipe.build())


@dataclass(frozen=True)
class Retrained:
    """K retrainings of one kind.

    Attributes:
        names: of their files.
        removed: which examples each was trained without; ``kept`` the others, bool ``[K, N]``.
        train_losses, test_losses: of every example, removed or not, ``[K, N]`` and ``[K, M]``.
        evaluations: ``[K]`` gradient evaluations (forward and backward over the kept data).
        converged: ``[K]``, whether the gradient fell as far as was asked.
        theta: ``[K, P]`` in the order of the model's parameters.
    """

    names: list[str]
    removed: list[Tensor]
    kept: Tensor
    train_losses: Tensor
    test_losses: Tensor
    evaluations: Tensor
    converged: Tensor
    theta: Tensor

    def __len__(self) -> int:
        return len(self.names)

    @property
    def left_out_losses(self) -> Tensor:
        """Of the single removed examples, ``[K]``."""
        return self.train_losses[torch.arange(len(self)), torch.cat(self.removed)]


class Truth:
    """A trained model, its data, and what retraining gave; what is on disk is not made again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.recipe = recipe(name)
        self.data = self.recipe.data()
        self.folder = store.folder(name)

    def train(self) -> None:
        """The first training, unless it is on disk."""
        if store.record_of(self.folder / "base.safetensors", self.recipe.hash) is None:
            start = fresh(self.recipe, 0)
            self._write("base", start, torch.ones(len(self.data.y), dtype=torch.bool), TRAINED)

    def retrain(self, kind: str, few: int | None = None) -> Iterator[str]:
        """All that is missing of a kind (at most ``few``), a line for each."""
        memory = self._memory() if kind == "loo" and self.recipe.dense else None
        for job in jobs(kind, self.recipe, self.data.y)[:few]:
            if store.record_of(self._path(kind, job.name), self.recipe.hash) is not None:
                continue
            keep = torch.ones(len(self.data.y), dtype=torch.bool)
            keep[job.removed] = False
            start = self.theta if job.seed is None else fresh(self.recipe, job.seed)
            share = RETRAINED if job.seed is None else FRESH
            yield self._write(f"{kind}/{job.name}", start, keep, share, memory)

    @property
    def theta(self) -> Tensor:
        """The trained weights, ``[P]``."""
        return self.base.tensors["theta"]

    @property
    def base(self) -> store.Stored:
        """The trained model, as it was kept.

        Raises:
            DataError: it has not been trained yet; the message names the command.
        """
        found = store.read(self.folder / "base.safetensors", self.recipe.hash)
        if found is None:
            raise DataError(f"run `python -m benchmarks.truth --case {self.name}` first")
        return found

    def model(self, theta: Tensor | None = None) -> nn.Module:
        """A new model at the trained weights (or others, ``[P]``), float64, in eval mode."""
        model = self.recipe.build()
        model.load_state_dict(cut(model, self.theta if theta is None else theta), strict=False)
        return model.eval()

    def task(self) -> blr.Task:
        data = (self.data.x, self.data.y)
        return blr.Task(self.model(), data, likelihood=self.recipe.observed())

    def retrained(self, kind: str) -> Retrained | None:
        """All retrainings of a kind that are on disk; None where there are none."""
        paths = sorted((self.folder / kind).glob("*.safetensors"))
        read = {p.stem: store.read(p, self.recipe.hash) for p in paths}
        found = {name: file for name, file in read.items() if file is not None}
        if not found:
            return None
        rows = [file.tensors for file in found.values()]
        table = {n: torch.stack([r[n] for r in rows]) for n in rows[0]}
        evaluations, converged = (
            torch.tensor([file.record[what] for file in found.values()])
            for what in ("evaluations", "converged")
        )
        removed = [(~kept).nonzero().flatten() for kept in table["kept"]]
        return Retrained(
            list(found), removed, evaluations=evaluations, converged=converged, **table
        )

    def seeded(self, which: int) -> Tensor:
        """The weights that training on all data reaches from other first weights; kept."""
        path = self._path("checkpoints", str(which))
        if store.record_of(path, self.recipe.hash) is None:
            keep = torch.ones(len(self.data.y), dtype=torch.bool)
            self._write(f"checkpoints/{which}", fresh(self.recipe, 500 + which), keep, FRESH)
        found = store.read(path, self.recipe.hash)
        assert found is not None
        return found.tensors["theta"]

    def descend(
        self, start: Tensor, keep: Tensor, share: float, memory: Memory | None = None
    ) -> Minimum:
        objective = Objective(self.recipe, self.data.x[keep], self.data.y[keep])
        return minimise(objective, start, relative=share, memory=memory)

    def _path(self, kind: str, name: str) -> Path:
        return self.folder / kind / f"{name}.safetensors"

    def _memory(self) -> Memory:
        """The inverse Hessian at the trained weights, with which small changes are soon learned."""
        whole = Objective(self.recipe, self.data.x, self.data.y)
        factor = torch.linalg.cholesky(whole.hessian(self.theta))
        return Memory(solve=lambda v: torch.cholesky_solve(v[:, None], factor)[:, 0])

    def _write(
        self, name: str, start: Tensor, keep: Tensor, share: float, memory: Memory | None = None
    ) -> str:
        data = self.data
        begun = time.perf_counter()
        end = self.descend(start, keep, share, memory)
        train = Objective(self.recipe, *data[:2])
        test = Objective(self.recipe, *data[2:])
        each = {"train_losses": train.each(end.theta), "test_losses": test.each(end.theta)}
        tensors = {"theta": end.theta, "kept": keep, **each}
        record: dict[str, Any] = {"hash": self.recipe.hash, "evaluations": end.evaluations}
        record |= {"gradient_norm": end.gradient_norm, "converged": end.converged}
        store.write(self.folder / f"{name}.safetensors", tensors, record)
        said = "" if end.converged else ", NOT CONVERGED"
        return (
            f"{self.name} {name}: test nll {float(each['test_losses'].mean()):.4f}; "
            f"{end.evaluations} evaluations, {time.perf_counter() - begun:.1f} s{said}"
        )


def available() -> dict[str, dict[str, int]]:
    """How many retrainings of each kind are on disk, by case."""
    found = {}
    for name, settings in CASES.items():
        folder = store.folder(name)
        if store.record_of(folder / "base.safetensors", settings.hash) is not None:
            found[name] = {
                kind: sum(
                    store.record_of(path, settings.hash) is not None
                    for path in (folder / kind).glob("*.safetensors")
                )
                for kind in KINDS
            }
    return found

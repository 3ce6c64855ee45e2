"""Checkpoints of a training, kept while it runs: about 1/8, 1/4 and 1/2 of it, and the end.

Snapshots are taken at steps that are powers of two apart, so that wherever training ends, or goes
back to, some are near 1/8, 1/4 and 1/2 of the steps up to the weights that were kept.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blr_analysis.checks import instance, one_of, path_of, positive_int
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import after
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.snapshots import State, state_of, thinned
from blr_analysis.task import unwrapped

HALVINGS = 6  # of the steps that are told: snapshots from 1/64 of them on
EVERY = 5  # passes for each whose Kronecker factors are recorded
LOOKS = 8  # numbers of a tensor by which the weights of a step are known again


@dataclass(frozen=True)
class Snapshot:
    """One step: its weights and buffers (or the file that holds them), and what was learned."""

    step: int
    weights: State | Path
    optimizer: Mapping[str, Any]
    recorded: Mapping[str, Any]

    def read(self) -> State:
        return load_file(self.weights) if isinstance(self.weights, Path) else self.weights


class Checkpoints:
    """Keep a training's checkpoints: ``checkpoints.step()`` after every step of the optimizer.

    Give it to :class:`blr_analysis.Task` as ``checkpoints=``. Where the weights of an earlier step
    were put back (early stopping), the run ends there.

    Args:
        model: what is trained.
        steps: how many steps there will be at most; None: powers of two are kept.
        folder: where snapshots are written (safetensors); None: they stay in memory.
        optimizer: one of the package's own, Adam or the like, which learns a posterior meanwhile.
        structure: "kron": Kronecker factors are recorded while it trains.

    Raises:
        InputError: no module, no number of steps, an unknown structure.

    Example:
        >>> import torch, blr_analysis as blr
        >>> model, X, y = torch.nn.Linear(2, 3), torch.randn(40, 2), torch.randint(3, (40,))
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> checkpoints = Checkpoints(model, steps=64)
        >>> for _ in range(64):
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(X), y).backward()
        ...     optimizer.step()
        ...     checkpoints.step()
        >>> task = blr.Task(model, (X, y), checkpoints=checkpoints)
        >>> checkpoints, len(task.checkpoints)
        (Checkpoints(64 steps, kept: 8, 16, 32), 3)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        structure: str | None = None,
    ) -> None:
        instance("model", model, nn.Module, "the torch.nn.Module that is trained")
        self.model, self.optimizer = unwrapped(model), optimizer
        self.steps = None if steps is None else positive_int("steps", steps)
        self.folder = None if folder is None else Path(path_of(folder)).expanduser()
        if structure is not None:
            one_of("structure", structure, ("kron",))
        self.recorder = KroneckerRecorder(self.model, every=EVERY) if structure else None
        self.done = 0
        self.snapshots: list[Snapshot] = []
        self._steps_by_look: dict[tuple[float, ...], int] = {}

    def __repr__(self) -> str:
        kept = ", ".join(str(s.step) for s in self._thinned(self.model))
        return f"Checkpoints({self.done} steps, kept: {kept or 'none'})"

    def step(self) -> None:
        """After each step of the optimizer.

        Raises:
            OptimizerError: inside ``sampled_params``, where the weights are a draw.
        """
        if getattr(self.optimizer, "_open", None) is not None:
            raise OptimizerError("checkpoints.step() belongs outside sampled_params")
        self.done += 1
        self._steps_by_look[_look(self.model)] = self.done
        if self._due():
            self.snapshots.append(self._snapshot())

    def _due(self) -> bool:
        if self.steps is None:
            return self.done & (self.done - 1) == 0
        return any(self.done == max(1, round(self.steps / 2**k)) for k in range(1, HALVINGS + 1))

    def _snapshot(self) -> Snapshot:
        weights = {n: t.detach().cpu().clone() for n, t in state_of(self.model).items()}
        place: State | Path = weights
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            place = self.folder / f"step-{self.done:08d}.safetensors"
            draft = place.with_suffix(".draft")
            save_file(weights, draft)
            draft.replace(place)
        learned: dict[str, Any] = {}
        if self.optimizer is not None:
            state = self.optimizer.state
            own = self.model.named_parameters()
            learned = {n: copy.deepcopy(state[p]) for n, p in own if p in state}
        recorded = {} if self.recorder is None else copy.deepcopy(self.recorder.state_dict())
        return Snapshot(self.done, place, learned, recorded)

    def states(self, model: nn.Module) -> list[Callable[[], State]]:
        """The snapshots nearest 1/8, 1/4 and 1/2 of the run of a model's weights."""
        return [snapshot.read for snapshot in self._thinned(unwrapped(model))]

    def _thinned(self, model: nn.Module) -> list[Snapshot]:
        end = self._steps_by_look.get(_look(model), self.done)
        wanted = thinned([s.step for s in self.snapshots], end)
        return [s for s in self.snapshots if s.step in wanted]

    def posterior(
        self,
        *,
        n_data: int,
        prior_precision: Any = None,
        initial: Mapping[str, Tensor] | None = None,
    ) -> Posterior:
        """The posterior learned while training, with the earlier ones; no pass over the data.

        Args:
            n_data: N, the number of training examples.
            prior_precision: δ; None: as :meth:`blr_analysis.Posterior.from_optimizer` finds it, or
                by the evidence of the recorded factors.
            initial: θ₀, the prior's mean; None: 0.

        Raises:
            InputError: neither an optimizer nor a structure was given.
        """
        if self.optimizer is None and self.recorder is None:
            raise InputError('Checkpoints keeps no posterior: give optimizer= or structure="kron"')
        asked = {"n_data": n_data, "prior_precision": prior_precision, "initial": initial}

        def now() -> Posterior:
            if self.recorder is not None:
                q = Posterior.from_recorder(self.recorder, self.model, **asked)
            else:
                q = Posterior.from_optimizer(self.optimizer, self.model, **asked)  # type: ignore[arg-type]
            mean = {n: m.clone() for n, m in q.mean.items()}
            about = {"prior_precision": q.prior, "n_data": q.n_data, "record": q.record}
            return Posterior(mean, q.form, **about, buffers=q.buffers)

        earlier = []
        for k, snapshot in enumerate(self._thinned(self.model)):
            with self._back_at(snapshot):
                earlier.append(now())
            earlier[-1].record["checkpoint"] = k + 1
        return after(now(), earlier)

    @contextmanager
    def _back_at(self, snapshot: Snapshot) -> Iterator[None]:
        """Model, optimizer and recorder as they were at a step."""
        own = dict(self.model.named_parameters())
        present = {n: t.detach().clone() for n, t in state_of(self.model).items()}
        states = (
            {n: self.optimizer.state.get(own[n]) for n in snapshot.optimizer}
            if (self.optimizer is not None)
            else {}
        )
        recorded = {} if self.recorder is None else copy.deepcopy(self.recorder.state_dict())
        try:
            _write(self.model, snapshot.read())
            for name in states:
                self.optimizer.state[own[name]] = snapshot.optimizer[name]  # type: ignore[union-attr]
            if self.recorder is not None:
                self.recorder.load_state_dict(snapshot.recorded)
            yield
        finally:
            _write(self.model, present)
            for name, state in states.items():
                self.optimizer.state[own[name]] = state  # type: ignore[union-attr]
            if self.recorder is not None:
                self.recorder.load_state_dict(recorded)


def _write(model: nn.Module, state: State) -> None:
    with torch.no_grad():
        for name, place in state_of(model).items():
            place.copy_(state[name])


def _look(model: nn.Module) -> tuple[float, ...]:
    """Some numbers of the first and the last weights, by which a step is known again."""
    trained = [p.detach().flatten() for p in model.parameters() if p.requires_grad]
    seen = [p[:: max(1, len(p) // LOOKS)][:LOOKS] for p in (trained[0], trained[-1])]
    return tuple(torch.cat([s.double() for s in seen]).tolist())

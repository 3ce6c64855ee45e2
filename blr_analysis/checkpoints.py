"""Checkpoints of a training, kept while it runs: about 1/8, 1/4 and 1/2 of it, and the end.

Snapshots are taken at steps that are powers of two apart, so that wherever training ends, or goes
back to, some are near 1/8, 1/4 and 1/2 of the steps up to the weights that were kept.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blr_analysis.checks import instance, one_of, path_of, positive_int
from blr_analysis.errors import InitialPrecisionWarning, InputError, OptimizerError
from blr_analysis.files import drafted
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.snapshots import State, state_of, thinned
from blr_analysis.task import unwrapped

HALVINGS = 6  # of the steps that are told: snapshots from 1/64 of them on
EVERY = 5  # passes for each whose Kronecker factors are recorded
LOOKS = 8  # numbers of a tensor by which the weights of a step are known again
OPTIMIZER, RECORDER = "optimizer/", "recorder/"  # before what is theirs
MOMENTA = ("exp_avg", "momentum", "momentum_buffer")  # of which no posterior is made
COUNTS = ("passes", "recorded")  # of the recorder, beside its means


@dataclass(frozen=True)
class Snapshot:
    """One step: weights, buffers and what was learned, or the file that holds them."""

    step: int
    held: State | Path

    def read(self, head: str = "") -> State:
        """What stands behind ``head``; the weights and buffers behind none."""
        held = load_file(self.held) if isinstance(self.held, Path) else self.held
        if not head:
            return {n: t for n, t in held.items() if not n.startswith((OPTIMIZER, RECORDER))}
        return {n.removeprefix(head): t for n, t in held.items() if n.startswith(head)}

    def learned(self) -> dict[str, State]:
        """The optimizer's state by the parameter's name."""
        learned: dict[str, State] = {}
        for name, value in self.read(OPTIMIZER).items():
            parameter, _, key = name.rpartition("/")
            learned.setdefault(parameter, {})[key] = value
        return learned


class Checkpoints:
    """Keep a training's checkpoints: ``checkpoints.step()`` after every step of the optimizer.

    Give it to :class:`blr_analysis.Task` as ``checkpoints=``. Where the weights of an earlier step
    were put back (early stopping), the run ends there.

    Args:
        model: what is trained.
        steps: how many steps there will be at most; None: powers of two are kept.
        folder: where snapshots are written, with what was learned until then (safetensors); None:
            they stay in memory.
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
        held = state_of(self.model)
        for name, p in self.model.named_parameters():
            state = {} if self.optimizer is None else self.optimizer.state.get(p, {})
            kept = {k: v for k, v in state.items() if k not in MOMENTA}
            held |= {
                f"{OPTIMIZER}{name}/{k}": torch.as_tensor(v)
                for k, v in kept.items()
                if isinstance(v, Tensor | int | float)
            }
        if self.recorder is not None:
            state = self.recorder.state_dict()
            counts = {f"{RECORDER}{n}/": torch.tensor(state[n]) for n in COUNTS}
            held |= counts | {f"{RECORDER}{n}": mean for n, mean in state["means"].items()}
        held = {n: t.detach().cpu().clone() for n, t in held.items()}
        if self.folder is None:
            return Snapshot(self.done, held)
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / f"step-{self.done:08d}.safetensors"
        with drafted(place) as draft:
            save_file({n: t.contiguous() for n, t in held.items()}, draft)
        return Snapshot(self.done, place)

    def begin(self, step: int = 0) -> None:
        """Before the first step, whose weights are kept too; or after this many, where a training
        is resumed, with what the folder holds of them."""
        self.done, self.snapshots, self._steps_by_look = step, [], {}
        for place in [] if self.folder is None else sorted(self.folder.glob("step-*.safetensors")):
            taken = int(place.stem.removeprefix("step-"))
            if step and taken <= step:
                self.snapshots.append(Snapshot(taken, place))
            else:
                place.unlink()  # of another training
        if step == 0:
            self.snapshots.append(self._snapshot())

    @property
    def first(self) -> State | None:
        """The weights and buffers that training began with, where they were kept."""
        return next((s.read() for s in self.snapshots if s.step == 0), None)

    def settle(self) -> None:
        """At the end: keep the first weights and those near 1/8, 1/4 and 1/2 alone."""
        kept = [s for s in self.snapshots if s.step == 0] + self._thinned(self.model)
        for snapshot in self.snapshots:
            if snapshot not in kept and isinstance(snapshot.held, Path):
                snapshot.held.unlink(missing_ok=True)
        self.snapshots = kept

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
                return Posterior.from_recorder(self.recorder, self.model, **asked)
            return Posterior.from_optimizer(self.optimizer, self.model, **asked)  # type: ignore[arg-type]

        return self.before(now(), now)

    def before(self, last: Posterior, now: Callable[[], Posterior]) -> Posterior:
        """A posterior with the earlier ones: what ``now`` answers of model, optimizer and recorder
        as they were at the snapshots."""
        found = []
        for k, snapshot in enumerate(self._thinned(self.model)):
            with self._back_at(snapshot), warnings.catch_warnings():
                warnings.simplefilter("ignore", InitialPrecisionWarning)  # which is early's own
                q = now()
            found.append(q.changed(record={**q.record, "checkpoint": k + 1}))
        return last.changed(earlier=tuple(found))

    @contextmanager
    def _back_at(self, snapshot: Snapshot) -> Iterator[None]:
        """Model, optimizer and recorder as they were at a step."""
        own = dict(self.model.named_parameters())
        present = {n: t.detach().clone() for n, t in state_of(self.model).items()}
        learned = {} if self.optimizer is None else snapshot.learned()
        states = {n: self.optimizer.state.get(own[n]) for n in learned}  # type: ignore[union-attr]
        recorded = {} if self.recorder is None else copy.deepcopy(self.recorder.state_dict())
        try:
            _write(self.model, snapshot.read())
            for name, state in learned.items():
                placed = {k: t.to(own[name].device) for k, t in state.items()}
                self.optimizer.state[own[name]] = placed  # type: ignore[union-attr]
            if self.recorder is not None:
                means = snapshot.read(RECORDER)
                counts = {n: int(means.pop(f"{n}/")) for n in COUNTS}
                self.recorder.load_state_dict({**recorded, **counts, "means": means})
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

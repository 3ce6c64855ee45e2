"""Checkpoints of a training, kept while it runs: about 1/8, 1/4 and 1/2 of it, and the end.

Snapshots are taken at steps that are powers of two apart, so that wherever training ends, or goes
back to, some are near 1/8, 1/4 and 1/2 of the steps up to the weights that were kept.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blr_analysis.checks import instance, one_of, path_of, positive_int
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.snapshots import State, state_of, thinned
from blr_analysis.task import unwrapped

HALVINGS = 6  # of the steps that are told: snapshots from 1/64 of them on
EVERY = 5  # passes for each whose Kronecker factors are recorded
LOOKS = 8  # numbers of a tensor by which the weights of a step are known again
NUMBERS = "blr_analysis.checkpoint"  # what is no tensor, in a file's metadata
LEARNED = ("optimizer", "recorder")  # before the places of what is no weight and no buffer


@dataclass(frozen=True)
class Snapshot:
    """One step: weights and buffers by name, and by its place, such as "optimizer/NAME/exp_avg",
    what was learned; or the file that holds them."""

    step: int
    held: Mapping[str, Any] | Path

    def read(self) -> State:
        held = load_file(self.held) if isinstance(self.held, Path) else self.held
        return {n: t for n, t in held.items() if not n.startswith(LEARNED)}

    def learned(self) -> dict[str, Any]:
        """The states of the optimizer, by parameter, and of the recorder."""
        held = self.held
        if isinstance(held, Path):
            with safe_open(held, "pt") as file:
                held = {**load_file(held), **json.loads(file.metadata()[NUMBERS])}
        nested: dict[str, Any] = {}
        for place, value in held.items():
            *above, last = place.split("/")
            at = nested
            for name in above:
                at = at.setdefault(name, {})
            at[last] = value
        return {name: nested.get(name, {}) for name in LEARNED}


def _places(tree: Any, head: str) -> dict[str, Any]:
    """The leaves of nested dicts by their places, tensors on the CPU and copied."""
    if isinstance(tree, Mapping) and tree:
        parts = (_places(value, f"{head}/{name}") for name, value in tree.items())
        return {place: leaf for part in parts for place, leaf in part.items()}
    if isinstance(tree, Tensor):
        return {head: tree.detach().cpu().clone(memory_format=torch.contiguous_format)}
    return {head: tree}


class Checkpoints:
    """Keep a training's checkpoints: ``checkpoints.step()`` after every step of the optimizer.

    Give it to :class:`blr_analysis.Task` as ``checkpoints=``. Where the weights of an earlier step
    were put back (early stopping), the run ends there.

    Args:
        model: what is trained.
        steps: how many steps there will be at most; None: powers of two are kept.
        folder: where snapshots are written, with all that was learned until then (safetensors);
            None: they stay in memory.
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
        held = {n: leaf for n, t in state_of(self.model).items() for leaf in _places(t, n).values()}
        if self.optimizer is not None:
            state = self.optimizer.state
            for name, p in self.model.named_parameters():
                held |= _places(state.get(p, {}), f"optimizer/{name}")
        if self.recorder is not None:
            held |= _places(self.recorder.state_dict(), "recorder")
        if self.folder is None:
            return Snapshot(self.done, held)
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / f"step-{self.done:08d}.safetensors"
        draft = place.with_suffix(".draft")
        tensors = {n: t for n, t in held.items() if isinstance(t, Tensor)}
        numbers = {n: x for n, x in held.items() if n not in tensors}
        save_file(tensors, draft, {NUMBERS: json.dumps(numbers)})
        draft.replace(place)
        return Snapshot(self.done, place)

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
            return q.changed(buffers={n: b.clone() for n, b in q.buffers.items()})

        earlier = []
        for number, snapshot in enumerate(self._thinned(self.model), 1):
            with self._back_at(snapshot):
                q = now()
            earlier.append(q.changed(record={**q.record, "checkpoint": number}))
        return now().changed(earlier=tuple(earlier))

    @contextmanager
    def _back_at(self, snapshot: Snapshot) -> Iterator[None]:
        """Model, optimizer and recorder as they were at a step."""
        present = {n: t.detach().clone() for n, t in state_of(self.model).items()}
        held = {} if self.optimizer is None else dict(self.optimizer.state)
        recorded = {} if self.recorder is None else copy.deepcopy(self.recorder.state_dict())
        learned = snapshot.learned()
        try:
            _write(self.model, snapshot.read())
            if self.optimizer is not None:
                for name, p in self.model.named_parameters():
                    if name in learned["optimizer"]:
                        self.optimizer.state[p] = learned["optimizer"][name]
            if self.recorder is not None:
                self.recorder.load_state_dict(learned["recorder"])
            yield
        finally:
            _write(self.model, present)
            if self.optimizer is not None:
                self.optimizer.state.update(held)
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

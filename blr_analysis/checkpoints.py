"""Checkpoints of a training, kept while it runs: about 1/8, 1/4 and 1/2 of it, and the end.

Snapshots are taken at steps that are powers of two apart, so that wherever training ends, or goes
back to, some are near 1/8, 1/4 and 1/2 of the steps up to the weights that were kept.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import instance, one_of, path_of, positive_int
from blr_analysis.errors import InitialPrecisionWarning, InputError, OptimizerError
from blr_analysis.files import drafted
from blr_analysis.files.shards import save_file
from blr_analysis.modes import modes_of
from blr_analysis.posterior.capture.readers import is_flat
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.snapshots import State, read, state_of, thinned
from blr_analysis.task import unwrapped

HALVINGS = 6  # of the steps that are told: snapshots from 1/64 of them on
EVERY = 5  # passes for each whose Kronecker factors are recorded
LOOKS = 8  # numbers of a tensor by which the weights of a step are known again
OPTIMIZER, RECORDER = "optimizer/", "recorder/"  # before what is theirs
MOMENTA = ("exp_avg", "momentum", "momentum_buffer")  # of which no posterior is made
COUNTS = ("passes", "recorded")  # of the recorder, beside its means


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
        self.snapshots: dict[int, State | Path] = {}  # by step
        self.modes: dict[str, bool] | None = None  # of the modules, while they train
        self._steps_by_look: dict[tuple[float, ...], int] = {}

    def __repr__(self) -> str:
        kept = ", ".join(map(str, self._thinned(self.model)))
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
        if self.modes is None or self._due():
            self.modes = modes_of(self.model)
        if self._due():
            self._keep()

    def _due(self) -> bool:
        if self.steps is None:
            return self.done & (self.done - 1) == 0
        return any(self.done == max(1, round(self.steps / 2**k)) for k in range(1, HALVINGS + 1))

    def _keep(self) -> None:
        held = self._present()
        self.snapshots[self.done] = held
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.snapshots[self.done] = place = self.folder / f"step-{self.done:08d}.safetensors"
            with drafted(place) as draft:
                save_file({n: t.contiguous() for n, t in held.items()}, draft, {"format": "pt"})

    def _learned(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Each number that the optimizer keeps of a parameter: its name, and where it stands."""
        for name, p in self.model.named_parameters() if self.optimizer is not None else ():
            state = self.optimizer.state.get(p, {})  # type: ignore[union-attr]
            for key, value in state.items():
                if key not in MOMENTA and isinstance(value, Tensor | int | float):
                    yield f"{OPTIMIZER}{name}/{key}", state, key

        for k, group in enumerate(self.optimizer.param_groups if self.optimizer else ()):
            if is_flat(group):
                yield f"{OPTIMIZER}group {k}/hess", group, "hess"
        if hasattr(self.optimizer, "current_step"):  # of ivon-opt, which counts for all
            yield f"{OPTIMIZER}current_step", vars(self.optimizer), "current_step"

    def _present(self) -> State:
        """Weights, buffers and what was learned, as they are now."""
        held = dict(state_of(self.model))
        held |= {name: torch.as_tensor(state[key]) for name, state, key in self._learned()}
        if self.recorder is not None:
            state = self.recorder.state_dict()
            held |= {f"{RECORDER}{n}/": torch.tensor(state[n]) for n in COUNTS}
            held |= {f"{RECORDER}{n}": mean for n, mean in state["means"].items()}
        return {n: t.detach().cpu().clone() for n, t in held.items()}

    def _write(self, held: State) -> None:
        with torch.no_grad():
            for name, place in state_of(self.model).items():
                place.copy_(held[name])
            for name, state, key in list(self._learned()):
                if name in held and isinstance(state[key], Tensor):
                    state[key].copy_(held[name])
                elif name in held:
                    state[key] = held[name].item()
        if self.recorder is not None:
            means = {n.removeprefix(RECORDER): t for n, t in held.items() if n.startswith(RECORDER)}
            counts = {n: int(means.pop(f"{n}/")) for n in COUNTS}
            state = self.recorder.state_dict()
            self.recorder.load_state_dict({**state, **counts, "means": means})

    def begin(self, step: int = 0) -> None:
        """Before the first step, whose weights are kept too; or after this many, where a training
        is resumed, with what the folder holds of them."""
        self.done, self.snapshots, self._steps_by_look = step, {}, {}
        for place in [] if self.folder is None else sorted(self.folder.glob("step-*.safetensors")):
            taken = int(place.stem.removeprefix("step-"))
            if step and taken <= step:
                self.snapshots[taken] = place
            else:
                place.unlink()  # of another training
        if step == 0:
            self._keep()

    @property
    def first(self) -> State | None:
        """The weights and buffers that training began with, where they were kept."""
        held = read(self.snapshots[0]) if 0 in self.snapshots else None
        return None if held is None else {name: held[name] for name in state_of(self.model)}

    def settle(self) -> None:
        """At the end: keep the first weights and those near 1/8, 1/4 and 1/2 alone."""
        kept = {0, *self._thinned(self.model)}
        for held in [self.snapshots.pop(step) for step in {*self.snapshots} - kept]:
            if isinstance(held, Path):
                held.unlink(missing_ok=True)

    def states(self, model: nn.Module) -> list[State | Path]:
        """The snapshots nearest 1/8, 1/4 and 1/2 of the run of a model's weights."""
        return [self.snapshots[step] for step in self._thinned(unwrapped(model))]

    def _thinned(self, model: nn.Module) -> list[int]:
        end = self._steps_by_look.get(_look(model), self.done)
        return thinned(list(self.snapshots), end)

    def posterior(
        self, *, n_data: int, prior_precision: Any = None, initial: Any = None
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
        make, source = Posterior.from_recorder, self.recorder
        if source is None:
            make, source = Posterior.from_optimizer, self.optimizer
        told = {"n_data": n_data, "prior_precision": prior_precision, "initial": initial}
        now = partial(make, source, self.model, **told)  # type: ignore[arg-type]
        return self.before(now(), now)

    def before(self, last: Posterior, now: Callable[[], Posterior]) -> Posterior:
        """A posterior with the earlier ones: what ``now`` answers of model, optimizer and recorder
        as they were at the snapshots."""
        found, present = [], self._present()
        try:
            for k, step in enumerate(self._thinned(self.model)):
                self._write(read(self.snapshots[step]))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", InitialPrecisionWarning)  # which is early's own
                    q = now()
                found.append(q.changed(record={**q.record, "checkpoint": k + 1}))
        finally:
            self._write(present)
        return last.changed(earlier=tuple(found))


def _look(model: nn.Module) -> tuple[float, ...]:
    """Some numbers of the first and the last weights, by which a step is known again."""
    trained = [p.detach().flatten() for p in model.parameters() if p.requires_grad]
    seen = [p[:: max(1, len(p) // LOOKS)][:LOOKS] for p in (trained[0], trained[-1])]
    return tuple(torch.cat([s.double() for s in seen]).tolist())

"""Checkpoints of a training, kept while it runs: about 1/8, 1/4 and 1/2 of it, and the end.

Snapshots are taken at steps that are powers of two apart, so that wherever training ends, or goes
back to, some are near 1/8, 1/4 and 1/2 of the steps up to the weights that were kept.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from blr_analysis.posterior.recorder import KroneckerRecorder, between
from blr_analysis.snapshots import State, read, state_of, thinned
from blr_analysis.task import unwrapped

HALVINGS = 6  # of ``steps``: snapshots from 1/64 of them on
EVERY = 5  # the Kronecker factors of one pass in so many are recorded
LOOKS = 8  # so many numbers of a tensor identify the weights of a step
OPTIMIZER = "optimizer/"  # prefix of the optimizer's numbers in a snapshot
RECORDER = "recorder/"  # prefix of the recorder's means
MOMENTA = ("exp_avg", "momentum", "momentum_buffer")  # a posterior does not need them
COUNTS = ("passes", "recorded", "drawn")  # of the recorder, beside its means


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
        self.model = unwrapped(model)
        self.optimizer = optimizer
        self.steps = None if steps is None else positive_int("steps", steps)
        self.folder = None if folder is None else Path(path_of(folder)).expanduser()
        if structure is not None:
            one_of("structure", structure, ("kron",))
        self.recorder: KroneckerRecorder | None = None
        if structure is not None:
            self.recorder = KroneckerRecorder(self.model, every=EVERY, labels="drawn")
        self.done = 0
        self.snapshots: dict[int, State | Path] = {}  # by step
        self.modes: dict[str, bool] | None = None  # of the modules, while they train
        self._steps_by_look: dict[tuple[float, ...], int] = {}

    def __repr__(self) -> str:
        steps = ", ".join(str(step) for step in self._thinned(self.model))
        return f"Checkpoints({self.done} steps, kept: {steps or 'none'})"

    def step(self) -> None:
        """Call this after each step of the optimizer.

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
        """Whether a snapshot is taken at this step."""
        if self.steps is None:
            is_power_of_two = self.done & (self.done - 1) == 0
            return is_power_of_two
        halvings = [round(self.steps / 2**k) for k in range(1, HALVINGS + 1)]
        return any(self.done == max(1, step) for step in halvings)

    def _keep(self) -> None:
        snapshot = self._present()
        if self.folder is None:
            self.snapshots[self.done] = snapshot
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"step-{self.done:08d}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in snapshot.items()}
        with drafted(file) as draft:
            save_file(tensors, draft, {"format": "pt"})
        self.snapshots[self.done] = file

    def _learned(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Names of the numbers that the optimizer learned; of each its dict and its key there."""
        if self.optimizer is None:
            return
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if key not in MOMENTA and isinstance(value, Tensor | int | float):
                    yield f"{OPTIMIZER}{name}/{key}", state, key
        for k, group in enumerate(self.optimizer.param_groups):
            if is_flat(group):
                yield f"{OPTIMIZER}group {k}/hess", group, "hess"
        if hasattr(self.optimizer, "current_step"):  # ivon-opt has one count for all parameters
            yield f"{OPTIMIZER}current_step", vars(self.optimizer), "current_step"

    def _present(self) -> State:
        """Weights, buffers and what was learned, as they are now."""
        tensors = dict(state_of(self.model))
        for name, state, key in self._learned():
            tensors[name] = torch.as_tensor(state[key])
        if self.recorder is not None:
            recorded = self.recorder.state_dict()
            for name in COUNTS:
                tensors[f"{RECORDER}{name}/"] = torch.tensor(recorded[name])
            for name, mean in recorded["means"].items():
                tensors[f"{RECORDER}{name}"] = mean
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def _write(self, snapshot: State) -> None:
        """Put a snapshot back into model, optimizer and recorder."""
        with torch.no_grad():
            for name, tensor in state_of(self.model).items():
                tensor.copy_(snapshot[name])
            for name, state, key in list(self._learned()):
                if name not in snapshot:
                    continue
                if isinstance(state[key], Tensor):
                    state[key].copy_(snapshot[name])
                else:
                    state[key] = snapshot[name].item()
        if self.recorder is not None:
            self._write_recorder(self.recorder, snapshot)

    def _write_recorder(self, recorder: KroneckerRecorder, snapshot: State) -> None:
        recorder.load_state_dict(self._recorded_in(recorder, snapshot))

    def _recorded_in(self, recorder: KroneckerRecorder, snapshot: State) -> dict[str, Any]:
        """The recorder's state at a snapshot."""
        means = {
            name.removeprefix(RECORDER): tensor
            for name, tensor in snapshot.items()
            if name.startswith(RECORDER)
        }
        counts = {name: int(means.pop(f"{name}/")) for name in COUNTS}
        return {**recorder.state_dict(), **counts, "means": means}

    def begin(self, step: int = 0) -> None:
        """Call this before the first step, whose weights are kept too; or, where a training is
        resumed, after so many steps: the folder's snapshots of them stay."""
        self.done = step
        self.snapshots = {}
        self._steps_by_look = {}
        for file in self._files():
            file_step = int(file.stem.removeprefix("step-"))
            is_of_resumed_training = step > 0 and file_step <= step
            if is_of_resumed_training:
                self.snapshots[file_step] = file
            else:
                file.unlink()
        if step == 0:
            self._keep()

    def _files(self) -> list[Path]:
        if self.folder is None:
            return []
        return sorted(self.folder.glob("step-*.safetensors"))

    @property
    def first(self) -> State | None:
        """The weights and buffers that training began with; None where they were not kept."""
        if 0 not in self.snapshots:
            return None
        snapshot = read(self.snapshots[0])
        return {name: snapshot[name] for name in state_of(self.model)}

    def settle(self) -> None:
        """At the end: keep the first weights and those near 1/8, 1/4 and 1/2 alone."""
        useful_steps = {0, *self._thinned(self.model)}
        for step in self.snapshots.keys() - useful_steps:
            snapshot = self.snapshots.pop(step)
            if isinstance(snapshot, Path):
                snapshot.unlink(missing_ok=True)

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
        make: Any = Posterior.from_recorder
        source: Any = self.recorder
        if source is None:
            make = Posterior.from_optimizer
            source = self.optimizer
        now = partial(
            make,
            source,
            self.model,
            n_data=n_data,
            prior_precision=prior_precision,
            initial=initial,
        )
        return self.before(None, now)

    def before(self, last: Posterior | None, now: Callable[[], Posterior]) -> Posterior:
        """A posterior with the earlier ones: what ``now`` answers of model, optimizer and recorder
        as they were at the snapshots.

        Args:
            last: the posterior; None: what ``now`` answers at the end.
            now: makes a posterior of model, optimizer and recorder.
        """
        present = self._present()
        steps = self._thinned(self.model)
        states = [read(self.snapshots[step]) for step in steps]
        earlier = []
        try:
            for k, state in enumerate(states):
                self._write(state)
                self._narrow([*states, present], k)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", InitialPrecisionWarning)  # usual so early
                    q = now()
                earlier.append(q.changed(record={**q.record, "checkpoint": k + 1}))
            self._write(present)
            self._narrow([*states, present], len(states))
            end = now() if last is None else last
        finally:
            self._write(present)
        return end.changed(earlier=tuple(earlier))

    def _narrow(self, states: Sequence[State], k: int) -> None:
        """Let the recorder have what it saw between the snapshots before and after the k-th, the
        last of which is the end."""
        if self.recorder is None:
            return
        recorded = [self._recorded_in(self.recorder, state) for state in states]
        before = recorded[k - 1] if k else None
        after = recorded[min(k + 1, len(recorded) - 1)]
        self.recorder.load_state_dict(between(before, after))


def _look(model: nn.Module) -> tuple[float, ...]:
    """Some numbers of the first and the last weights, which identify a step."""
    trained = [p.detach().flatten() for p in model.parameters() if p.requires_grad]
    samples = [_sample(weights).double() for weights in (trained[0], trained[-1])]
    return tuple(torch.cat(samples).tolist())


def _sample(weights: Tensor) -> Tensor:
    stride = max(1, len(weights) // LOOKS)
    return weights[::stride][:LOOKS]

"""Checkpoints of a training, kept while it runs: about 1/8, 1/4 and 1/2 of it, and the end.

Each snapshot is taken at about twice the step of the one before. Wherever a training ends, or goes
back to, some snapshots are near 1/8, 1/4 and 1/2 of the steps up to its final weights.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import instance, one_of, path_of, positive_int, some, whole
from blr_analysis.errors import (
    InitialPrecisionWarning,
    InputError,
    ModelError,
    OptimizerError,
    StorageError,
    told_as,
)
from blr_analysis.files import drafted
from blr_analysis.files.shards import save_file
from blr_analysis.models import unwrapped
from blr_analysis.modes import modes_of
from blr_analysis.posterior.capture.readers import is_flat
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.recorder import in_bytes
from blr_analysis.ranks import is_sharded
from blr_analysis.recordings import USUAL_STEPS, Recordings, checkpoint_steps
from blr_analysis.snapshots import State, checked_state, equal, read, state_of, thinned

SAMPLED_NUMBERS = 8  # of a tensor; they identify the weights of a step
OPTIMIZER = "optimizer/"  # prefix of the optimizer's numbers in a snapshot
MOMENTA = ("exp_avg", "momentum", "momentum_buffer")  # a posterior does not need them


class Checkpoints:
    """Keep a training's checkpoints: ``checkpoints.step()`` after every step of the optimizer.

    Give the object to :class:`blr_analysis.Task` as ``checkpoints=``. If early stopping restored
    the weights of an earlier step, the training is taken to end at that step.

    Args:
        model: the model that is trained.
        steps: the largest number of steps of the training; None: powers of two are kept.
        folder: the folder for the snapshots and the optimizer's numbers (safetensors); None: they
            stay in memory.
        optimizer: an optimizer of this package, Adam or the like, which learns a posterior while
            it trains.
        structure: "kron" records the Kronecker factors of about one pass in ten of the training
            (:mod:`blr_analysis.recordings`). They are as large as their posterior: I² + O² numbers
            for a layer of I inputs and O outputs, the gradient beside them, and the same once more
            for each checkpoint (in the folder, if there is one). Labels are drawn from the
            predictions where the loss is a cross-entropy of any scale; any other loss must be a
            mean over the examples of a pass.

    Raises:
        InputError: no module, no number of steps, no optimizer, an unknown structure.
        ModelError: the model is divided among processes.

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
        if any(map(is_sharded, self.model.parameters())):
            raise ModelError(
                "the model is divided among processes: save its full state dict at some steps, and "
                "give them as Task(checkpoints=)"
            )
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            name = type(optimizer).__name__
            raise InputError(f"optimizer must be the torch optimizer that trains, got {name}")
        self.optimizer = optimizer
        self.steps = None if steps is None else positive_int("steps", steps)
        self.folder = None if folder is None else Path(path_of(folder)).expanduser()
        self.recordings: Recordings | None = None
        if structure is not None:
            one_of("structure", structure, ("kron",))
            self.recordings = Recordings(self.model, self.steps, self.folder)
        self.done = 0  # steps so far
        self.snapshots: dict[int, State | Path] = {}  # by step
        self.modes: dict[str, bool] | None = None  # of the modules, while they train
        self._sampled: tuple[str, ...] = ()  # names of the parameters that identify a step
        self._step_of_sample: dict[tuple[float, ...], int] = {}

    def __repr__(self) -> str:
        steps = ", ".join(str(step) for step in self._thinned(self.model))
        facts = f"{self.done} steps, kept: {steps or 'none'}"
        if self.recordings is None:
            return f"Checkpoints({facts})"
        return f"Checkpoints({facts}; up to {in_bytes(self.bytes_in_memory)} of memory)"

    def step(self) -> None:
        """Call this after each step of the optimizer.

        Raises:
            OptimizerError: inside ``sampled_params``, where the weights are a draw.
            ModelError: no parameter trains.
            StorageError: the folder cannot be written.
        """
        if getattr(self.optimizer, "_open", None) is not None:
            raise OptimizerError("checkpoints.step() belongs outside sampled_params")
        sample = _sample_of(self._sampled_parameters())
        self.done += 1
        self._step_of_sample[sample] = self.done
        is_due = self._is_due()
        if self.modes is None or is_due:
            self.modes = modes_of(self.model)
        if is_due:
            self._keep()
        if self.recordings is not None:
            self.recordings.step(self.done)

    @property
    def bytes_in_memory(self) -> int:
        """The bytes of memory that all snapshots and recordings take at most."""
        of_recordings = 0
        if self.recordings is not None:
            of_recordings = self.recordings.bytes_in_memory
        if self.folder is not None:
            return of_recordings
        one_snapshot = sum(t.nbytes for t in state_of(self.model).values())
        if self.optimizer is not None:  # it learns a precision beside each weight
            one_snapshot += sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        count = 1 + len(checkpoint_steps(self.steps or USUAL_STEPS, 0))
        return count * one_snapshot + of_recordings

    def _is_due(self) -> bool:
        """Whether a snapshot is taken at this step."""
        return self.done in checkpoint_steps(self.steps, self.done)

    def _keep(self) -> None:
        """Keep a snapshot of this step, in memory or in the folder."""
        snapshot = self._present()
        if self.folder is None:
            self.snapshots[self.done] = snapshot
            return
        with told_as(StorageError, f"{str(self.folder)!r} cannot be written"):
            self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"step-{self.done:08d}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in snapshot.items()}
        with drafted(file) as draft:
            save_file(tensors, draft, {"format": "pt"})
        self.snapshots[self.done] = file

    def _learned(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """The numbers that the optimizer learned: for each a name, its dict and its key there."""
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
        """The present weights, buffers and numbers of the optimizer, copied."""
        tensors = dict(state_of(self.model))
        for name, state, key in self._learned():
            tensors[name] = torch.as_tensor(state[key])
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def _write(self, snapshot: State) -> None:
        """Put a snapshot back into model and optimizer."""
        missing = sorted(state_of(self.model).keys() - snapshot.keys())
        if missing:
            raise ModelError(
                f"the checkpoints lack {some(missing)}, which the training unfroze later; "
                "unfreeze it before you make Checkpoints"
            )
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

    def begin(self, step: int = 0) -> None:
        """Call this before the first step, or where a training is resumed after ``step`` steps.

        The first weights become a snapshot too. Of a resumed training, the folder's snapshots up to
        ``step`` stay.
        """
        self.done = step
        self.snapshots = {}
        self._step_of_sample = {}
        for file in self._files():
            file_step = int(file.stem.removeprefix("step-"))
            is_of_resumed_training = step > 0 and file_step <= step
            if is_of_resumed_training:
                self.snapshots[file_step] = file
            else:
                file.unlink()
        if self.recordings is not None:
            self.recordings.begin(step)
        if step == 0:
            self._keep()

    def _files(self) -> list[Path]:
        """The snapshots in the folder."""
        if self.folder is None:
            return []
        return sorted(self.folder.glob("step-*.safetensors"))

    @property
    def first(self) -> State | None:
        """The weights and buffers at the first step; None where :meth:`begin` was not called."""
        if 0 not in self.snapshots:
            return None
        snapshot = read(self.snapshots[0])
        return {name: snapshot[name] for name in state_of(self.model)}

    def settle(self) -> None:
        """At the end: keep only the first weights and those near 1/8, 1/4 and 1/2."""
        useful_steps = {0, *self._thinned(self.model)}
        for step in self.snapshots.keys() - useful_steps:
            snapshot = self.snapshots.pop(step)
            if isinstance(snapshot, Path):
                snapshot.unlink(missing_ok=True)
        if self.recordings is not None:
            self.recordings.settle(self._thinned(self.model), self._end(self.model))

    def states(self, model: nn.Module) -> list[State | Path]:
        """The snapshots nearest 1/8, 1/4 and 1/2 of the steps up to a model's weights."""
        return [self.snapshots[step] for step in self._thinned(unwrapped(model))]

    def _thinned(self, model: nn.Module) -> list[int]:
        """The steps of :meth:`states`."""
        return thinned(list(self.snapshots), self._end(model))

    def _end(self, model: nn.Module) -> int:
        """The step of a model's weights; the last one if they are not recognised."""
        parameters = dict(model.named_parameters())
        if not parameters.keys() >= set(self._sampled):
            return self.done
        sample = _sample_of([parameters[name] for name in self._sampled])
        return self._step_of_sample.get(sample, self.done)

    def _sampled_parameters(self) -> list[nn.Parameter]:
        """The parameters that identify a step: the first and the last that train."""
        parameters = [self.model.get_parameter(name) for name in self._sampled]
        if parameters and all(p.requires_grad for p in parameters):
            return parameters
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if not trained:
            raise ModelError("no parameter of the model trains: unfreeze some")
        first_name, first = trained[0]
        last_name, last = trained[-1]
        self._sampled = (first_name, last_name)
        return [first, last]

    def posterior(
        self, *, n_data: int, prior_precision: Any = None, initial: Any = None
    ) -> Posterior:
        """The posterior learned while training, with the earlier ones; no pass over the data.

        Args:
            n_data: N, the number of training examples.
            prior_precision: δ; None: :meth:`blr_analysis.Posterior.from_optimizer` finds it. With
                a structure it is found as in a fit, by the recorded factors and the mean of the
                recorded gradients, or by the factors' evidence where labels were not drawn.
            initial: θ₀, the prior's mean; None: with a structure the first weights, as in a fit by
                the recipe, where :meth:`begin` has kept them; else 0.

        Raises:
            InputError: neither an optimizer nor a structure was given.
        """
        if self.optimizer is None and self.recordings is None:
            raise InputError('Checkpoints keeps no posterior: give optimizer= or structure="kron"')
        settings = {"n_data": n_data, "prior_precision": prior_precision}
        if self.recordings is None:
            optimizer: Any = self.optimizer
            now = partial(
                Posterior.from_optimizer, optimizer, self.model, initial=initial, **settings
            )
            return self.before(None, now)
        recorder = self.recordings.recorder
        first = self.first if initial is None else None

        def recorded_now() -> Posterior:
            mean_of_prior = initial
            if first is not None and not equal(first, state_of(self.model)):
                mean_of_prior = first
            return Posterior.from_recorder(recorder, self.model, initial=mean_of_prior, **settings)

        return self.before(None, recorded_now)

    def before(self, last: Posterior | None, now: Callable[[], Posterior]) -> Posterior:
        """A posterior with the earlier ones.

        Each earlier posterior is what ``now`` returns while model, optimizer and recorder are as
        they were at a snapshot.

        Args:
            last: the posterior at the end; None: what ``now`` returns there.
            now: makes a posterior of model, optimizer and recorder as they are when it is called.
        """
        present = self._present()
        end = self._end(self.model)
        earlier = []
        with self._narrowed() as narrow:
            try:
                for number, step in enumerate(self._thinned(self.model), start=1):
                    self._write(read(self.snapshots[step]))
                    narrow(step, end)
                    with warnings.catch_warnings():
                        # Early in a training a precision is often still the initial one.
                        warnings.simplefilter("ignore", InitialPrecisionWarning)
                        q = now()
                    earlier.append(q.changed(record={**q.record, "checkpoint": number}))
            finally:
                self._write(present)
            if last is None:
                narrow(end, end)
                last = now()
        return last.changed(earlier=tuple(earlier))

    def _narrowed(self) -> AbstractContextManager[Callable[[int, int], None]]:
        """As :meth:`Recordings.narrowed`; without recordings its function does nothing."""
        if self.recordings is None:
            return nullcontext(lambda step, end: None)
        return self.recordings.narrowed()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs for :meth:`load_state_dict`, without the folder's files."""
        in_memory = {
            step: snapshot
            for step, snapshot in self.snapshots.items()
            if not isinstance(snapshot, Path)
        }
        state: dict[str, Any] = {"done": self.done, "snapshots": in_memory}
        if self.recordings is not None:
            state["recordings"] = self.recordings.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Raises:
            InputError: something else.
            ModelError: the state of another model.
        """
        last_step = whole(state.get("done")) if isinstance(state, Mapping) else None
        if last_step is None or not _are_snapshots(state.get("snapshots")):
            raise InputError("this is no state of Checkpoints; pass its state_dict()")
        for step, snapshot in state["snapshots"].items():
            checked_state(snapshot, self.model, f"the state's snapshot of step {step}")
        self.begin(last_step)
        for step, snapshot in state["snapshots"].items():
            self.snapshots[int(step)] = dict(snapshot)
        if self.recordings is not None and "recordings" in state:
            self.recordings.load_state_dict(state["recordings"], self.done)


def _are_snapshots(value: Any) -> bool:
    """Whether a value maps steps to mappings of names to tensors."""
    if not isinstance(value, Mapping):
        return False
    steps_are_whole = all(whole(step) is not None for step in value)
    return steps_are_whole and all(isinstance(snapshot, Mapping) for snapshot in value.values())


def _sample_of(parameters: Sequence[Tensor]) -> tuple[float, ...]:
    """Some evenly spaced numbers of each parameter, which identify a step."""
    numbers: list[float] = []
    for parameter in parameters:
        stride = max(1, parameter.numel() // SAMPLED_NUMBERS)
        numbers += parameter.detach().flatten()[: SAMPLED_NUMBERS * stride : stride].tolist()
    return tuple(numbers)

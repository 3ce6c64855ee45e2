"""Kronecker factors near each checkpoint of a training, recorded while it goes on.

Curvature belongs to the weights at which it is measured, and these move. The recorder therefore
records :data:`ENOUGH_PASSES` or more near a checkpoint, up to every pass and down to one in
:data:`NEAR_INTERVAL`, and one in :data:`FAR_INTERVAL` elsewhere.

The posterior at the checkpoint of step t has the mean of the passes from t/√2 to √2 t, and most of
these are near t; for the last step the passes go to the end. The recorder adds up all passes from
the beginning. A mark is its sums at a step √2 t, and a mean is the difference of two marks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.files import drafted, storage
from blr_analysis.files.shards import save_file
from blr_analysis.posterior.recorder import COUNTS, KroneckerRecorder, between
from blr_analysis.snapshots import State, read

FAR_INTERVAL = 40  # passes, of which one is recorded, far from a checkpoint
NEAR_INTERVAL = 3  # passes, of which at least one is recorded, near a checkpoint
ENOUGH_PASSES = 20  # that are recorded near a checkpoint, where it has so many
NEAR_SHARE = 0.055  # of a checkpoint's step: so near it is
MIN_NEAR_STEPS = 2  # within this distance every pass is recorded, for the first checkpoints
MIN_PASSES = 5  # in a mean, where so many were recorded
USUAL_STEPS = 1000  # of a training of unknown length, to say how much memory it takes
HALVINGS = 6  # of the length of a training: the first checkpoint is at 1/64 of it
FILE = "recorded-*.safetensors"
LOST = (
    "the recordings from before the training was resumed are missing: factors are of the later "
    "steps alone"
)


def checkpoint_steps(steps: int | None, step: int) -> list[int]:
    """The steps at which a training of ``steps`` steps has its checkpoints.

    Without the number of steps, checkpoints are at the powers of two, and those on both sides of
    ``step`` are returned.

    >>> checkpoint_steps(64, 1), checkpoint_steps(None, 100)
    ([1, 2, 4, 8, 16, 32], [64, 128])
    """
    if steps is None:
        power = 2 ** (max(1, step).bit_length() - 1)
        return [power, 2 * power]
    return [*_halved(steps)]


@cache
def _halved(steps: int) -> tuple[int, ...]:
    """A half, a quarter, … of so many steps, the smallest first."""
    return tuple(sorted({max(1, round(steps / 2**k)) for k in range(1, HALVINGS + 1)}))


def _is_marked(steps: int | None, step: int) -> bool:
    """Whether a step is √2 times that of a checkpoint."""
    if steps is not None:
        return step in _marked_steps(steps)
    return step in [round(math.sqrt(2) * checkpoint) for checkpoint in checkpoint_steps(None, step)]


@cache
def _marked_steps(steps: int) -> frozenset[int]:
    return frozenset(round(math.sqrt(2) * checkpoint) for checkpoint in _halved(steps))


class Recordings:
    """The Kronecker factors near each checkpoint, from one :class:`KroneckerRecorder`.

    Args:
        model: the model that is trained.
        steps: the number of steps of the training; None: checkpoints are at powers of two.
        folder: the folder for the files of marks; None: marks stay in memory.

    Raises:
        ModelError: nothing to train, parameters of a layer without a rule, or a sharded model.
    """

    def __init__(self, model: nn.Module, steps: int | None, folder: Path | None) -> None:
        self.steps = steps
        self.folder = folder
        self.recorder = KroneckerRecorder(model, every=1, labels="drawn")
        self.marks: dict[int, State | Path] = {}  # the recorder's sums up to a step
        self._lacks_earlier_sums = False  # of the steps before the training was resumed
        self._choose_interval(0)

    @property
    def bytes_in_memory(self) -> int:
        """The bytes of memory that the recorder and its marks take at most."""
        n_marks = 0
        if self.folder is None:
            n_marks = len(checkpoint_steps(self.steps or USUAL_STEPS, 0))
        return (1 + n_marks) * self.recorder.nbytes

    def begin(self, step: int) -> None:
        """Call this before the first step, or where a training is resumed after ``step`` steps.

        The marks in the folder up to that step stay. :meth:`resume` or :meth:`load_state_dict`
        restores the recorder's sums.
        """
        self.marks = {}
        self._lacks_earlier_sums = step > 0
        for file in self._files():
            marked_step = int(file.stem.rpartition("-")[2])
            if marked_step <= step:
                self.marks[marked_step] = file
            else:
                file.unlink()
        self._choose_interval(step)

    def _files(self) -> list[Path]:
        """The files of marks in the folder."""
        if self.folder is None:
            return []
        return sorted(self.folder.glob(FILE))

    def step(self, step: int) -> None:
        """Call this after each step, with the number of steps so far."""
        if self._lacks_earlier_sums:
            self._drop_marks()
        if _is_marked(self.steps, step):
            self._mark(step)
        self._choose_interval(step)

    def _choose_interval(self, step: int) -> None:
        """Record many passes of the next step if it is near a checkpoint, and few passes if not."""
        self.recorder.every = self._interval(step + 1)

    def _interval(self, step: int) -> int:
        """The passes of a step, of which one is recorded."""
        targets = checkpoint_steps(self.steps, step)
        if self.steps is not None:
            targets.append(self.steps)
        distances = [abs(step - target) for target in targets]
        if min(distances) <= MIN_NEAR_STEPS:
            return 1
        distance, target = min(
            zip(distances, targets, strict=True), key=lambda pair: pair[0] / pair[1]
        )
        if distance > NEAR_SHARE * target:
            return FAR_INTERVAL
        sides = 1 if target == self.steps else 2  # of the last step only the steps before it
        steps_near = sides * NEAR_SHARE * target
        return min(NEAR_INTERVAL, max(1, int(steps_near / ENOUGH_PASSES)))

    def _mark(self, step: int) -> None:
        """Keep the recorder's sums up to this step, in memory or in the folder."""
        if self.folder is None:
            state = tensors_of(self.recorder.state_dict())
            self.marks[step] = {name: tensor.cpu() for name, tensor in state.items()}
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / FILE.replace("*", f"{step:08d}")
        self.save(file)
        self.marks[step] = file

    def save(self, file: Path) -> None:
        """Write the recorder's sums, beside the target and renamed into it."""
        state = tensors_of(self.recorder.state_dict())
        tensors = {name: tensor.contiguous() for name, tensor in state.items()}
        with drafted(file) as draft:
            save_file(tensors, draft, {"format": "pt"})

    def keep(self, file: Path) -> None:
        """Write the recorder's whole state, for :meth:`resume`."""
        state = self.recorder.state_dict()
        record = {"joints": state["joints"]}
        storage.write(file, tensors_of(state), record)

    def resume(self, file: Path, step: int) -> None:
        """Go on after ``step`` steps from a file that :meth:`keep` wrote.

        Raises:
            StorageError: the file is missing or damaged.
            ModelError: it is of another model.
        """
        tensors, record = storage.read(file)
        parts = {"joints": record["joints"]}
        self.recorder.load_state_dict(state_of_tensors(self.recorder, tensors) | parts)
        self._lacks_earlier_sums = False
        self._choose_interval(step)

    def _drop_marks(self) -> None:
        """Drop the marks of the steps before a resumption, whose sums the recorder lacks."""
        self._lacks_earlier_sums = False
        for mark in self.marks.values():
            if isinstance(mark, Path):
                mark.unlink(missing_ok=True)
        self.marks = {}
        warnings.warn(LOST, stacklevel=3)

    def settle(self, steps: Sequence[int], end: int) -> None:
        """Keep only the marks around the checkpoints of these steps and around the last step."""
        everything = self.recorder.state_dict()
        useful_marks: set[int | None] = set()
        for step in [*steps, end]:
            useful_marks.update(self._bounds(step, end, everything))
        for mark in self.marks.keys() - useful_marks:
            file = self.marks.pop(mark)
            if isinstance(file, Path):
                file.unlink(missing_ok=True)

    @contextmanager
    def narrowed(self) -> Iterator[Callable[[int, int], None]]:
        """Inside, the recorder can be narrowed to the passes near a step.

        Yields:
            A function ``narrow(step, end)``: the recorder then holds the passes near ``step``
            alone, a checkpoint's or the last one, ``end``. Afterwards it holds all passes again.
        """
        everything = self.recorder.state_dict()

        def narrow(step: int, end: int) -> None:
            lower, upper = self._bounds(step, end, everything)
            earlier = self._marked(lower, None)
            later = self._marked(upper, everything)
            assert later is not None
            self.recorder.load_state_dict(between(earlier, later))

        try:
            yield narrow
        finally:
            self.recorder.load_state_dict(everything)

    def _bounds(
        self, step: int, end: int, everything: dict[str, Any]
    ) -> tuple[int | None, int | None]:
        """The marks below and above a step, at least :data:`MIN_PASSES` passes apart if possible.

        None below is the beginning of the training, None above its end.
        """
        marks_below = [mark for mark in self.marks if mark < step]
        marks_above = [mark for mark in self.marks if mark >= step]
        below: list[int | None] = [*sorted(marks_below, reverse=True), None]
        above: list[int | None] = [*sorted(marks_above), None]
        if step >= end:
            above = [None]
        while len(below) + len(above) > 2:
            earlier = self._marked(below[0], None)
            later = self._marked(above[0], everything)
            assert later is not None
            passes_before = earlier["recorded"] if earlier else 0
            if later["recorded"] - passes_before >= MIN_PASSES:
                break
            nearest_first = below if len(below) > 1 else above
            nearest_first.pop(0)
        return below[0], above[0]

    def _marked(self, mark: int | None, default: dict[str, Any] | None) -> dict[str, Any] | None:
        """The recorder's state at a mark; without a mark the default."""
        if mark is None:
            return default
        return state_of_tensors(self.recorder, read(self.marks[mark]))

    def state_dict(self) -> dict[str, Any]:
        """The recorder's state and the marks in memory, for :meth:`load_state_dict`."""
        marks = {step: read(mark) for step, mark in self.marks.items() if isinstance(mark, dict)}
        return {"recorder": self.recorder.state_dict(), "marks": marks}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Go on after ``step`` steps from what :meth:`state_dict` returned."""
        self.recorder.load_state_dict(state["recorder"])
        for marked_step, mark in state["marks"].items():
            self.marks[int(marked_step)] = dict(mark)
        self._lacks_earlier_sums = False
        self._choose_interval(step)


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The counts, means and gradients of a recorder's state as one dict of tensors."""
    counts = {f"count/{name}": torch.tensor(state[name]) for name in COUNTS}
    means = {f"mean/{name}": mean for name, mean in state["means"].items()}
    gradients = {f"gradient/{name}": tensor for name, tensor in state["gradients"].items()}
    return counts | means | gradients


def state_of_tensors(recorder: KroneckerRecorder, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state whose :func:`tensors_of` these are, for a recorder of the same model."""
    state = dict(recorder.state_dict())
    for name in COUNTS:
        state[name] = int(tensors[f"count/{name}"])
    state["means"] = _with_prefix("mean/", tensors)
    state["gradients"] = _with_prefix("gradient/", tensors)
    return state


def _with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, by the names behind it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }

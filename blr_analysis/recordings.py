"""Kronecker factors near each checkpoint of a training, recorded while it goes on.

Curvature belongs to the weights at which it is taken, and these move. So every pass near a
checkpoint is recorded, and one in :data:`EVERY` elsewhere: of a training of known length about one
pass in five. The posterior at the checkpoint of step t has the mean of the passes from t/√2 to √2 t
(of the last step, to the end), most of which are near t. What was recorded is added up from the
beginning, and marked at the steps √2 t; a mean is the difference of two marks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.files import drafted, storage
from blr_analysis.files.shards import save_file
from blr_analysis.posterior.recorder import COUNTS, KroneckerRecorder, between
from blr_analysis.snapshots import State, read

EVERY = 20  # passes for one that is recorded, far from a checkpoint
NEAR = 0.055  # of the steps before a checkpoint: so far from it every pass is recorded
FEW = 2  # steps, at the least
FEWEST = 5  # passes of which a mean is taken, where there are so many
HALVINGS = 6  # of the length of a training: checkpoints from 1/64 of it on
FILE = "recorded-*.safetensors"
LOST = (
    "what was recorded before the training was resumed is not there: factors are of the later "
    "steps alone"
)


def checkpoint_steps(steps: int | None, step: int) -> list[int]:
    """The steps of checkpoints, of a training of so many steps; None: of those near this step.

    >>> checkpoint_steps(64, 1), checkpoint_steps(None, 100)
    ([1, 2, 4, 8, 16, 32], [64, 128])
    """
    if steps is None:
        power = 2 ** (max(1, step).bit_length() - 1)
        return [power, 2 * power]
    return sorted({max(1, round(steps / 2**k)) for k in range(1, HALVINGS + 1)})


class Recordings:
    """What a :class:`KroneckerRecorder` sees near each checkpoint.

    Args:
        model: what is trained.
        steps: how many steps there will be; None: checkpoints are at powers of two.
        folder: where marks are written; None: they stay in memory.

    Raises:
        ModelError: nothing to train, parameters of a layer without a rule, or a sharded model.
    """

    def __init__(self, model: nn.Module, steps: int | None, folder: Path | None) -> None:
        self.steps = steps
        self.folder = folder
        self.recorder = KroneckerRecorder(model, every=1, labels="drawn")
        self.marks: dict[int, State | Path] = {}  # what was recorded up to a step
        self._lacks_sums = False  # those of the steps before a resumption
        self._look_ahead(0)

    def begin(self, step: int) -> None:
        """Before the first step, or where a training goes on after so many: the marks of these
        stay, and :meth:`resume` or :meth:`load_state_dict` gives back what was recorded."""
        self.marks = {}
        self._lacks_sums = step > 0
        for file in sorted(self.folder.glob(FILE)) if self.folder is not None else []:
            marked_step = int(file.stem.rpartition("-")[2])
            if marked_step <= step:
                self.marks[marked_step] = file
            else:
                file.unlink()
        self._look_ahead(step)

    def step(self, done: int) -> None:
        """After so many steps."""
        if self._lacks_sums:
            self._forget()
        if any(done == round(math.sqrt(2) * t) for t in checkpoint_steps(self.steps, done)):
            self._mark(done)
        self._look_ahead(done)

    def _look_ahead(self, done: int) -> None:
        """Whether every pass of the next step is recorded."""
        self.recorder.every = 1 if self._is_near(done + 1) else EVERY

    def _is_near(self, step: int) -> bool:
        targets = checkpoint_steps(self.steps, step)
        if self.steps is not None:
            targets.append(self.steps)
        return any(abs(step - t) <= max(FEW, NEAR * t) for t in targets)

    def _mark(self, step: int) -> None:
        if self.folder is None:
            state = tensors_of(self.recorder.state_dict())
            self.marks[step] = {name: x.detach().cpu().clone() for name, x in state.items()}
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / FILE.replace("*", f"{step:08d}")
        self.save(file)
        self.marks[step] = file

    def save(self, file: Path) -> None:
        """Write what was recorded so far, beside its place and renamed into it."""
        tensors = {n: x.contiguous() for n, x in tensors_of(self.recorder.state_dict()).items()}
        with drafted(file) as draft:
            save_file(tensors, draft, {"format": "pt"})

    def keep(self, file: Path) -> None:
        """Write all that was recorded, for :meth:`resume`."""
        state = self.recorder.state_dict()
        record = {"joints": state["joints"], "positions": state["positions"]}
        storage.write(file, tensors_of(state), record)

    def resume(self, file: Path, done: int) -> None:
        """Go on, after so many steps, from what :meth:`keep` wrote.

        Raises:
            StorageError: the file is not there, or damaged.
            ModelError: it is of another model.
        """
        tensors, record = storage.read(file)
        parts = {"joints": record["joints"], "positions": record["positions"]}
        self.recorder.load_state_dict(state_of_tensors(self.recorder, tensors) | parts)
        self._lacks_sums = False
        self._look_ahead(done)

    def _forget(self) -> None:
        """Without the sums of the steps before a resumption, marks of them are of no use."""
        self._lacks_sums = False
        for mark in self.marks.values():
            if isinstance(mark, Path):
                mark.unlink(missing_ok=True)
        self.marks = {}
        warnings.warn(LOST, stacklevel=3)

    def settle(self, steps: Sequence[int], end: int) -> None:
        """Keep the marks that the checkpoints of these steps, and the end, are between."""
        everything = self.recorder.state_dict()
        useful = {mark for step in [*steps, end] for mark in self._bounds(step, end, everything)}
        for mark in self.marks.keys() - useful:
            file = self.marks.pop(mark)
            if isinstance(file, Path):
                file.unlink(missing_ok=True)

    @contextmanager
    def narrowed(self) -> Iterator[Callable[[int, int], None]]:
        """Inside, the function that is returned lets the recorder have what it saw near a step
        alone: of a checkpoint, or the last one; its second argument is the last one. After it, the
        recorder has all that it saw."""
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
        """The marks around a step; None below: the beginning, and above: all that was seen.

        They are moved apart until :data:`FEWEST` passes lie between them.
        """
        below: list[int | None] = [*sorted((m for m in self.marks if m < step), reverse=True), None]
        above: list[int | None] = [*sorted(m for m in self.marks if m >= step), None]
        if step >= end:
            above = [None]
        while len(below) + len(above) > 2:
            earlier = self._marked(below[0], None)
            later = self._marked(above[0], everything)
            assert later is not None
            if later["recorded"] - (earlier["recorded"] if earlier else 0) >= FEWEST:
                break
            widened = below if len(below) > 1 else above
            widened.pop(0)
        return below[0], above[0]

    def _marked(self, mark: int | None, default: dict[str, Any] | None) -> dict[str, Any] | None:
        """The recorder's state at a mark."""
        if mark is None:
            return default
        return state_of_tensors(self.recorder, read(self.marks[mark]))

    def state_dict(self) -> dict[str, Any]:
        """All that was recorded, to go on from."""
        marks = {step: read(mark) for step, mark in self.marks.items() if isinstance(mark, dict)}
        return {"recorder": self.recorder.state_dict(), "marks": marks}

    def load_state_dict(self, state: Mapping[str, Any], done: int) -> None:
        """Go on from what :meth:`state_dict` gave, after so many steps."""
        self.recorder.load_state_dict(state["recorder"])
        self.marks |= {int(step): dict(mark) for step, mark in state["marks"].items()}
        self._lacks_sums = False
        self._look_ahead(done)


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The counts and means of a recorder's state, as safetensors hold them."""
    counts = {f"count/{name}": torch.tensor(state[name]) for name in COUNTS}
    means = {f"mean/{name}": mean for name, mean in state["means"].items()}
    return counts | means | {f"gradient/{name}": g for name, g in state["gradients"].items()}


def state_of_tensors(recorder: KroneckerRecorder, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The reverse, for a recorder of the same model."""
    counts = {name: int(tensors[f"count/{name}"]) for name in COUNTS}
    of_kind: dict[str, dict[str, Tensor]] = {"count": {}, "mean": {}, "gradient": {}}
    for name, tensor in tensors.items():
        kind, _, key = name.partition("/")
        of_kind[kind][key] = tensor
    return {
        **recorder.state_dict(),
        **counts,
        "means": of_kind["mean"],
        "gradients": of_kind["gradient"],
    }

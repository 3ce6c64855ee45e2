"""Where the examples are in what every layer sees, found out by running batches of two sizes.

A dimension belongs to the examples when it grows with the batch. A tensor that does not grow at all
(a table of position embeddings) is made once for all examples. It is lifted to one row per example,
so that each example gets its own gradient, provided that the model's outputs stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.layers import Axis, axis_between, upcast
from blr_analysis.backprop.reading import Axes
from blr_analysis.backprop.record import (
    Recording,
    SavedBytes,
    SharedOutputs,
    Unit,
    Visit,
    record,
    rounding,
)
from blr_analysis.errors import BLRError
from blr_analysis.task import Task

LARGER = (2, 0, 1, 0, 1)  # the probe's examples in a larger batch: all at other places, some twice
SIZES = (3, len(LARGER))


@dataclass(frozen=True)
class Layout:
    """Where the examples are in a recorded probe.

    Attributes:
        recording: the probe.
        saved: bytes that autograd keeps for the recording, without the weights.
        axes: where the examples are, by call.
        shared: the outputs that were lifted to one row per example.
        unknown: parameters of calls in which the examples could not be located.
    """

    recording: Recording
    saved: int
    axes: dict[tuple[str, int], Axes]
    shared: SharedOutputs
    unknown: frozenset[str]


def probe_indices(n_data: int) -> tuple[Tensor, Tensor]:
    """Three examples from all over the data, and the same ones as a batch of five.

    The same ones, so that a collate function that pads to the longest gives equal lengths. Five,
    some of them twice, so that whatever depends on an example changes in number.
    """
    spread = [0, n_data // 2, n_data - 1]
    if n_data < SIZES[0]:
        spread = [i % n_data for i in range(SIZES[0])]
    return torch.tensor(spread), torch.tensor([spread[k] for k in LARGER])


def layout_of(
    task: Task,
    params: Mapping[str, Tensor],
    units: Sequence[Unit],
    check: Callable[[Tensor], None] = lambda larger: None,
) -> Layout:
    """Run the probe in both sizes, lifting what the examples share as long as that works.

    ``check`` is shown the outputs of the larger batch.
    """
    runs = _run_both(task, params, units, frozenset(), check)
    outputs_before_lifting = runs.small.outputs.detach()
    eps = rounding(runs.small.outputs)
    shared: SharedOutputs = frozenset()
    while more := _first_shared(runs):
        try:
            lifted = _run_both(task, params, units, shared | more)
        except BLRError:  # the model does not compute with one row per example there
            break
        if not agrees(lifted.small.outputs, outputs_before_lifting, eps):
            break
        shared |= more
        runs = lifted
    located = [(small, _axes_between(small, large)) for small, large in runs.pairs()]
    unknown = [visit.unit.names.values() for visit, axes in located if axes is None]
    return Layout(
        recording=runs.small,
        saved=runs.saved,
        axes={visit.key: axes for visit, axes in located if axes is not None},
        shared=shared,
        unknown=frozenset().union(*unknown),
    )


@dataclass(frozen=True)
class _Runs:
    """The probe's recording, and what the units saw of the larger batch: shapes alone."""

    small: Recording
    saved: int  # bytes that autograd keeps for the recording, without the weights
    large: list[Visit]

    def pairs(self) -> list[tuple[Visit, Visit | None]]:
        """The same call in both sizes; None where the larger batch has no such call."""
        large = {visit.key: visit for visit in self.large}
        return [(visit, large.get(visit.key)) for visit in self.small.visits]


def _run_both(
    task: Task,
    params: Mapping[str, Tensor],
    units: Sequence[Unit],
    shared: SharedOutputs,
    check: Callable[[Tensor], None] = lambda larger: None,
) -> _Runs:
    """Run the larger batch, then the probe.

    The larger outputs are freed as soon as ``check`` has seen them: those of a language model take
    much memory.
    """
    probe, larger_probe = probe_indices(task.n_data)

    def recorded(indices: Tensor, *, shapes: bool = False) -> Recording:
        batch = task.fetch(indices)
        return record(
            task,
            params,
            batch,
            units,
            shared=shared,
            size=len(indices),
            indices=indices,
            shapes=shapes,
        )

    try:
        with saved_tensors_hooks(lambda _: None, lambda x: x):  # no backward pass will need them
            larger = recorded(larger_probe, shapes=True)
    except (BLRError, TypeError):  # a model that differentiates inside needs its saved tensors
        larger = recorded(larger_probe, shapes=True)
    check(larger.outputs.detach())
    visits = larger.visits
    del larger
    saved = SavedBytes(task, params)
    with saved:
        small = recorded(probe)
    return _Runs(small, saved.total, visits)


def agrees(ours: Tensor | None, truth: Tensor, eps: float, floor: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding, relative to the truth's norm.

    ``ours`` is None where there is no gradient: it counts as 0.
    """
    truth = truth.detach()
    if ours is None:
        return within(norm_of(truth), norm_of(truth), eps, floor)
    if ours.shape != truth.shape:
        return False
    gap = ours.detach() - truth
    return within(norm_of(gap), norm_of(truth), eps, floor)


def norm_of(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(upcast(tensor)))


def within(gap: float, size: float, eps: float, floor: float = 0.0) -> bool:
    """Whether rounding explains a gap of this norm to a truth of the norm ``size``.

    The bound, eps^0.6 of the size, leaves room for many roundings that add up.
    """
    return gap <= eps**0.6 * size + floor


def _first_shared(runs: _Runs) -> SharedOutputs:
    """The outputs of the first visit that are the same, whatever the batch."""
    for small, large in runs.pairs():
        if large is None or len(small.outputs) != len(large.outputs):
            continue
        outputs = zip(small.outputs, large.outputs, strict=True)
        shared = [place for place, (a, b) in enumerate(outputs) if a.shape == b.shape]
        if shared:
            return frozenset((*small.key, place) for place in shared)
    return frozenset()


def _axes_between(small: Visit, large: Visit | None) -> Axes | None:
    """Where the examples are in a call's inputs and outputs; None where that is unknown."""
    if large is None or small.stale:
        return None
    inputs = tree_leaves((small.args, small.kwargs))
    inputs_of_larger = tree_leaves((large.args, large.kwargs))
    if len(inputs) != len(inputs_of_larger) or len(small.outputs) != len(large.outputs):
        return None
    input_pairs = zip(inputs, inputs_of_larger, strict=True)
    input_axes = [_axis_of(x, larger) for x, larger in input_pairs]
    output_pairs = zip(small.outputs, large.outputs, strict=True)
    output_axes = [_axis_of(x, larger) for x, larger in output_pairs]
    by_example = [axis for axis in output_axes if axis is not None and not axis.shared]
    if not output_axes or len(by_example) < len(output_axes):
        return None
    for x, axis in zip(inputs, input_axes, strict=True):
        if isinstance(x, Tensor) and axis is None:
            return None
    return input_axes, by_example


def _axis_of(small: Any, large: Any) -> Axis | None:
    """Where the examples are in a tensor that comes in both sizes."""
    if not isinstance(small, Tensor) or not isinstance(large, Tensor):
        return None
    return axis_between(small.shape, large.shape, SIZES)

"""Which dimension of a layer's inputs and outputs are the examples, from batches of two sizes.

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

PROBE_SIZE = 3  # examples
ORDER_IN_LARGER_BATCH = (2, 0, 1, 0, 1)
"""The probe's examples in a larger batch: all at other places, and some twice."""
ROUNDING_EXPONENT = 0.6
"""Two norms that differ by less than eps^0.6 of the larger one count as equal: 7e-5 in float32."""
BATCH_SIZES = (PROBE_SIZE, len(ORDER_IN_LARGER_BATCH))


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
    """Indices of the probe, three examples from all over the data, and of them in a batch of five.

    The larger batch has the same examples, so that a collate function that pads to the longest one
    gives equal lengths. Some come twice, so that a dimension of the examples grows.
    """
    probe = [0, n_data // 2, n_data - 1]
    if n_data < PROBE_SIZE:
        probe = [i % n_data for i in range(PROBE_SIZE)]
    larger = [probe[k] for k in ORDER_IN_LARGER_BATCH]
    return torch.tensor(probe), torch.tensor(larger)


def layout_of(
    task: Task,
    params: Mapping[str, Tensor],
    units: Sequence[Unit],
    check: Callable[[Tensor], None] = lambda larger: None,
) -> Layout:
    """Run the probe in both sizes, and lift the outputs that the examples share as far as possible.

    ``check`` is called with the outputs of the larger batch.
    """
    runs = _run_both(task, params, units, frozenset(), check)
    outputs_before_lifting = runs.small.outputs.detach()
    eps = rounding(runs.small.outputs)
    shared: SharedOutputs = frozenset()
    while next_shared := _first_shared(runs):
        try:
            lifted = _run_both(task, params, units, shared | next_shared)
        except BLRError:  # the model does not compute with one row per example there
            break
        if not agrees(lifted.small.outputs, outputs_before_lifting, eps):
            break
        shared |= next_shared
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
    """The probe's recording, and the shapes of what the units saw of the larger batch."""

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

    The larger outputs are freed as soon as ``check`` has been called with them: those of a language
    model take much memory.
    """
    probe, larger_probe = probe_indices(task.n_data)
    larger = _shapes_of(task, params, units, shared, larger_probe)
    check(larger.outputs.detach())
    visits = larger.visits
    del larger
    saved = SavedBytes(task, params)
    with saved:
        small = record(
            task,
            params,
            task.fetch(probe),
            units,
            shared=shared,
            size=len(probe),
            indices=probe,
        )
    return _Runs(small, saved.total, visits)


def _shapes_of(
    task: Task,
    params: Mapping[str, Tensor],
    units: Sequence[Unit],
    shared: SharedOutputs,
    indices: Tensor,
) -> Recording:
    """The outputs of a batch, and the shapes of what its units saw."""

    def run() -> Recording:
        batch = task.fetch(indices)  # fresh for each run: a model may work on it in place
        return record(
            task,
            params,
            batch,
            units,
            shared=shared,
            size=len(indices),
            indices=indices,
            shapes=True,
        )

    try:
        with saved_tensors_hooks(lambda _: None, lambda x: x):  # no backward pass will need them
            return run()
    except (BLRError, TypeError):  # a model that differentiates inside needs its saved tensors
        return run()


def agrees(computed: Tensor | None, truth: Tensor, eps: float, floor: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding, relative to the truth's norm.

    ``computed`` is None where there is no gradient: it counts as 0.
    """
    truth = truth.detach()
    if computed is None:
        return within(norm_of(truth), norm_of(truth), eps, floor)
    if computed.shape != truth.shape:
        return False
    gap = computed.detach() - truth
    return within(norm_of(gap), norm_of(truth), eps, floor)


def norm_of(tensor: Tensor) -> float:
    """The Euclidean norm, computed in single precision at least."""
    return float(torch.linalg.vector_norm(upcast(tensor)))


def within(gap: float, size: float, eps: float, floor: float = 0.0) -> bool:
    """Whether rounding explains a gap of this norm to a truth of the norm ``size``.

    The exponent leaves room for many roundings that add up. ``floor`` is a gap that always passes.
    """
    return gap <= eps**ROUNDING_EXPONENT * size + floor


def _first_shared(runs: _Runs) -> SharedOutputs:
    """The outputs of one size in both batches, of the first visit that has such outputs."""
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
    return axis_between(small.shape, large.shape, BATCH_SIZES)

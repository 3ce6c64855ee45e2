"""Where the examples are in what every layer sees, found out by running batches of two sizes.

A dimension belongs to the examples when it grows with the batch. What does not grow at all (a
table of position embeddings) is made once for all examples; it is lifted to one row for each, so
that each example gets its own gradient, wherever the model computes the same with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from blr_analysis.backprop.layers import axis_between, upcast
from blr_analysis.backprop.reading import Axes
from blr_analysis.backprop.record import (
    Recording,
    SavedBytes,
    Unit,
    Visit,
    fetched,
    record,
    rounding,
)
from blr_analysis.errors import BLRError
from blr_analysis.task import Task

Shared = frozenset[tuple[str, int, int]]

LARGER = (2, 0, 1, 0, 1)  # the probe's examples in a larger batch: all at other places, some twice


@dataclass(frozen=True)
class Layout:
    """A recorded probe, where its examples are, and the parameters for which nobody can say."""

    recording: Recording
    saved: int  # bytes that autograd keeps for the recording, weights apart
    axes: dict[tuple[str, int], Axes]
    shared: Shared
    unknown: frozenset[str]


def probe_indices(n_data: int) -> tuple[Tensor, Tensor]:
    """Three examples from all over the data, and the same ones as a batch of five.

    The same ones, so that a collate function that pads to the longest gives equal lengths; five
    and some more often, so that whatever depends on an example changes in number.
    """
    spread = [0, n_data // 2, n_data - 1] if n_data > 2 else [i % n_data for i in range(3)]
    return torch.tensor(spread), torch.tensor([spread[k] for k in LARGER])


def layout_of(
    task: Task,
    params: Mapping[str, Tensor],
    units: Sequence[Unit],
    check: Callable[[Tensor], None] = lambda larger: None,
) -> Layout:
    """Run the probe in both sizes, lifting what the examples share as long as that works.

    The larger one first, of which shapes are kept alone, once ``check`` has seen its outputs: those
    of a language model are large.
    """
    probes = probe_indices(task.n_data)

    def runs(shared: Shared) -> tuple[Recording, list[Visit], int]:
        how: Any = {"units": units, "shared": shared}
        small, large = (
            partial(record, task, params, fetched(task, p), size=len(p), indices=p, **how)
            for p in probes
        )
        try:
            with saved_tensors_hooks(lambda _: None, lambda x: x):  # nobody goes back through it
                larger = large(shapes=True)
        except (BLRError, TypeError):  # unless the model itself does, or its loss
            larger = large(shapes=True)
        if not shared:
            check(larger.outputs.detach())
        visits = larger.visits
        del larger
        saved = SavedBytes(task, params)
        with saved:
            recording = small()
        return recording, visits, saved.total

    current = runs(frozenset())
    plain = current[0].outputs.detach()
    eps = rounding(current[0].outputs)
    shared: Shared = frozenset()
    while fresh := _first_shared(*current[:2]):
        try:
            tried = runs(shared | fresh)
        except BLRError:  # the model does not compute with one row per example there
            break
        if not agrees(tried[0].outputs, plain, eps):
            break
        shared, current = shared | fresh, tried
    sizes = (len(probes[0]), len(probes[1]))
    axes: dict[tuple[str, int], Axes] = {}
    unknown: set[str] = set()
    for small, large in _pairs(*current[:2]):
        places = None if large is None or small.stale else _axes_between(small, large, sizes)
        if places is None:
            unknown.update(small.unit.names.values())
        else:
            axes[small.unit.path, small.occurrence] = places
    return Layout(current[0], current[2], axes, shared, frozenset(unknown))


def agrees(ours: Tensor | None, truth: Tensor, eps: float, floor: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding, relative to the truth's norm."""
    truth = truth.detach()
    if ours is not None and ours.shape != truth.shape:
        return False
    gap = truth if ours is None else ours.detach() - truth
    off, size = (float(torch.linalg.vector_norm(upcast(t))) for t in (gap, truth))
    return within(off, size, eps, floor)


def within(gap: float, size: float, eps: float, floor: float = 0.0) -> bool:
    """Whether what a tensor of this norm is off its truth is rounding."""
    return gap <= eps**0.6 * size + floor


def _pairs(recording: Recording, larger: list[Visit]) -> list[tuple[Visit, Visit | None]]:
    large = {(v.unit.path, v.occurrence): v for v in larger}
    return [(v, large.get((v.unit.path, v.occurrence))) for v in recording.visits]


def _first_shared(recording: Recording, larger: list[Visit]) -> Shared:
    """The outputs of the first visit that are the same, whatever the batch."""
    for small, large in _pairs(recording, larger):
        if large is None or len(small.outputs) != len(large.outputs):
            continue
        shared = [
            (small.unit.path, small.occurrence, position)
            for position, (a, b) in enumerate(zip(small.outputs, large.outputs, strict=True))
            if a.shape == b.shape
        ]
        if shared:
            return frozenset(shared)
    return frozenset()


def _axes_between(small: Visit, large: Visit, sizes: tuple[int, int]) -> Axes | None:
    inputs = [tree_flatten((v.args, v.kwargs))[0] for v in (small, large)]
    if len(inputs[0]) != len(inputs[1]) or len(small.outputs) != len(large.outputs):
        return None
    ins = [
        axis_between(a.shape, b.shape, sizes)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else None
        for a, b in zip(*inputs, strict=True)
    ]
    outs = [
        axis_between(a.shape, b.shape, sizes)
        for a, b in zip(small.outputs, large.outputs, strict=True)
    ]
    known = [a for a in outs if a is not None and not a.shared]
    lost = any(a is None for a, x in zip(ins, inputs[0], strict=True) if isinstance(x, Tensor))
    return None if lost or not outs or len(known) < len(outs) else (ins, known)

"""How much memory one example takes, measured on a plan's probe: what sets the chunk size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.layout import probe_indices
from blr_analysis.backprop.record import Recording, SavedBytes, Visit
from blr_analysis.backprop.terms import TermCost
from blr_analysis.half import working
from blr_analysis.task import Task, parameter_places

SCORED = 3  # copies of a sequence's outputs that are held at once beside those of its last layer
GRAMS = 3  # K × K products of an example's columns: their sum, a layer's share, one more


def cost_of(
    task: Task,
    params: Mapping[str, Tensor],
    recording: Recording,
    graph: int,
    costs: Sequence[TermCost],
) -> Callable[..., float]:
    """Numbers of the parameters' dtype held per example as a function of the columns K: graph,
    inputs, gradients.

    ``graph``: bytes that autograd keeps for the recording; ``costs``: of its terms. The function's
    ``by_parts`` leaves out what :meth:`Chunk.parts` takes of some examples alone, and the columns
    at the outputs themselves, unit vectors that all examples share.
    """
    visits, batch = recording.visits, len(probe_indices(task.n_data)[0])
    # torch.func holds the graph of one module at a time, and its gradients of one column.
    loose = [visit for visit in visits if visit.unit.rule is None]
    alone = [0]
    with task.evaluation():
        for visit in loose:
            saved = SavedBytes(task, params)
            with saved:
                _again(visit)
            alone.append(saved.total)
    outputs = sum(leaf.numel() for visit in visits for leaf in visit.outputs) / batch
    last = recording.outputs.numel() / batch
    scored = last if task.likelihood.is_sequence else 0.0
    inputs, dense = sum(c.inputs for c in costs), sum(c.column for c in costs)
    kind = next(iter(params.values())).dtype
    wide = working(kind).itemsize // kind.itemsize  # a sum's number, in numbers of half precision

    def floats(columns: int, *, by_parts: bool = False) -> float:
        kept = (graph + 2 * max(alone)) / kind.itemsize / batch + 2 * inputs
        kept += wide * SCORED * scored
        made = outputs - by_parts * min(last, outputs)
        kept += (wide * columns + 1) * made + wide * 2.5 * columns * dense
        return kept if by_parts else kept + wide * gram_floats(costs, columns)

    return floats


def gram_floats(costs: Iterable[TermCost], columns: int) -> float:
    """Numbers held per example while the K × K products of its columns are made."""
    return max((c.gram(columns) for c in costs), default=0) + GRAMS * columns**2


def batch_numbers(batch: Any) -> int:
    """How many numbers the tensors of a batch hold."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    return sum(x.numel() for x in tree_leaves(parts) if isinstance(x, Tensor))


def _again(visit: Visit) -> object:
    module: nn.Module = visit.unit.module
    with torch.enable_grad():
        leaves = {n: p.detach().requires_grad_() for n, p in parameter_places(module).items()}
        try:
            return functional_call(module, leaves, visit.args, visit.kwargs, tie_weights=False)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # it keeps state, and is read through the whole model
            return None

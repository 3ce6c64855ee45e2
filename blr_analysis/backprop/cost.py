"""How much memory one example takes, measured on a plan's probe: what sets the chunk size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.layout import probe_indices
from blr_analysis.backprop.record import Recording, SavedBytes, Visit, leaves_of
from blr_analysis.backprop.terms import TermCost
from blr_analysis.half import working
from blr_analysis.models import parameter_places
from blr_analysis.task import Task

SCORED = 3  # copies of a sequence's outputs in memory at once beside those of its last layer
GRAMS = 3  # K × K products of an example's columns in memory: their sum, a layer's share, one more


@dataclass(frozen=True)
class ExampleCost:
    """Numbers of the parameters' dtype held per example of a chunk, by what they are.

    Called with the number of columns K of each example's gradient, it gives their sum.
    """

    graph: float  # that autograd saves, of the whole model and of the module that is run again
    inputs: float  # of the layers
    outputs: float  # of the layers: every column has a gradient there
    last: float  # of the model
    dense: float  # one column's gradients that are not factored
    terms: Sequence[TermCost]
    is_sequence: bool
    wide: int  # a sum's number, in numbers of half precision

    def __call__(self, columns: int, *, by_parts: bool = False) -> float:
        """``by_parts`` leaves out the products that :meth:`Chunk.parts` makes of some examples at
        a time, and the columns at the outputs themselves, unit vectors that all examples share."""
        numbers = self.graph + 2 * self.inputs
        if self.is_sequence:
            numbers += self.wide * SCORED * self.last
        outputs = self.outputs
        if by_parts:
            outputs -= min(self.last, outputs)
        numbers += (self.wide * columns + 1) * outputs
        numbers += self.wide * 2.5 * columns * self.dense
        if not by_parts:
            numbers += self.wide * gram_floats(self.terms, columns)
        return numbers


def cost_of(
    task: Task,
    params: Mapping[str, Tensor],
    recording: Recording,
    graph: int,
    terms: Sequence[TermCost],
) -> ExampleCost:
    """What an example of a chunk costs, measured on the probe's recording.

    ``graph``: bytes that autograd keeps for the recording; ``terms``: the costs of its terms.
    """
    n_examples = len(probe_indices(task.n_data)[0])
    # torch.func holds the graph of one module at a time, and its gradients of one column.
    again = max(_saved_again(task, params, recording.visits), default=0)
    dtype = next(iter(params.values())).dtype
    layer_outputs = sum(leaf.numel() for visit in recording.visits for leaf in visit.outputs)
    return ExampleCost(
        graph=(graph + 2 * again) / dtype.itemsize / n_examples,
        inputs=sum(term.inputs for term in terms),
        outputs=layer_outputs / n_examples,
        last=recording.outputs.numel() / n_examples,
        dense=sum(term.column for term in terms),
        terms=terms,
        is_sequence=task.likelihood.is_sequence,
        wide=working(dtype).itemsize // dtype.itemsize,
    )


def _saved_again(
    task: Task, params: Mapping[str, Tensor], visits: Iterable[Visit]
) -> Iterator[int]:
    """Bytes that autograd saves for each call of a module without a rule, which is run again."""
    for visit in visits:
        if visit.unit.rule is None:
            saved = SavedBytes(task, params)
            with task.evaluation(), saved:
                _run_again(visit)
            yield saved.total


def gram_floats(costs: Iterable[TermCost], columns: int) -> float:
    """Numbers held per example while the K × K products of its columns are made."""
    largest = max((cost.gram(columns) for cost in costs), default=0)
    return largest + GRAMS * columns**2


def batch_numbers(batch: Any) -> int:
    """How many numbers the tensors of a batch hold."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    return sum(x.numel() for x in tree_leaves(parts) if isinstance(x, Tensor))


def _run_again(visit: Visit) -> None:
    module: nn.Module = visit.unit.module
    with torch.enable_grad():
        leaves = leaves_of(parameter_places(module))
        try:
            functional_call(module, leaves, visit.args, visit.kwargs, tie_weights=False)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return  # it keeps state, and is read through the whole model

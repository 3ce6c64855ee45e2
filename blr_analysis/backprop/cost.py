"""How much memory one example takes, measured on a plan's probe; the chunk size follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.layout import probe_indices
from blr_analysis.backprop.record import Recording, SavedBytes, Visit, leaves_of
from blr_analysis.backprop.terms import TermCost
from blr_analysis.half import working
from blr_analysis.models import called_with, parameter_places
from blr_analysis.ranks import gathered_piece
from blr_analysis.task import Task

COPIES_OF_OUTPUTS = 3  # of a sequence, in memory at once beside those of its last layer
GRAM_MATRICES = 3  # K × K, of one example, in memory at once: the sum, a layer's share, one more
COPIES_OF_DENSE_GRADIENTS = 2.5  # in memory at once: the gradients and temporary tensors


@dataclass(frozen=True)
class ExampleCost:
    """How many numbers of the parameters' dtype one example of a chunk takes, by what they are.

    Attributes:
        graph: those that autograd saves, for the model and for a module that is run again.
        inputs: those of the layers' inputs.
        outputs: those of the layers' outputs, where every column has a gradient.
        last: those of the model's outputs.
        dense: those of one column's gradients that are not factored.
        terms: the costs of the terms.
        is_sequence: whether an example is a sequence.
        width: the size of a number that is computed with, in numbers of the parameters' dtype.
    """

    graph: float
    inputs: float
    outputs: float
    last: float
    dense: float
    terms: Sequence[TermCost]
    is_sequence: bool
    width: int

    def __call__(self, columns: int, *, by_parts: bool = False) -> float:
        """The sum of all numbers, where K ``columns`` are asked of each example.

        ``by_parts`` leaves out what :meth:`Chunk.parts` computes for some examples at a time, and
        the columns at the outputs themselves, which are unit vectors that all examples share.
        """
        numbers = self.graph + 2 * self.inputs
        if self.is_sequence:
            numbers += self.width * COPIES_OF_OUTPUTS * self.last
        outputs = self.outputs
        if by_parts:
            outputs -= min(self.last, outputs)
        numbers += (self.width * columns + 1) * outputs
        numbers += self.width * COPIES_OF_DENSE_GRADIENTS * columns * self.dense
        if not by_parts:
            numbers += self.width * gram_floats(self.terms, columns)
        return numbers


def cost_of(
    task: Task,
    params: Mapping[str, Tensor],
    recording: Recording,
    graph: int,
    terms: Sequence[TermCost],
) -> ExampleCost:
    """The cost of one example of a chunk, measured on the probe's recording.

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
        width=working(dtype).itemsize // dtype.itemsize,
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
    """How many numbers one example takes while the K × K products of its columns are computed."""
    largest = max((cost.gram(columns) for cost in costs), default=0)
    return largest + GRAM_MATRICES * columns**2


def batch_numbers(batch: Any) -> int:
    """How many numbers the tensors of a batch hold."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    return sum(x.numel() for x in tree_leaves(parts) if isinstance(x, Tensor))


def _run_again(visit: Visit) -> None:
    module: nn.Module = visit.unit.module
    with torch.enable_grad():
        places = parameter_places(module)
        leaves = leaves_of({place: gathered_piece(p) for place, p in places.items()})
        try:
            called_with(module, leaves, visit.args, visit.kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return  # it keeps state, and is read through the whole model

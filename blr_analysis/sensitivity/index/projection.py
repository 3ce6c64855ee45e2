"""Sketches of a task's gradients, as an index keeps them.

A file holds numbers of one type and, of each example, the unit that they are multiplied with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import chunks
from blr_analysis.sensitivity.corrections import check_finite
from blr_analysis.sensitivity.index.sketch import Sketch
from blr_analysis.sensitivity.index.stored import Records
from blr_analysis.sensitivity.influence.blocks import Cotangent, loss_gradient, loss_terms
from blr_analysis.sensitivity.influence.results import rooted
from blr_analysis.task import Task

DTYPES = {
    "int8": torch.int8,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
LARGEST = 127  # of the whole numbers of a byte
ROWS = 64  # examples that are multiplied, or rounded, at once

Part = tuple[Tensor, Tensor]  # some examples, and numbers of each


@dataclass(frozen=True)
class Projection:
    """How the gradients of a task's examples are projected.

    Attributes:
        task: whose examples.
        sketch: how a gradient is.
        cotangent: ∂(quantity)/∂f of an example.
    """

    task: Task
    sketch: Sketch
    cotangent: Cotangent = loss_gradient

    def whole(self, indices: Tensor | None = None, *, divided: bool = False) -> Tensor:
        """z of these examples (None: of all), on the CPU of every rank, ``[B, size]``."""
        order = torch.arange(self.task.n_data) if indices is None else indices
        return joined(self.parts(order, divided=divided), order, divided=divided)

    def parts(self, indices: Tensor, *, divided: bool = False) -> Iterator[Part]:
        """No example, and then some of these at a time, in an order of their own, and their z.

        Args:
            divided: whether the ranks take turns, chunk by chunk.
        """
        mean = self.sketch.posterior.mean
        like = next(iter(mean.values()))
        yield indices[:0], torch.zeros(0, self.sketch.size, dtype=like.dtype)
        sweep = chunks(
            self.task,
            mean,
            columns=1,
            label="index",
            indices=indices,
            divided=divided,
            in_order=False,
        )
        for chunk in sweep:
            z = self.sketch.of_terms(loss_terms(self.task, chunk, self.cotangent))
            check_finite(z, "projected gradient")
            yield chunk.indices, z.cpu()


def joined(parts: Iterable[Part], order: Tensor, *, divided: bool) -> Tensor:
    """The rows of all parts; if ``divided``, of all ranks, in the order of the examples ``order``,
    which rise."""
    if divided:
        rows, numbers = zip(*parts, strict=True)
        places = torch.searchsorted(order, torch.cat(rows))
        return ranks.gathered(torch.cat(numbers), places, len(order))
    further_parts = iter(parts)
    _, of_no_example = next(further_parts)
    whole = of_no_example.new_zeros(len(order), of_no_example.shape[1])
    for rows, numbers in further_parts:
        whole[torch.searchsorted(order, rows)] = numbers
    return whole


def records_of(z: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a file holds of these sketches."""
    parts = [_records_of_part(part, dtype) for part in z.split(ROWS)]  # needs less memory
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _records_of_part(z: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    squares = z.double().square().sum(1)
    if dtype == torch.int8:
        unit = rooted(z.abs().amax(1).square()) / LARGEST
        numbers = (z / unit.unsqueeze(1)).round_().to(dtype)
    else:
        unit = rooted(squares).to(z.dtype)
        numbers = (z / unit.unsqueeze(1)).to(dtype)
    return {"gradients": numbers, "unit": unit, "self_influence": squares}


def values_of(records: Records, questions: Tensor) -> Tensor:
    """z_iᵀ z_j of stored examples and questions ``[M, size]``, ``[n, M]``."""
    parts = records["gradients"].split(ROWS)
    products = torch.cat([part.to(questions.dtype) @ questions.mT for part in parts])
    return products * records["unit"].to(products).unsqueeze(1)

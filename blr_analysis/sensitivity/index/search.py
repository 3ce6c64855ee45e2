"""Which of many stored examples are the best, without computing the values of all.

Every row is looked at in its first signs. Where that leaves open whether it is among the k best, it
is looked at in all of its signs and two bits of the question's numbers, then four bits, and then
its value is computed. Each level says how much it is off, as a standard deviation. That is measured
on some rows, too, and the larger counts. A row is left out where it is SURE standard deviations
below what k others reach at least, so that one of some three million is left out by chance.

Source: Gao & Long, "RaBitQ", 2024 (questions in few bits, compared with stored signs bit by bit).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blr_analysis.sensitivity.index.compressed import Compressed, Compression, Records
from blr_analysis.sensitivity.index.rounded import estimates, rounded

BITS = (1, 2, 4)  # of a question's numbers, level by level
SPARE = 64  # rows beyond k, among which the bound is first looked for
MEASURED = 64  # rows whose errors are measured
SURE = 5.0  # standard deviations

Read = Callable[[Callable[[Records], Tensor], Tensor], Tensor]  # computes from rows' records


@dataclass(frozen=True)
class Search:
    """The k best of n rows for every question.

    Attributes:
        read: computes something from the records of rows.
        signs: 1 for the largest values, −1 for the smallest; one or both.
    """

    read: Read
    compression: Compression
    questions: Compressed
    n: int
    k: int
    signs: tuple[int, ...]

    def best(self) -> list[tuple[Tensor, Tensor]]:
        """Values and rows ``[k, M]``, for each of the signs."""
        rows = torch.arange(self.n)
        for bits in BITS:
            rows = self._open_rows(bits, rows)
        values = self._values(rows)
        sides: list[tuple[Tensor, Tensor]] = []
        for sign in self.signs:
            top = (sign * values).topk(self.k, dim=0)
            sides.append((sign * top.values, rows[top.indices]))
        return sides

    def _values(self, rows: Tensor) -> Tensor:
        return self.read(lambda records: self.compression.values(records, self.questions), rows)

    @property
    def _measured(self) -> Tensor:
        return torch.arange(min(self.n, MEASURED))

    @cached_property
    def _measured_values(self) -> Tensor:
        return self._values(self._measured)

    def _open_rows(self, bits: int, rows: Tensor) -> Tensor:
        """The rows that may be among the best, as far as so many bits of the questions tell."""
        estimated = self._estimates(bits, rows)
        values, errors = estimated.unbind(1)
        bounds = self._bounds(values, rows)
        is_open = torch.zeros(len(rows), dtype=torch.bool)
        for sign, bound in zip(self.signs, bounds, strict=True):
            is_open |= (sign * values + SURE * errors >= bound).any(1)
        return rows[is_open]

    def _estimates(self, bits: int, rows: Tensor) -> Tensor:
        """``[n, 2, M]``, whose errors are as large as they are on the rows that are measured."""
        question = rounded(self.compression, self.questions, bits)

        def compute(records: Records) -> Tensor:
            return estimates(self.compression, records, question)

        factor = error_factor(self.read(compute, self._measured), self._measured_values)
        estimated = self.read(compute, rows)
        return estimated * torch.stack([torch.ones_like(factor), factor]).unsqueeze(1)

    def _bounds(self, values: Tensor, rows: Tensor) -> list[Tensor]:
        """For each sign what k rows reach for certain, ``[M]``: the values of likely ones."""
        count = min(self.k + SPARE, len(values))
        likely = [(sign * values).topk(count, dim=0).indices for sign in self.signs]
        computed = self._values(rows[torch.cat(likely).unique()])
        return [(sign * computed).topk(self.k, dim=0).values[-1] for sign in self.signs]


def error_factor(estimated: Tensor, exact: Tensor) -> Tensor:
    """How many times larger errors are than the estimates say, at least 1: sums of few numbers are
    less random than sums of many."""
    values, errors = estimated.unbind(1)
    deviations = ((values - exact) / errors)[errors > 0]
    return deviations.square().mean().sqrt().nan_to_num(1.0).clamp_min(1.0)

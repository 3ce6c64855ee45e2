"""Recorded passes with drawn labels, collected until their products are worth the time.

Products of the rows of several passes at once are faster than those of each pass. Where they would
take long beside the pass itself, they are made of some of its examples, at least a quarter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.backprop.tape import Pass
from blr_analysis.posterior.recorder.layer_terms import scaled
from blr_analysis.posterior.recorder.rows import positions_of
from blr_analysis.posterior.recorder.second_pass import Squares

TOGETHER = 2048  # rows of one product: passes are collected until they have so many
FEW_MULTIPLICATIONS = 4e6  # in the products of a pass: they take no time beside the rest


class CollectedPasses:
    """Passes of the same layers and shapes.

    Args:
        parameters: of the model, by name.

    Attributes:
        passes: with the gradients of drawn labels.
        squares: E_i g_i² of parameters without a rule, for each pass.
        layout: the layers of the passes and their shapes.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.passes: list[Pass] = []
        self.squares: list[Squares] = []
        self.layout: list[Any] = []
        self._rows_of_example = 1.0  # the most rows that an example of them has in a layer
        self._used: dict[tuple[int, int], Tensor | None] = {}  # the examples that products are of

    def begin(self, forward: Pass, layout: list[Any]) -> None:
        """Collect passes of another layout than before."""
        self.layout = layout
        self._used = {}
        rows = [len(call.visit.outputs[0]) * positions_of(call.visit) for call in forward.calls]
        self._rows_of_example = max(rows, default=0) / forward.batch

    def add(self, forward: Pass, counted: Tensor | None, squares: Squares) -> bool:
        """Collect a pass; return whether there are enough.

        An output that all examples share has the sum of their gradients. Their labels are drawn
        independently, so the mean square of that sum is the sum of the examples' mean squares.

        Args:
            forward: a pass of the present layout.
            counted: the indices of the examples with a loss; None: all.
            squares: E_i g_i² of parameters without a rule.
        """
        n_counted = forward.batch if counted is None else len(counted)
        for call in forward.calls:
            if len(call.visit.outputs[0]) == 1 < forward.batch:
                call.gradients = scaled(call.gradients, n_counted**-0.5)
        self.squares.append(squares)
        if any(isinstance(call.visit.unit.module, nn.RNNBase) for call in forward.calls):
            self.passes.append(forward)  # examples are not first in a layer's last states
            return True
        forward = self._cut(forward, counted)
        self.passes.append(forward)
        return len(self.passes) * forward.batch * self._rows_of_example >= TOGETHER

    def emptied(self) -> tuple[Pass, int]:
        """The collected passes as one, and their number; none is collected any more."""
        passes = self.passes
        self.passes = []
        return Pass.joined(passes), len(passes)

    def emptied_squares(self) -> Squares:
        """E_i g_i² of parameters without a rule over the collected passes; they are forgotten."""
        squares_by_pass = self.squares
        self.squares = []
        return {
            name: torch.stack([squares[name] for squares in squares_by_pass]).mean(0)
            for name in squares_by_pass[0]
        }

    def forget(self) -> None:
        """Drop the collected passes."""
        self.passes = []
        self.squares = []

    def _cut(self, forward: Pass, counted: Tensor | None) -> Pass:
        """The pass of those examples that products are made of."""
        n_counted = forward.batch if counted is None else len(counted)
        used = self._used_examples(forward, n_counted)
        if used is not None:
            return forward.of_examples(
                used if counted is None else counted[used.to(counted.device)]
            )
        if counted is not None and n_counted < forward.batch:
            return forward.of_examples(counted)
        return forward

    def _used_examples(self, forward: Pass, n_counted: int) -> Tensor | None:
        """Numbers of the examples with a loss that products are made of; None: all of them."""
        batch = forward.batch
        if (batch, n_counted) not in self._used:
            n_used = self._affordable(forward, n_counted)
            spread = torch.arange(n_used) * n_counted // n_used
            self._used[batch, n_counted] = spread if n_used < n_counted else None
        return self._used[batch, n_counted]

    def _affordable(self, forward: Pass, n_examples: int) -> int:
        """How many examples the products are made of: at least a quarter of them.

        If the products need many multiplications, they need at most a quarter of the pass's own.
        """
        of_pass = 0.0
        of_products = 0.0
        for call in forward.calls:
            visit = call.visit
            weight = self._parameters[next(iter(visit.unit.names.values()))]
            if weight.ndim > 1 and not isinstance(visit.unit.module, nn.Embedding):
                rows = weight.shape[0]
                columns = weight.numel() // rows
                positions = positions_of(visit) * len(visit.outputs[0]) / forward.batch
                of_pass += 6 * positions * rows * columns
                of_products += 2 * positions * (rows**2 + columns**2)
        allowed = max(of_pass * n_examples / 4, FEW_MULTIPLICATIONS)
        most = allowed / max(of_products, 1.0)
        return min(n_examples, max(math.ceil(most), math.ceil(n_examples / 4)))

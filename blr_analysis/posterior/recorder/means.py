"""Means over the recorded passes of a training: of A, G, T and the squares of gradients.

Each is the plain mean over the run, or one that forgets, without the bias of its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.backprop.matrices import Joint
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.terms import Term
from blr_analysis.posterior.structures.kronecker import Kronecker, eigenbases, is_too_large


class Means:
    """Running means of the factors and squares of a model's parameters.

    Args:
        beta2: None: the plain mean; else of a mean that forgets.
        read_outs: names of parameters that have squares in place of factors.
        recurrent: names of the parameters of recurrent layers.

    Attributes:
        recorded: the number of passes.
        joints: the layers with factors, by the name of their weight.
        values: the means, by "KEY.input", "KEY.output" and "KEY.positions" of a layer, of a
            recurrent one "KEY.square" too, E_i ‖g_i‖²; or by a parameter's name.
    """

    def __init__(self, beta2: float | None, read_outs: set[str], recurrent: set[str]) -> None:
        self._beta2 = beta2
        self._read_outs = read_outs
        self._recurrent = recurrent
        self.recorded = 0
        self.joints: dict[str, Joint] = {}
        self.values: dict[str, Tensor] = {}
        self._moved: set[str] = set()  # keys of the means that the last passes moved

    @torch.no_grad()
    def add(
        self,
        terms: Sequence[Term],
        squares: Mapping[str, Tensor],
        n_passes: int,
        *,
        has_padding: bool,
    ) -> None:
        """Move the means by so many passes.

        What no example of these passes reached counts 0, as an expert without tokens, unless
        nothing was reached.

        Args:
            terms: G_i of layers.
            squares: E_i g_i² of other parameters.
            has_padding: whether positions without a gradient are left out of A and T.
        """
        self.recorded += n_passes
        self._moved.clear()
        for term in terms:
            if self._has_factors(term):
                self._move_factors(term, n_passes, has_padding)
                continue
            for name, sums in term.square_sum().items():
                self._move(name, sums.div_(term.n_examples), n_passes)
        for name, means in squares.items():
            self._move(name, means, n_passes)
        if self._moved:
            for key in self.values.keys() - self._moved:
                self.values[key].mul_(1 - self._weight(n_passes))

    def _has_factors(self, term: Term) -> bool:
        is_read_out = not self._read_outs.isdisjoint(term.names)
        return isinstance(term, Outer) and not is_read_out and not is_too_large(term)

    def _move_factors(self, term: Any, n_passes: int, has_padding: bool) -> None:
        """Move A, G and T of a layer."""
        right, left = term.second_moments(padded=has_padding)
        n_positions = right.new_tensor(term.n_positions * term.n_examples)
        if has_padding:
            n_positions = term.used_positions().sum().to(right)
        key = term.joint.key
        self.joints[key] = term.joint
        self._move(f"{key}.input", right.div_(term.n_examples), n_passes)
        self._move(f"{key}.output", left.div_(term.n_examples), n_passes)
        self._move(f"{key}.positions", n_positions.div_(term.n_examples), n_passes)
        if not self._recurrent.isdisjoint(term.names):
            squares = [sums.sum() for sums in term.square_sum().values()]
            self._move(f"{key}.square", sum(squares) / term.n_examples, n_passes)

    def _move(self, key: str, values: Tensor, n_passes: int) -> None:
        if key not in self.values:
            self.values[key] = torch.zeros_like(values)
        self.values[key].lerp_(values.to(self.values[key]), self._weight(n_passes))
        self._moved.add(key)

    def _weight(self, n_passes: int) -> float:
        """The weight of the last passes in the means."""
        if self._beta2 is None:
            return n_passes / self.recorded
        return (1 - self._beta2) / (1 - self._beta2**self.recorded)

    @property
    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A and G by the layer's weight."""
        return {
            key: (self.values[f"{key}.input"], self.values[f"{key}.output"]) for key in self.joints
        }

    @property
    def recorded_names(self) -> set[str]:
        """The names of the means, and of the parameters with factors."""
        names = set(self.values)
        for joint in self.joints.values():
            names.update(joint.names)
        return names

    def structure(self, parameters: Mapping[str, nn.Parameter], n_data: int) -> Kronecker:
        """N · A ⊗ G / T, and N · E_i g_i² of the other parameters.

        The gradients at the steps of a recurrent layer are no independent positions: it has
        N · A ⊗ G · E_i ‖g_i‖² / (tr A · tr G), of the Fisher's own trace.
        """
        factors = self.factors
        joined = {key: (self.joints[key], *pair) for key, pair in factors.items()}
        blocks = eigenbases(joined, parameters, n_data)
        form = Kronecker.empty(blocks, parameters)
        values = {name: n_data * self.values[name].to(parameters[name]) for name in form.plain}
        for block in blocks:
            assert block.left is not None
            input_factor, output_factor = factors[block.key]
            of_rows = _eigenvalues(output_factor, block.left)
            of_columns = _eigenvalues(input_factor, block.right)
            scale = n_data * self._scale(block.key)
            values[block.key] = scale * of_rows.unsqueeze(-1) * of_columns.unsqueeze(-2)
        return form.with_values(values)

    def _scale(self, key: str) -> float:
        """The factor of A ⊗ G in an example's mean curvature."""
        if f"{key}.square" not in self.values:
            return 1 / float(self.values[f"{key}.positions"])
        traces = [factor.diagonal(0, -2, -1).sum() for factor in self.factors[key]]
        of_factors = float(traces[0] * traces[1])
        return float(self.values[f"{key}.square"]) / of_factors if of_factors > 0 else 0.0


def _eigenvalues(factor: Tensor, basis: Tensor) -> Tensor:
    """The diagonal of a factor in its eigenbasis."""
    rotated = basis.mT @ factor.to(basis) @ basis
    return rotated.diagonal(0, -2, -1).clamp_min(0)

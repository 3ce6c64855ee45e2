"""Weights without validation data: against quadratics whose optimum is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.merging import METHODS, combine, default_weights

State = dict[str, Tensor]
SHAPES = {"layer.weight": (3, 2), "layer.bias": (3,), "scale": ()}


def tensors(seed: int, positive: bool = False) -> State:
    g = torch.Generator().manual_seed(seed)
    found = {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in SHAPES.items()}
    return {n: t.exp() for n, t in found.items()} if positive else found


class Quadratics:
    """T losses ½(θ − c_t)ᵀ H_t (θ − c_t) and a prior ½(θ − θ_0)ᵀ H_0 (θ − θ_0), H diagonal.

    Each θ_t is the optimum of its own loss and the prior, as fine-tuning finds it.
    """

    def __init__(self, count: int = 3, prior: float = 0.7) -> None:
        self.base = tensors(0)
        self.centres = [tensors(10 + t) for t in range(count)]
        self.curved = [tensors(20 + t, positive=True) for t in range(count)]
        self.prior = {n: prior * h for n, h in tensors(30, positive=True).items()}
        self.models = [
            {
                n: (self.prior[n] * self.base[n] + h[n] * c[n]) / (self.prior[n] + h[n])
                for n in SHAPES
            }
            for c, h in zip(self.centres, self.curved, strict=True)
        ]

    def loss(self, theta: State, base: bool = True) -> float:
        total = 0.0
        for c, h in zip(self.centres, self.curved, strict=True):
            total += sum(float((h[n] * (theta[n] - c[n]) ** 2).sum()) for n in SHAPES) / 2
        if base:
            p = self.prior
            total += sum(float((p[n] * (theta[n] - self.base[n]) ** 2).sum()) for n in SHAPES) / 2
        return total

    def merged(self, weights: list[float]) -> State:
        return {
            n: combine(
                self.base[n],
                [m[n] for m in self.models],
                weights,
                precisions=[h[n] for h in self.curved],
                base_precision=self.prior[n],
                dtype=torch.float64,
            )
            for n in SHAPES
        }

    def optimum(self) -> State:
        """Of all losses and the prior together, by its own closed form."""
        found = {}
        for n in SHAPES:
            top = self.prior[n] * self.base[n]
            low = self.prior[n].clone()
            for c, h in zip(self.centres, self.curved, strict=True):
                top, low = top + h[n] * c[n], low + h[n]
            found[n] = top / low
        return found


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_defaults_follow_the_method(method: str) -> None:
    expected = 1.0 if method in ("gradient_matching", "fisher", "fisher_ties") else 0.25
    assert default_weights(method, 4) == [expected] * 4


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_weight_of_one_is_the_multitask_optimum_and_no_other_is(count: int) -> None:
    q = Quadratics(count)
    best = q.loss(q.optimum())
    at_default = q.merged(default_weights("gradient_matching", count))
    for n, t in q.optimum().items():
        torch.testing.assert_close(at_default[n], t, rtol=0, atol=1e-12)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert q.loss(q.merged([factor] * count)) > best + 1e-5


@pytest.mark.parametrize("arguments", [("mean", 2), ("linear", 0), ("linear", True), (None, 2)])
def test_no_default_for_what_is_no_method(arguments: tuple[Any, Any]) -> None:
    with pytest.raises(InputError):
        default_weights(*arguments)

"""Weights without validation data: against quadratics whose optimum is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.merging import METHODS, combine, default_weights, suggest_weights
from blr_analysis.posterior import Posterior

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

    def along(self, weights: list[float]) -> State:
        """Task arithmetic."""
        return {
            n: b + sum(a * (m[n] - b) for a, m in zip(weights, self.models, strict=True))
            for n, b in self.base.items()
        }

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


@pytest.mark.parametrize("each", [False, True])
def test_the_suggestion_is_the_best_along_the_task_vectors(each: bool) -> None:
    q = Quadratics()
    found = suggest_weights(
        q.base, q.models, precisions=q.curved, base_precision=q.prior, each=each
    )
    alphas = list(found.weights.values())
    assert each or len(set(alphas)) == 1
    here = q.loss(q.along(alphas))
    for t in range(3):
        for step in (-1e-3, 1e-3):
            moved = [a + step * (not each or s == t) for s, a in enumerate(alphas)]
            assert q.loss(q.along(moved)) > here


def test_a_weight_for_each_is_better_than_one_for_all_and_matching_is_better_still() -> None:
    q = Quadratics()
    given: dict[str, Any] = dict(precisions=q.curved, base_precision=q.prior)
    one, each = (suggest_weights(q.base, q.models, each=e, **given) for e in (False, True))
    best = q.loss(q.optimum())
    for found in (one, each):
        exact = q.loss(q.along(list(found.weights.values()))) - best
        assert found.excess == pytest.approx(exact, rel=1e-10)
    assert one.excess > each.excess > 1e-3
    assert one.excess_of_sum == pytest.approx(q.loss(q.along([1.0] * 3)) - best, rel=1e-10)
    assert one.excess_of_average == pytest.approx(q.loss(q.along([1 / 3] * 3)) - best, rel=1e-10)


def test_delta_is_a_base_precision() -> None:
    q = Quadratics()
    flat = {n: torch.full_like(t, 0.3) for n, t in q.base.items()}
    given = suggest_weights(q.base, q.models, precisions=q.curved, base_precision=flat)
    found = suggest_weights(q.base, q.models, precisions=q.curved, delta=0.3)
    assert found.weights == pytest.approx(given.weights, rel=1e-12)
    without = suggest_weights(q.base, q.models, precisions=q.curved)
    assert without.weights["1"] != pytest.approx(found.weights["1"], rel=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_a_common_scale_of_the_precisions_changes_nothing(scale: float) -> None:
    q = Quadratics()
    found = suggest_weights(q.base, q.models, precisions=q.curved, each=True)
    scaled = [{n: scale * h for n, h in c.items()} for c in q.curved]
    again = suggest_weights(q.base, q.models, precisions=scaled, each=True)
    assert again.weights == pytest.approx(found.weights, rel=1e-8)
    assert again.excess == pytest.approx(scale * found.excess, rel=1e-8)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_same_task_again_and_again_is_averaged(count: int) -> None:
    q = Quadratics(1)
    for each in (False, True):
        found = suggest_weights(q.base, q.models * count, precisions=q.curved * count, each=each)
        assert list(found.weights.values()) == pytest.approx([1 / count] * count)
        assert found.excess == pytest.approx(0, abs=1e-10)


def test_tasks_that_share_no_weight_are_added_up() -> None:
    base = {"w": torch.zeros(4, dtype=torch.float64)}
    models, curved = [], []
    for t in range(4):
        where = torch.nn.functional.one_hot(torch.tensor(t), 4).double()
        models.append({"w": (t + 1) * where})
        curved.append({"w": (2 + t) * where})
    found = suggest_weights(base, models, precisions=curved)
    assert list(found.weights.values()) == pytest.approx([1.0] * 4)
    assert found.excess == pytest.approx(0, abs=1e-12) and found.excess_of_average > 1


def test_names_posteriors_and_modules() -> None:
    q = Quadratics(2)
    named = dict(zip("ab", q.models, strict=True))
    posteriors = {
        k: Posterior(m, {n: h + 2.0 for n, h in c.items()}, prior_precision=2.0, n_data=9)
        for (k, m), c in zip(named.items(), q.curved, strict=True)
    }
    reversed_order = dict(reversed(posteriors.items()))
    found = suggest_weights(q.base, named, precisions=reversed_order, each=True)
    plain = suggest_weights(q.base, q.models, precisions=q.curved, each=True)
    assert list(found.weights) == ["a", "b"]
    assert list(found.weights.values()) == pytest.approx(list(plain.weights.values()))
    assert "a: " in repr(found)
    one, two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    ones = {n: torch.ones_like(p) for n, p in one.state_dict().items()}
    assert suggest_weights(one, [two], precisions=[ones]).weights == {"1": 1.0}


def broken(**changes: Any) -> dict[str, Any]:
    q = Quadratics(2)
    return {"base": q.base, "models": q.models, "precisions": q.curved, **changes}


GOOD = Quadratics(2)
NAN = {n: t * math.nan for n, t in GOOD.base.items()}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"models": []}, "at least one"),
        ({"models": GOOD.models[0]}, "must be a state dict"),
        ({"models": [GOOD.models[0], {"other": torch.ones(2)}]}, "different tensors"),
        ({"models": [GOOD.models[0], {**GOOD.models[1], "scale": torch.ones(2)}]}, "shape"),
        ({"models": [GOOD.models[0], NAN]}, "NaN"),
        ({"base": {"layer.bias": 3}}, "is a int"),
        ({"precisions": GOOD.curved[:1]}, "one for each of 2"),
        ({"precisions": {"1": GOOD.curved[0], "3": GOOD.curved[1]}}, "same names"),
        ({"precisions": [GOOD.curved[0], NAN]}, "finite"),
        ({"precisions": [GOOD.curved[0], {n: -h for n, h in GOOD.curved[1].items()}]}, "least 0"),
        ({"precisions": [GOOD.curved[0], {"scale": torch.tensor(1.0)}]}, "different tensors"),
        ({"delta": -1.0}, "delta"),
        ({"models": [GOOD.base, GOOD.base]}, "no model differs"),
    ],
)
def test_bad_input(changes: dict[str, Any], word: str) -> None:
    arguments = broken(**changes)
    with pytest.raises(InputError, match=word):
        suggest_weights(arguments.pop("base"), arguments.pop("models"), **arguments)


@pytest.mark.parametrize("arguments", [("mean", 2), ("linear", 0), ("linear", True), (None, 2)])
def test_no_default_for_what_is_no_method(arguments: tuple[Any, Any]) -> None:
    with pytest.raises(InputError):
        default_weights(*arguments)

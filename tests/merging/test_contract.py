"""The contract of every method: in memory, streamed and run again it is the formula of its paper,
written out in float64 on whole tensors."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from merge_contract import SCALE, MergeContract
from models_on_disk import SHAPES, curved, near, state
from torch import Tensor

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.merging.sparse import draws


class TestGradientMatching(MergeContract):
    method = "gradient_matching"

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        a = self.shares(models)
        step = (a * (first + h) * (models - base)).sum(0)
        total = first + (a * h).sum(0)
        size = first + (a.abs() * h).sum(0)
        plain = (a * (models - base)).sum(0)
        return base + torch.where(total > 0.1 * size, step / total, plain)


class TestFisher(MergeContract):
    method = "fisher"
    weights = (0.7, 0.4, 1.2)

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        a = self.shares(models)
        return (a * h * models).sum(0) / (a * h).sum(0)


class TestTaskArithmetic(MergeContract):
    method = "task_arithmetic"
    options: ClassVar[dict[str, Any]] = {"scale": SCALE}

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        return base + SCALE * (self.shares(models) * (models - base)).sum(0)


class TestLinear(MergeContract):
    method = "linear"

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        return (self.shares(models) * models).sum(0) / sum(self.weights)


class TestTies(MergeContract):
    method = "ties"
    options: ClassVar[dict[str, Any]] = {"density": 0.5, "scale": SCALE}

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        """Trim by sorting, elect and average entry by entry."""
        h = h if self.method == "fisher_ties" else torch.ones_like(h)
        flat = (models - base).reshape(len(models), -1)
        size = flat.abs() * h.reshape(len(h), -1).sqrt()
        mask = torch.zeros_like(flat)
        count = max(1, int(0.5 * flat.shape[1]))
        for row, order in zip(mask, size.argsort(1, descending=True), strict=True):
            row[order[:count]] = 1.0
        shares = self.shares(models) * h
        pulls = shares * (mask * flat).view_as(models)
        sign = torch.where(pulls.sum(0) >= 0, 1.0, -1.0)
        agree = pulls * sign > 0
        total = (shares * agree).sum(0)
        return base + SCALE * (pulls * agree).sum(0) / torch.where(total == 0, 1.0, total)


class TestFisherTies(TestTies):
    method = "fisher_ties"
    weights = (0.7, 0.4, 0.2)


class TestDareLinear(MergeContract):
    method = "dare_linear"
    options: ClassVar[dict[str, Any]] = {"density": 0.25, "scale": SCALE, "seed": 3}

    def steps(self, base: Tensor, models: Tensor, name: str) -> Tensor:
        """The steps where the package draws less than the density, divided by the density."""
        steps = models - base
        drawn = [draws(f"3\0{t}\0{name}", 0, base.numel()) for t in range(len(steps))]
        return steps * (torch.stack(drawn).view_as(steps) < 0.25) / 0.25

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        return base + SCALE * (self.shares(models) * self.steps(base, models, name)).sum(0)


class TestDareTies(TestDareLinear):
    method = "dare_ties"

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        pulls = self.shares(models) * self.steps(base, models, name)
        sign = torch.where(pulls.sum(0) >= 0, 1.0, -1.0)
        return base + SCALE * (pulls * (pulls * sign > 0)).sum(0)


def unit(values: Tensor) -> Tensor:
    return values / values.norm()


class TestSlerp(MergeContract):
    method = "slerp"
    weights = (0.7, 0.3)

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        first_model, second_model = models
        cosine = float((unit(first_model) * unit(second_model)).sum())
        if abs(cosine) > 0.9995:
            return 0.7 * first_model + 0.3 * second_model
        angle = math.acos(cosine)
        arc = math.sin(0.7 * angle) * first_model + math.sin(0.3 * angle) * second_model
        return arc / math.sin(angle)


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("zero", ["first", "second", "both"])
def test_slerp_of_zeros_is_that_at_a_right_angle(t: float, zero: str) -> None:
    """A vector of zeros or of tiny numbers has no direction."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    for size in (0.0, 1e-12):
        left, right = vectors
        if zero != "second":
            left = size * left
        if zero != "first":
            right = size * right
        truth = math.cos(t * math.pi / 2) * left + math.sin(t * math.pi / 2) * right
        actual = merged("slerp", None, [{"w": left}, {"w": right}], weights=[1 - t, t])
        torch.testing.assert_close(actual, truth)


class TestMultislerp(MergeContract):
    method = "multislerp"
    weights = (0.5, 0.3, 0.2)

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        steps = models - base
        a = self.shares(models)
        mean = sum(w * unit(s) for w, s in zip(self.weights, steps, strict=True))
        lengths = steps.reshape(len(steps), -1).norm(dim=1)
        return base + float((a.flatten() * lengths).sum()) * unit(mean)


class TestKarcher(MergeContract):
    method = "karcher"
    weights = (0.5, 0.3, 0.2)
    close = 2e-5  # the package stops at steps below 1e-5

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        """The point where the mean tangent is zero, reached by steps along the tangent."""
        points = [unit(m) for m in models]
        point = unit(sum(w * p for w, p in zip(self.weights, points, strict=True)))
        for _ in range(60):
            tangent = torch.zeros_like(point)
            for w, p in zip(self.weights, points, strict=True):
                cosine = (p * point).sum().clamp(-1, 1)
                across = p - cosine * point
                if float(across.norm()) > 1e-12:
                    tangent += w * cosine.acos() * unit(across)
            point = unit(point + tangent)
        lengths = models.reshape(len(models), -1).norm(dim=1)
        return float((torch.tensor(self.weights).double() * lengths).sum()) * point


class TestModelStock(MergeContract):
    method = "model_stock"

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        steps = models - base
        pairs = itertools.combinations(steps, 2)
        cosine = sum((unit(a) * unit(b)).sum() for a, b in pairs) / 3
        return base + 3 * cosine / (1 + 2 * cosine) * steps.mean(0)


# Identities


def states(*rows: list[float]) -> list[dict[str, Tensor]]:
    """State dicts of one tensor."""
    return [{"w": torch.tensor(row, dtype=torch.float64)} for row in rows]


def merged(method: str, base: Any, models: Any, **settings: Any) -> Tensor:
    return blr.merge(base, models, method=method, dtype=torch.float64, **settings)["w"]


def test_special_cases_of_gradient_matching() -> None:
    base = states([0.1, 0.2])[0]
    models = states([1.0, 2.0], [3.0, -1.0])
    equal = states([2.0, 5.0], [2.0, 5.0])
    zero = states([0.0, 0.0], [0.0, 0.0])
    curved = states([1.0, 3.0], [4.0, 0.5])
    weights = [0.6, 0.4]

    def matched(precisions: Any, delta: float = 0.0) -> Tensor:
        settings = {"weights": weights, "delta": delta}
        return merged("gradient_matching", base, models, precisions=precisions, **settings)

    arithmetic = merged("task_arithmetic", base, models, weights=weights)
    torch.testing.assert_close(matched(zero, delta=1.0), arithmetic)
    average = merged("linear", None, models, weights=weights)
    torch.testing.assert_close(matched(equal), average)
    fisher = merged("fisher", None, models, precisions=curved, weights=weights)
    torch.testing.assert_close(matched(curved), fisher)


def test_a_model_that_equals_its_base_leaves_it_to_the_bit() -> None:
    base = state(0)
    tuned = near(state(0), 1)
    actual = blr.merge(base, [{**base, "scale": tuned["scale"]}], precisions=[curved(1)], delta=1.0)
    assert all(torch.equal(actual[n], base[n]) for n in SHAPES if n != "scale")


@pytest.mark.parametrize(
    ("weight", "h", "first", "expected"),
    [
        (-2.0, [1.0, 0.1], 1.0, [-2.0, -2 * 1.1 / 0.8]),  # H̄ = −1 is no precision
        (-1.0, [9.5, 1.0], 10.0, [-1.0, -11 / 9]),  # 0.5 of 19.5 would take a huge step
        (1.0, [0.0, -0.0], 0.0, [1.0, 1.0]),  # nobody has any
    ],
)
def test_what_is_no_precision_to_divide_by(
    weight: float, h: list[float], first: float, expected: list[float]
) -> None:
    base, model = states([0.0, 0.0], [1.0, 1.0])
    actual = merged(
        "gradient_matching", base, [model], weights=[weight], precisions=states(h), delta=first
    )
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_dare_keeps_by_chance() -> None:
    base = {"w": torch.zeros(2**18 + 5)}
    tuned = [{"w": torch.ones(2**18 + 5)}]
    settings: dict[str, Any] = {"method": "dare_linear", "density": 0.25}
    merge = blr.merge(base, tuned, **settings)["w"]
    assert set(merge.tolist()) == {0.0, 4.0}
    standard_error = math.sqrt(0.25 * 0.75 / len(merge))
    share = float((merge > 0).double().mean())
    assert abs(share - 0.25) < 4 * standard_error
    other_seed = blr.merge(base, tuned, **settings, seed=1)["w"]
    share_of_both = float(((merge > 0) & (other_seed > 0)).double().mean())
    assert abs(share_of_both - 0.0625) < 4 * standard_error
    assert torch.equal(blr.merge(base, tuned, **settings, rescale=False)["w"], merge / 4)


@pytest.mark.parametrize(("density", "least"), [(0.3, 2.0), (0.01, 5.0)])
def test_ties_keeps_all_entries_as_large_as_the_last(density: float, least: float) -> None:
    (tuned,) = states([5.0, -2.0, 2.0, 1.0, 0.0, 2.0, 0.5, 0.0, 0.0, 0.0])
    actual = merged("ties", {"w": torch.zeros(10).double()}, [tuned], density=density)
    assert torch.equal(actual, torch.where(tuned["w"].abs() >= least, tuned["w"], 0.0))


def test_opposite_models_have_no_spherical_mean() -> None:
    with pytest.raises(InputError, match="opposite"):
        merged("karcher", None, states([1.0, 0.0], [-1.0, 0.0]))


def test_the_power_of_diagonals_is_that_of_every_number() -> None:
    """The power is taken of the data's part of each precision, without the prior, also of the
    base's; δ is added as it is."""
    models = states([1.0, 2.0], [3.0, 0.5], [0.3, 0.2])
    precisions = states([4.0, 1.0], [9.0, 0.25], [1.0, 16.0])
    roots = [{"w": h["w"].sqrt()} for h in precisions]
    priors = [
        blr.Posterior(m, {"w": h["w"] + 3.0}, prior_precision=3.0, n_data=5)
        for m, h in zip(models, precisions, strict=True)
    ]
    matched = partial(merged, "gradient_matching", models[0], models[1:], delta=0.5)
    torch.testing.assert_close(
        matched(precisions=priors[1:], base_precision=priors[0], power=0.5),
        matched(precisions=roots[1:], base_precision=roots[0]),
    )
    averaged = partial(merged, "fisher", models[0], models[1:])
    torch.testing.assert_close(
        averaged(precisions=priors[1:], power=0.5), averaged(precisions=roots[1:])
    )

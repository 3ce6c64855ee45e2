"""The contract of every method: in memory, streamed and run again it is the formula of its paper,
written out in float64 on whole tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from merge_contract import SCALE, MergeContract
from models_on_disk import SHAPES, curved, near, state
from torch import Tensor

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.merging.sparse import random_mask


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
    method, options = "task_arithmetic", {"scale": SCALE}

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        return base + SCALE * (self.shares(models) * (models - base)).sum(0)


class TestLinear(MergeContract):
    method = "linear"

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        return (self.shares(models) * models).sum(0) / sum(self.weights)


class TestTies(MergeContract):
    method, options = "ties", {"density": 0.5, "scale": SCALE}

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        """Trim by sorting, elect and average entry by entry."""
        h = h if self.method == "fisher_ties" else torch.ones_like(h)
        flat = (models - base).reshape(len(models), -1)
        size = flat.abs() * h.reshape(len(h), -1).sqrt()
        kept = torch.zeros_like(flat)
        for row, order in zip(kept, size.argsort(1, descending=True), strict=True):
            row[order[: max(1, int(0.5 * flat.shape[1]))]] = 1.0
        shares = self.shares(models) * h
        pulls = shares * (kept * flat).view_as(models)
        sign = torch.where(pulls.sum(0) >= 0, 1.0, -1.0)
        agree = pulls * sign > 0
        below = (shares * agree).sum(0)
        return base + SCALE * (pulls * agree).sum(0) / torch.where(below == 0, 1.0, below)


class TestFisherTies(TestTies):
    method = "fisher_ties"
    weights = (0.7, 0.4, 0.2)


class TestDareLinear(MergeContract):
    method, options = "dare_linear", {"density": 0.25, "scale": SCALE, "seed": 3}

    def steps(self, base: Tensor, models: Tensor, name: str) -> Tensor:
        steps = models - base
        block = 2**17
        rows = []
        for t, step in enumerate(steps.reshape(len(steps), -1)):
            starts = range(0, len(step), block)
            cuts = [(s, min(block, len(step) - s)) for s in starts]
            rows.append(torch.cat([random_mask(0.25, n, 3, t, name, s) for s, n in cuts]))
        return steps * torch.stack(rows).view_as(steps) / 0.25

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
        one, two = models
        cosine = float((unit(one) * unit(two)).sum())
        if abs(cosine) > 0.9995:
            return 0.7 * one + 0.3 * two
        angle = math.acos(cosine)
        return (math.sin(0.7 * angle) * one + math.sin(0.3 * angle) * two) / math.sin(angle)


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("zero", ["first", "second", "both"])
def test_slerp_of_zeros_is_that_at_a_right_angle(t: float, zero: str) -> None:
    """A vector without a direction; also where it is only as good as zero."""
    generator = torch.Generator().manual_seed(0)
    one, two = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    for size in (0.0, 1e-12):
        pair = [one * (size if zero != "second" else 1), two * (size if zero != "first" else 1)]
        truth = math.cos(t * math.pi / 2) * pair[0] + math.sin(t * math.pi / 2) * pair[1]
        states = [{"w": model} for model in pair]
        merge = blr.merge(None, states, method="slerp", weights=[1 - t, t], dtype=torch.float64)
        torch.testing.assert_close(merge["w"], truth)


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
    # steps below 1e-5 are none
    method = "karcher"
    weights = (0.5, 0.3, 0.2)
    close = 2e-5

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        """The point from which no tangent is left, by walking there in small steps."""
        points = [unit(m) for m in models]
        at = unit(sum(w * p for w, p in zip(self.weights, points, strict=True)))
        for _ in range(60):
            tangent = torch.zeros_like(at)
            for w, p in zip(self.weights, points, strict=True):
                cosine = (p * at).sum().clamp(-1, 1)
                across = p - cosine * at
                if float(across.norm()) > 1e-12:
                    tangent += w * cosine.acos() * unit(across)
            at = unit(at + tangent)
        lengths = models.reshape(len(models), -1).norm(dim=1)
        return float((torch.tensor(self.weights).double() * lengths).sum()) * at


class TestModelStock(MergeContract):
    method = "model_stock"

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        steps = models - base
        c = sum((unit(a) * unit(b)).sum() for i, a in enumerate(steps) for b in steps[:i]) / 3
        return base + 3 * c / (1 + 2 * c) * steps.mean(0)


# Identities


def one(*rows: list[float]) -> list[dict[str, Tensor]]:
    return [{"w": torch.tensor(row, dtype=torch.float64)} for row in rows]


def merged(method: str, base: Any, models: Any, **more: Any) -> Tensor:
    return blr.merge(base, models, method=method, dtype=torch.float64, **more)["w"]


def test_special_cases_of_gradient_matching() -> None:
    base = one([0.1, 0.2])[0]
    models = one([1.0, 2.0], [3.0, -1.0])
    same = one([2.0, 5.0], [2.0, 5.0])
    none = one([0.0, 0.0], [0.0, 0.0])
    weights: dict[str, Any] = {"weights": [0.6, 0.4]}
    match = lambda *a, **k: merged("gradient_matching", *a, **k, **weights)  # noqa: E731
    arithmetic = merged("task_arithmetic", base, models, **weights)
    torch.testing.assert_close(match(base, models, precisions=none, delta=1.0), arithmetic)
    average = merged("linear", None, models, **weights)
    torch.testing.assert_close(match(base, models, precisions=same), average)
    curved = one([1.0, 3.0], [4.0, 0.5])
    fisher = merged("fisher", None, models, precisions=curved, **weights)
    torch.testing.assert_close(match(base, models, precisions=curved), fisher)


def test_a_model_that_equals_its_base_leaves_it_to_the_bit() -> None:
    base = state(0)
    other = near(state(0), 1)
    actual = blr.merge(base, [{**base, "scale": other["scale"]}], precisions=[curved(1)], delta=1.0)
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
    base, model = one([0.0, 0.0], [1.0, 1.0])
    actual = merged(
        "gradient_matching", base, [model], weights=[weight], precisions=one(h), delta=first
    )
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_dare_keeps_by_chance() -> None:
    base = {"w": torch.zeros(2**18 + 5)}
    tuned = [{"w": torch.ones(2**18 + 5)}]
    how: dict[str, Any] = {"method": "dare_linear", "density": 0.25}
    once = blr.merge(base, tuned, **how)["w"]
    assert set(once.tolist()) == {0.0, 4.0}
    spread = math.sqrt(0.25 * 0.75 / len(once))
    assert abs(float((once > 0).double().mean()) - 0.25) < 4 * spread
    other = blr.merge(base, tuned, **how, seed=1)["w"]
    assert abs(float(((once > 0) & (other > 0)).double().mean()) - 0.0625) < 4 * spread
    assert torch.equal(blr.merge(base, tuned, **how, rescale=False)["w"], once / 4)


@pytest.mark.parametrize(("density", "least"), [(0.3, 2.0), (0.01, 5.0)])
def test_ties_keeps_all_entries_as_large_as_the_last(density: float, least: float) -> None:
    (tuned,) = one([5.0, -2.0, 2.0, 1.0, 0.0, 2.0, 0.5, 0.0, 0.0, 0.0])
    own = merged("ties", {"w": torch.zeros(10).double()}, [tuned], density=density)
    assert torch.equal(own, torch.where(tuned["w"].abs() >= least, tuned["w"], 0.0))


def test_opposite_models_have_no_spherical_mean() -> None:
    with pytest.raises(InputError, match="opposite"):
        merged("karcher", None, one([1.0, 0.0], [-1.0, 0.0]))


def test_the_power_of_diagonals_is_that_of_every_number() -> None:
    """Of the data's part, the prior off, and the base's own; δ is added as it is."""
    models = one([1.0, 2.0], [3.0, 0.5], [0.3, 0.2])
    held = one([4.0, 1.0], [9.0, 0.25], [1.0, 16.0])
    roots = [{"w": h["w"].sqrt()} for h in held]
    priors = [
        blr.Posterior(m, {"w": h["w"] + 3.0}, prior_precision=3.0, n_data=5)
        for m, h in zip(models, held, strict=True)
    ]
    for method in ("gradient_matching", "fisher"):
        actual = []
        for q, more in ((priors, {"power": 0.5}), (roots, {})):
            based = {"base_precision": q[0], "delta": 0.5} if method != "fisher" else {}
            how = {"precisions": q[1:], **based, **more}
            actual.append(merged(method, models[0], models[1:], **how))
        torch.testing.assert_close(*actual)

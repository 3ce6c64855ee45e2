"""The rule on a loss of few variables: Newton's method, an expectation, and several minima."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from inference_problems import F64, draws, normal
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from blr_analysis.learning_rule.families import FullGaussian, GaussianMixture
from blr_analysis.learning_rule.inference import MultimodalOptimisation, VariationalNewton, minima


def gaussian(mean: float, precision: float) -> FullGaussian:
    return FullGaussian(torch.tensor([mean], dtype=F64), torch.tensor([[precision]], dtype=F64))


def wall(t: Tensor) -> Tensor:
    """A minimum at 0 beside a wall on its left (K&R, Fig. 1a)."""
    return torch.exp(-4 * t[0]) / 4 + t[0]


def test_newton_solves_ridge_regression_in_one_step() -> None:
    x = draws(30, 4)
    y = x @ torch.arange(4.0, dtype=F64) + 1
    start = FullGaussian(draws(4), torch.eye(4, dtype=F64))
    rule = VariationalNewton(look="mean", rho=1.0)

    def loss(t: Tensor) -> Tensor:
        return 0.5 * ((y - x @ t) ** 2).sum() + t @ t

    q = rule.fit(loss, start, max_iter=2, tol=math.inf).q
    precision = x.T @ x + 2 * torch.eye(4, dtype=F64)
    torch.testing.assert_close(q.precision, precision, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.mean, torch.linalg.solve(precision, x.T @ y), rtol=1e-11, atol=0)


def test_newton_on_logistic_regression_converges_quadratically() -> None:
    features, target = load_breast_cancer(return_X_y=True)
    features = (features - features.mean(0)) / features.std(0)
    x = torch.tensor(features)
    sign = torch.tensor(2.0 * target - 1)
    peer = LogisticRegression(C=0.1, fit_intercept=False, tol=1e-12, max_iter=10_000)
    reference = torch.tensor(peer.fit(features, target).coef_[0])

    def loss(t: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-sign * (x @ t)).sum() + 5 * t @ t

    q = normal(30)
    errors = []
    rule = VariationalNewton(look="mean", rho=1.0)
    for _ in range(4):
        q = rule.fit(loss, q, max_iter=2, tol=math.inf).q
        errors.append(float((q.mean - reference).norm()))
    # Two steps at a time: each error is below the square of the one before.
    assert errors[1] < errors[0] ** 2
    assert errors[-1] < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.slow
def test_the_variational_solution_leaves_the_wall(temperature: float) -> None:
    """E_q[ℓ] = exp(−4m + 8/s)/4 + m, so that E_q[ℓ]/T − H(q) is least at s = 4/T, m = 2/s."""
    rule = VariationalNewton(samples=30, rho=0.2, temperature=temperature)
    bayes = rule.fit(wall, gaussian(1.0, 1.0), tol=1e-11).q
    newton = VariationalNewton(look="mean", rho=1.0).fit(wall, gaussian(0.3, 1.0), progress=False)
    assert abs(float(newton.q.mean)) < 1e-9
    assert float(bayes.mean) == pytest.approx(temperature / 2, abs=1e-4)
    assert float(bayes.precision) == pytest.approx(4 / temperature, rel=1e-4)


# Several minima in one run, and what the entropy has to do with it


TWO = [[-2.0], [2.0]]
HIMMELBLAU = [[3.0, 2.0], [-2.805118, 3.131312], [-3.779310, -3.283186], [3.584428, -1.848126]]


def wells(t: Tensor) -> Tensor:
    return (t[0] ** 2 - 4) ** 2 / 8


def himmelblau(t: Tensor) -> Tensor:
    x = t[0]
    y = t[1]
    return (x * x + y - 11) ** 2 + (x + y * y - 7) ** 2


def overlap(means: Tensor, precision: float) -> float:
    """The affinity ∫√(q_j q_k) of a typical component and its nearest: 1 if they coincide."""
    gaps = torch.cdist(means, means).fill_diagonal_(math.inf).amin(1).median()
    return float(torch.exp(-precision * gaps**2 / 8))


def distances(places: list[list[float]], means: Tensor) -> Tensor:
    """The distance of each place from the nearest mean."""
    return torch.cdist(torch.tensor(places, dtype=F64), means).amin(1)


@dataclass(frozen=True)
class Landscape:
    """A loss with several minima, and a run that finds them all."""

    loss: Callable[[Tensor], Tensor]
    minima: list[list[float]]
    components: int
    spread: float  # of their starts
    precision: float
    temperature: tuple[float, float]  # from, to
    steps: int
    near: float  # a mean at this distance has found a minimum


CASES = {
    "two wells": Landscape(
        wells,
        TWO,
        components=4,
        spread=0.3,
        precision=0.3,
        temperature=(1.0, 0.1),
        steps=60,
        near=0.2,
    ),
    "Himmelblau": Landscape(
        himmelblau,
        HIMMELBLAU,
        components=12,
        spread=1.5,
        precision=0.1,
        temperature=(10.0, 1.0),
        steps=80,
        near=0.3,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_every_minimum_has_a_component_from_overlapping_ones(name: str) -> None:
    """The components are where the rule leaves them, with no descent after it."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    size = len(case.minima[0])
    start = case.spread * torch.randn(case.components, size, generator=generator, dtype=F64)
    rule = MultimodalOptimisation(temperature=case.temperature, n_iter=case.steps, samples=4)
    fitted = rule.fit(
        case.loss, start, precision=case.precision, generator=generator, progress=False
    )
    assert len(fitted.history) == case.steps
    assert overlap(start, case.precision) > 0.8
    assert not (distances(case.minima, start) < case.near).all()
    assert (distances(case.minima, fitted.q.components.mean) < case.near).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_minima_are_polished_and_counted_once(name: str) -> None:
    case = CASES[name]
    near = torch.tensor([*case.minima, *case.minima[:2]], dtype=F64)
    actual = minima(case.loss, near + 0.03 * draws(*near.shape))
    assert len(actual) == len(case.minima)
    assert float(distances(case.minima, actual).amax()) < 1e-3


def test_the_delta_method_is_newtons_at_each_mean() -> None:
    """One step of one component, by hand: S' = (1 − ρ) S + ρ ∇²ℓ(m) + ½ ρ² G S⁻¹ G."""
    rule = MultimodalOptimisation(look="mean", rho=0.2, n_iter=1)
    start = torch.ones(1, 1, dtype=F64)
    parts = rule.fit(wells, start, precision=3.0, progress=False).q.components
    slope = (1 - 4) * 1 / 2
    bend = (3 - 4) / 2
    change = bend - 3.0
    precision = 3.0 + 0.2 * change + 0.5 * 0.04 * change**2 / 3.0
    assert float(parts.precision) == pytest.approx(precision, rel=1e-12)
    assert float(parts.mean) == pytest.approx(1 - 0.2 * slope / precision, rel=1e-12)


def test_one_component_is_the_rule_for_one_gaussian() -> None:
    """With K = 1, ∇² log q = −S: Eqs. 29 and 30 are Eq. 12. Here without noise."""
    scale = torch.tensor([[3.0, 0.5], [0.5, 1.0]], dtype=F64)

    def quadratic(t: Tensor) -> Tensor:
        return 0.5 * (t - 1) @ scale @ (t - 1)

    rule = MultimodalOptimisation(rho=0.2, n_iter=80, samples=2)
    generator = torch.Generator().manual_seed(0)
    q = rule.fit(quadratic, draws(1, 2), generator=generator, progress=False).q
    assert isinstance(q, GaussianMixture)
    torch.testing.assert_close(q.components.precision[0], scale, rtol=1e-6, atol=1e-6)
    minimum = torch.ones(2, dtype=F64)
    torch.testing.assert_close(q.components.mean[0], minimum, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "starts", "place"),
    [
        (lambda t: (-t[0]).exp(), [0.0, 1.0], None),  # convex, no minimum: every step has length 1
        (lambda t: t[0] - t[0].log(), [3.0, 0.5], 1.0),  # a step from 3 leads to −3: log is NaN
        *((lambda t, scale=s: scale * (t[0] - 3) ** 2, [0.0], 3.0) for s in (1e-9, 1.0, 1e9)),
    ],
)
def test_a_descent_ends_at_minima_alone(loss: Any, starts: list[float], place: Any) -> None:
    """They are where the loss is finite and at rest, whatever its units."""
    actual = minima(loss, torch.tensor(starts, dtype=F64).unsqueeze(1))
    expected = torch.empty(0, 1) if place is None else torch.tensor([[place]])
    torch.testing.assert_close(actual, expected.double())

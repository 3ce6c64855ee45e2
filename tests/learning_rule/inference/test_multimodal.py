"""Several minima in one run, and what the entropy has to do with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.mixture import GaussianMixture
from blr_analysis.learning_rule.inference.functions import VariationalNewton
from blr_analysis.learning_rule.inference.multimodal import MultimodalOptimisation, minima

WELLS = [[-2.0], [2.0]]
HIMMELBLAU = [[3.0, 2.0], [-2.805118, 3.131312], [-3.779310, -3.283186], [3.584428, -1.848126]]
CAMEL = [
    [0.0898, -0.7127], [-0.0898, 0.7127], [1.7036, -0.7961], [-1.7036, 0.7961],
    [1.6071, 0.5687], [-1.6071, -0.5687],
]  # fmt: skip


def wells(t: Tensor) -> Tensor:
    return (t[0] ** 2 - 4) ** 2 / 8


def himmelblau(t: Tensor) -> Tensor:
    x, y = t[0], t[1]
    return (x * x + y - 11) ** 2 + (x + y * y - 7) ** 2


def camel(t: Tensor) -> Tensor:
    x, y, x2 = t[0], t[1], t[0] * t[0]
    return (4 - 2.1 * x2 + x2 * x2 / 3) * x2 + x * y + (-4 + 4 * y * y) * y * y


def starts(count: int, size: int, spread: float, seed: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, size, generator=generator, dtype=torch.float64)
    return spread * drawn, generator


def overlap(means: Tensor, precision: float) -> float:
    """The smallest affinity ∫√(q_j q_k) of any two components: 1 where they coincide."""
    gaps = torch.cdist(means, means).square().max()
    return float(torch.exp(-precision * gaps / 8))


CASES: dict[str, tuple[Callable[[Tensor], Tensor], list, int, float, float, tuple, int]] = {
    "two wells": (wells, WELLS, 4, 0.3, 0.3, (1.0, 0.1), 60),
    "Himmelblau": (himmelblau, HIMMELBLAU, 12, 1.5, 0.1, (10.0, 1.0), 80),
    "six-hump camel": (camel, CAMEL, 24, 1.3, 0.5, (0.1, 0.02), 60),
}


@pytest.mark.parametrize("name", CASES)
def test_every_minimum_is_found_from_overlapping_components(name: str) -> None:
    loss, known, count, spread, precision, temperature, n_iter = CASES[name]
    size = len(known[0])
    first, generator = starts(count, size, spread, 0)
    assert overlap(first, precision) > 0.01
    rule = MultimodalOptimisation(temperature=temperature, n_iter=n_iter, samples=4)
    fitted = rule.fit(loss, first, precision=precision, generator=generator, progress=False)
    found = minima(loss, fitted.q.components.mean)
    gaps = torch.cdist(found, torch.tensor(known, dtype=torch.float64))
    assert len(found) == len(known)
    assert float(gaps.min(0).values.max()) < 1e-3
    assert len(fitted.history) == n_iter


def test_the_objective_falls() -> None:
    first, generator = starts(4, 1, 0.5, 0)
    fitted = MultimodalOptimisation(n_iter=60).fit(
        wells, first, generator=generator, progress=False
    )
    assert sum(fitted.history[-10:]) / 10 < fitted.history[0] - 0.1


@pytest.mark.parametrize("seed", range(3))
def test_without_the_entropy_components_end_up_together(seed: int) -> None:
    """Two components start almost on one another, on one side of the barrier."""
    first = torch.tensor([[0.2], [0.3]], dtype=torch.float64)

    def run(entropy: bool) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        rule = MultimodalOptimisation(temperature=1.0, entropy=entropy, samples=20)
        fitted = rule.fit(wells, first, precision=0.2, generator=generator, progress=False)
        return fitted.q.components.mean

    apart, together = run(True), run(False)
    assert len(minima(wells, apart)) == 2
    assert len(minima(wells, together)) == 1


def test_one_component_is_the_rule_for_one_gaussian() -> None:
    """With K = 1, ∇² log q = −S: Eqs. 29 and 30 are Eq. 12. Here without noise."""
    scale = torch.tensor([[3.0, 0.5], [0.5, 1.0]], dtype=torch.float64)

    def quadratic(t: Tensor) -> Tensor:
        return 0.5 * (t - 1) @ scale @ (t - 1)

    rule = MultimodalOptimisation(rho=0.2, n_iter=200, samples=2)
    first, generator = starts(1, 2, 1.0, 0)
    q = rule.fit(quadratic, first, generator=generator, progress=False).q
    assert isinstance(q, GaussianMixture)
    torch.testing.assert_close(q.components.precision[0], scale, rtol=1e-6, atol=1e-6)
    one = torch.ones(2, dtype=torch.float64)
    torch.testing.assert_close(q.components.mean[0], one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MultimodalOptimisation(rho=0.0),
        lambda: MultimodalOptimisation(temperature=-1.0),
        lambda: MultimodalOptimisation(temperature=(1.0, 0.0)),
        lambda: MultimodalOptimisation(temperature=(1.0, 2.0, 3.0)),
        lambda: MultimodalOptimisation(samples=0),
        lambda: MultimodalOptimisation().fit(wells, torch.zeros(2)),
        lambda: MultimodalOptimisation().fit(wells, torch.zeros(2, 1)),
        lambda: MultimodalOptimisation().fit(lambda t: t, torch.tensor([[0.0], [1.0]])),
        lambda: MultimodalOptimisation().fit(
            lambda t: torch.log(t[0] - 100), torch.tensor([[0.0], [1.0]])
        ),
        lambda: VariationalNewton(look="everywhere"),
    ],
)
def test_bad_input_is_named(make: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        make()


def well(t: Tensor) -> Tensor:
    return (t[0] ** 2 - 4) ** 2 / 8


@pytest.mark.parametrize(
    ("starts", "match"),
    [
        (torch.zeros(0, 1), r"a row per component, got \(0, 1\)"),
        (torch.zeros(2, 0), r"a row per component, got \(2, 0\)"),
        (torch.zeros(3), r"a row per component, got \(3,\)"),
        (torch.ones(3, 1, dtype=torch.long), "floating-point numbers, got torch.int64"),
        (torch.zeros(2, 1).half(), "single or double precision"),
        (torch.full((2, 1), torch.nan), "starts must be finite"),
        (None, "floating-point numbers, got NoneType"),
    ],
)
def test_starts_that_are_none_are_named(starts: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        MultimodalOptimisation().fit(well, starts)
    with pytest.raises(InputError, match=match):
        minima(well, starts)


@pytest.mark.parametrize("precision", [None, "a", 0.0, -1.0, math.nan, True])
def test_a_precision_that_is_none_is_named(precision: Any) -> None:
    with pytest.raises(InputError, match="precision must be positive and finite"):
        MultimodalOptimisation().fit(well, torch.tensor([[0.0], [1.0]]), precision=precision)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"tolerance": None}, "tolerance must be 0 or more"),
        ({"tolerance": math.nan}, "tolerance must be 0 or more"),
        ({"max_iter": 0}, "max_iter must be a positive integer"),
    ],
)
def test_settings_of_minima_are_named(settings: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        minima(well, torch.tensor([[0.5]]), **settings)


def test_what_has_not_come_to_rest_is_no_minimum() -> None:
    """exp(−t) is convex and has no minimum: Newton's steps stay of length 1."""
    assert minima(lambda t: (-t[0]).exp(), torch.tensor([[0.0], [1.0]])).shape == (0, 1)


def test_a_descent_stays_where_the_loss_is_finite() -> None:
    """Newton's step from 3 on t − log t leads to −3, where the logarithm is no number."""
    found = minima(lambda t: t[0] - t[0].log(), torch.tensor([[3.0], [0.5]], dtype=torch.float64))
    torch.testing.assert_close(found, torch.ones(1, 1, dtype=torch.float64))

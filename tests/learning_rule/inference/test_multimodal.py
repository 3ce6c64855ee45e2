"""Several minima in one run, and what the entropy has to do with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.mixture import GaussianMixture
from blr_analysis.learning_rule.inference.functions import (
    MultimodalOptimisation,
    VariationalNewton,
    minima,
)

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
    """The affinity ∫√(q_j q_k) to its nearest of a typical component: 1 if they coincide."""
    gaps = torch.cdist(means, means).fill_diagonal_(math.inf).amin(1).median()
    return float(torch.exp(-precision * gaps**2 / 8))


@dataclass(frozen=True)
class Landscape:
    """A loss, its minima, how components begin, and how near one must come to a minimum."""

    loss: Callable[[Tensor], Tensor]
    known: list[list[float]]
    count: int
    spread: float
    precision: float
    temperature: tuple[float, float]
    n_iter: int
    near: float

    def fit(self, seed: int, **settings: Any) -> tuple[Tensor, Tensor]:
        """The components' means before and after."""
        first, generator = starts(self.count, len(self.known[0]), self.spread, seed)
        rule = MultimodalOptimisation(
            temperature=self.temperature, n_iter=self.n_iter, samples=4, **settings
        )
        fitted = rule.fit(
            self.loss, first, precision=self.precision, generator=generator, progress=False
        )
        assert len(fitted.history) == self.n_iter
        return first, fitted.q.components.mean

    def found(self, means: Tensor) -> int:
        """How many minima have a component's mean beside them."""
        gaps = torch.cdist(torch.tensor(self.known, dtype=torch.float64), means)
        return int((gaps.amin(1) < self.near).sum())


CASES = {
    "two wells": Landscape(wells, WELLS, 4, 0.3, 0.3, (1.0, 0.1), 60, 0.2),
    "Himmelblau": Landscape(himmelblau, HIMMELBLAU, 12, 1.5, 0.1, (10.0, 1.0), 80, 0.3),
    "six-hump camel": Landscape(camel, CAMEL, 36, 1.3, 2.0, (0.1, 0.02), 80, 0.15),
}


def test_derivatives_of_another_dtype_are_read() -> None:
    """−log of two normals, whose Hessian torch gives in float64: the same as all in float64."""

    def loss(t: Tensor) -> Tensor:
        means = torch.tensor([[-3.0, 0.0], [3.0, 1.0]], dtype=t.dtype)
        each = [math.log(0.5) - 0.5 * ((t - m) ** 2 / 0.5).sum() for m in means]
        return -torch.logsumexp(torch.stack(each), 0)

    starts = torch.tensor([[-0.1, 0.0], [0.1, 0.0]])
    assert torch.func.hessian(loss)(starts[0]).dtype == torch.float64
    rule = MultimodalOptimisation(look="mean", n_iter=3)
    found, exact = (rule.fit(loss, s, progress=False).q for s in (starts, starts.double()))
    assert found.components.mean.dtype == torch.float32
    torch.testing.assert_close(
        found.components.mean, exact.components.mean.float(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", CASES)
def test_every_minimum_has_a_component_from_overlapping_ones(name: str) -> None:
    """The components as the rule leaves them, with no descent after it."""
    case = CASES[name]
    first, last = case.fit(0)
    assert overlap(first, case.precision) > 0.8
    assert case.found(first) < len(case.known)
    assert case.found(last) == len(case.known)


@pytest.mark.parametrize("name", CASES)
def test_minima_are_polished_and_counted_once(name: str) -> None:
    case = CASES[name]
    near = torch.tensor(case.known, dtype=torch.float64).repeat(2, 1)
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(near.shape, generator=generator, dtype=torch.float64) - 0.5
    found = minima(case.loss, near + 0.1 * noise)
    gaps = torch.cdist(found, torch.tensor(case.known, dtype=torch.float64))
    assert len(found) == len(case.known)
    assert float(gaps.amin(0).amax()) < 1e-3


def test_the_entropy_spreads_components_over_the_minima() -> None:
    """The six-hump camel from wider components: twice as many minima as without the entropy."""
    case = replace(CASES["six-hump camel"], count=24, precision=0.5, n_iter=60)
    found = {
        entropy: sum(case.found(case.fit(seed, entropy=entropy)[1]) for seed in range(2))
        for entropy in (True, False)
    }
    assert found[True] >= 2 * found[False] > 0


@pytest.mark.parametrize("look", ["mean", "samples"])
def test_both_looks_find_both_wells(look: str) -> None:
    """Table 1's delta method, and the expectation: all four components settle in the wells."""
    case = CASES["two wells"]
    first, last = case.fit(0, look=look)
    assert case.found(first) == 0 and case.found(last) == 2


def test_the_delta_method_is_newtons_at_each_mean() -> None:
    """One step of one component, by hand: S' = (1 − ρ) S + ρ ∇²ℓ(m) + ½ ρ² G S⁻¹ G."""
    rule = MultimodalOptimisation(look="mean", rho=0.2, n_iter=1)
    at = torch.tensor([[1.0]], dtype=torch.float64)
    parts = rule.fit(wells, at, precision=3.0, progress=False).q.components
    slope, bend = (1 - 4) * 1 / 2, (3 - 4) / 2
    change = bend - 3.0
    precision = 3.0 + 0.2 * change + 0.5 * 0.04 * change**2 / 3.0
    assert float(parts.precision) == pytest.approx(precision, rel=1e-12)
    assert float(parts.mean) == pytest.approx(1 - 0.2 * slope / precision, rel=1e-12)


def test_the_objective_falls() -> None:
    first, generator = starts(4, 1, 0.5, 0)
    fitted = MultimodalOptimisation(n_iter=60).fit(
        wells, first, generator=generator, progress=False
    )
    assert sum(fitted.history[-10:]) / 10 < fitted.history[0] - 0.1


def test_without_the_entropy_components_end_up_together() -> None:
    """Two components start almost on one another, on one side of the barrier."""
    first = torch.tensor([[0.2], [0.3]], dtype=torch.float64)

    def run(entropy: bool) -> Tensor:
        generator = torch.Generator().manual_seed(0)
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
        lambda: MultimodalOptimisation(look="quadrature"),
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
        (torch.zeros(0, 1), r"a row each, got \(0, 1\)"),
        (torch.ones(3, 1, dtype=torch.long), "floating-point numbers, got torch.int64"),
        (torch.zeros(2, 1).half(), "single or double precision"),
        (torch.full((2, 1), torch.nan), "starts must be finite"),
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


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_minima_do_not_depend_on_the_units_of_the_loss(scale: float) -> None:
    found = minima(lambda t: scale * (t[0] - 3) ** 2, torch.zeros(1, 1).double())
    torch.testing.assert_close(found, torch.tensor([[3.0]]).double())

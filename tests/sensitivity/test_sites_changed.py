"""``what_if`` and ``influence`` of sums of sites, against fitting again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.datasets import load_iris

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families import (
    DiagonalGaussian,
    Dirichlet,
    FullGaussian,
    Gamma,
)
from blr_analysis.learning_rule.inference import (
    LDA,
    Conjugate,
    FactorAnalysis,
    GaussianMixtureEM,
    GeneralizedLinear,
    HiddenMarkov,
    MeanFieldRegression,
    OnlineNewton,
    SkewNormal,
    StateSpace,
    fit_skew_normal,
    linear,
    poisson,
)
from blr_analysis.learning_rule.inference.fitted import rows

F64 = torch.float64
ONE = torch.ones((), dtype=F64)


def regression() -> tuple[Conjugate, tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, dtype=F64, generator=g)
    y = x.sum(1) + 0.5 * torch.randn(20, dtype=F64, generator=g)
    prior = FullGaussian(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))
    return Conjugate(prior, linear(0.25)), (x, y)


def test_conjugate_models_are_exact() -> None:
    model, (x, y) = regression()
    fitted, test = model.fit((x[:15], y[:15])), (x[15:], y[15:])
    result = blr.what_if(fitted, remove=[0, 3], add=(x[15:17], y[15:17]), evaluate=test)
    kept = torch.tensor([i for i in range(17) if i not in (0, 3)])
    again = model.fit((x[kept], y[kept]))
    assert result.nll == pytest.approx(float(-again.log_predictive(test).mean()), abs=1e-10)
    assert result.error == pytest.approx(0, abs=1e-12) and result.before != result.nll
    rises = blr.influence(fitted, None, test)
    for i in (0, 7):
        rest = torch.arange(15) != i
        without = model.fit((x[:15][rest], y[:15][rest]))
        exact = fitted.log_predictive(test) - without.log_predictive(test)
        torch.testing.assert_close(rises.matrix[i], exact, rtol=1e-8, atol=1e-9)
    assert rises.top(0, 1)[0] == rises.matrix[:, 0].argmax()


def skew(y: torch.Tensor) -> Any:
    start = SkewNormal(*torch.tensor([0.0, -1.0, 1.0], dtype=F64))
    return fit_skew_normal(
        lambda theta: -theta.square() / 20,
        start,
        log_likelihood=lambda y, theta: y[:, None] * theta - theta.exp(),
        data=y,
        rho=1.0,
        tol=1e-8,
        progress=False,
    )


def documents() -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    topics = torch.tensor([[8.0, 8, 4, 1, 1, 1], [1, 1, 1, 4, 8, 8]])
    shares = torch.rand(25, 1, generator=g)
    return torch.poisson(shares * topics[0] + (1 - shares) * topics[1], generator=g)


def lda(counts: torch.Tensor, start: Dirichlet | None = None) -> Any:
    model = LDA(2, local_tol=1e-8)
    return model.fit(counts, passes=200, batch_size=None, tol=1e-8, start=start, progress=False)


def two_clusters(apart: float = 8.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(2)
    y = torch.randn(30, 2, dtype=F64, generator=g)
    y[:15] += apart
    return y


def logistic(data: tuple[torch.Tensor, torch.Tensor]) -> Any:
    prior = FullGaussian(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))
    return GeneralizedLinear(prior, "bernoulli").fit(data, progress=False)


def labels() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = regression()[1]
    return x, (y > 0).to(F64)


def mixture(y: torch.Tensor, start: Any = None) -> Any:
    g = torch.Generator().manual_seed(0)
    return GaussianMixtureEM(2).fit(y, start=start, tol=1e-12, generator=g, progress=False)


def factors(y: torch.Tensor) -> Any:
    return FactorAnalysis(1).fit(y, tol=1e-11, progress=False)


def one_factor() -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    z, e = torch.randn(18, 1, dtype=F64, generator=g), torch.randn(18, 4, dtype=F64, generator=g)
    return z * torch.tensor([1.0, 0.8, -0.7, 0.5], dtype=F64) + 0.5 * e


def counted(data: tuple[torch.Tensor, torch.Tensor]) -> Any:
    prior = DiagonalGaussian(torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64))
    return MeanFieldRegression(prior, "poisson").fit(data, tol=1e-13, progress=False)


def counts() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = regression()[1]
    return x, y.exp().round()


def switching() -> torch.Tensor:
    g = torch.Generator().manual_seed(4)
    return torch.poisson(torch.tensor([[1.0, 1, 5, 5, 5, 1]]).expand(8, -1), generator=g)


def chain(data: torch.Tensor) -> Any:
    g = torch.Generator().manual_seed(0)
    model = HiddenMarkov(2, poisson(), Gamma(ONE, ONE))
    return model.fit(data, generator=g, tol=1e-13, progress=False)


CASES = {
    "skew normal of four rows": (skew, torch.tensor([0.0, 1.0, 3.0, 2.0], dtype=F64), [2]),
    "LDA of 25 documents": (lda, documents(), [0, 1, 2]),
    "logistic regression": (logistic, labels(), [0, 4, 5]),
    "EM": (mixture, two_clusters(4.0), [0, 3, 20]),
    "factor analysis": (factors, one_factor(), [0, 1]),
    "non-conjugate VMP": (counted, counts(), [0, 4]),
    "hidden Markov model": (chain, switching(), [0, 5]),
}


@pytest.mark.parametrize("name", CASES)
def test_further_steps_come_nearer_and_say_how_near(name: str) -> None:
    """The truth is a fit from the fitted posterior, without the examples."""
    fit, data, gone = CASES[name]
    fitted = fit(data)
    kept = torch.tensor([i for i in range(fitted.n_data) if i not in gone])
    rest = rows(data, kept)
    again = fit(rest, fitted.q) if fit in (lda, mixture) else fit(rest)
    truth = float(-again.log_predictive(data).mean())
    first = float(-fitted.predictive(fitted.without(gone), data).mean())
    result = blr.what_if(fitted, remove=gone, passes=10)
    assert abs(result.nll - truth) < 0.5 * abs(first - truth)
    assert abs(result.nll - truth) <= 3 * result.error + 1e-6
    assert result.steps == 10 and f"{result.nll:.4f}" in repr(result)
    less = fit(rest)  # the same the other way: to a fit without some they are added
    again = fit(data, less.q) if fit in (lda, mixture) else fit(data)
    truth = float(-again.log_predictive(data).mean())
    result = blr.what_if(less, add=rows(data, torch.tensor(gone)), evaluate=data, passes=10)
    assert abs(result.nll - truth) < 0.5 * abs(result.before - truth)
    assert abs(result.nll - truth) <= 3 * result.error + 1e-6


def plateau() -> tuple[Any, torch.Tensor, int]:
    """A mixture that goes on as it is for 40 steps without flower 3, and then to another one."""
    data = load_iris()
    y, kind = torch.tensor(data.data)[::5, :2], torch.tensor(data.target)[::5]
    start = 0.8 * torch.nn.functional.one_hot(kind, 3).double() + 0.2 / 3
    model = GaussianMixtureEM(3, "diag")
    return model.fit(y, start=start, tol=1e-13, max_iter=5000, progress=False), y, 3


@pytest.mark.parametrize(
    "name", ["skew normal of four rows", "logistic regression", "EM", "factor analysis"]
)
def test_steps_go_on_until_they_rest(name: str) -> None:
    fit, data, gone = CASES[name]
    kept = torch.tensor(
        [i for i in range(len(data[0] if fit is logistic else data)) if i not in gone]
    )
    rest = rows(data, kept)
    fitted = fit(data)
    again = fit(rest, fitted.q) if fit is mixture else fit(rest)
    result = blr.what_if(fitted, remove=gone)
    assert result.nll == pytest.approx(float(-again.log_predictive(data).mean()), abs=5e-5)
    assert result.error < 1e-5 and not result.note


def test_a_step_that_hardly_moves_is_no_rest() -> None:
    fitted, _, flower = plateau()
    kept = [i for i in range(fitted.n_data) if i != flower]
    again = fitted.model.fit(
        fitted.data[kept], start=fitted.q, tol=1e-13, max_iter=5000, progress=False
    )
    result = blr.what_if(fitted, remove=[flower])
    assert result.nll == pytest.approx(float(-again.log_predictive(fitted.data).mean()), abs=1e-6)
    assert result.error < 1e-6 and not result.note
    early = blr.what_if(fitted, remove=[flower], passes=30)
    assert early.error == float("inf")
    assert "passes=" in repr(early)


def test_states_are_exact_and_rest_at_once() -> None:
    """Observations taken out of a chain or put behind it, against the filter without or with."""
    one = torch.eye(1, dtype=F64)
    y = torch.tensor([[1.0], [2.5], [4.0], [3.0], [5.0], [torch.nan]], dtype=F64)
    model = StateSpace(one, 0.5 * one, one, one, FullGaussian(torch.zeros(1, dtype=F64), one))
    fitted, less = model.fit(y), y.clone()
    less[1] = torch.nan
    result = blr.what_if(fitted, remove=[1])
    wanted = model.log_predictive(model.fit(less).q, y)[:5]
    assert result.nll == pytest.approx(float(-wanted.mean())) and result.error == 0
    more = torch.tensor([[6.0], [2.0]], dtype=F64)
    added = blr.what_if(fitted, add=more)
    torch.testing.assert_close(added.q.mean, model.fit(torch.cat([y, more])).q.mean[:6])


def test_a_pass_of_online_newton_is_made_again() -> None:
    prior = FullGaussian(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))
    model = OnlineNewton(prior, lambda t, e: 0.5 * (e[0] @ t - e[1]).square(), rate=0.3)
    x, y = (part[:8] for part in regression()[1])
    fitted, rest = model.fit((x, y)), [0, 1, 4, 5, 6, 7]
    q = model.fit((x[rest], y[rest])).q
    result = blr.what_if(fitted, remove=[2, 3])
    wanted = 0.5 * (x @ q.mean - y).square()
    torch.testing.assert_close(result.losses, wanted)
    assert result.error == 0 and not torch.allclose(fitted.without([2, 3]).mean, q.mean)
    found = blr.influence(fitted, None, (x, y))
    gap = 0.5 * ((x @ fitted.without([4]).mean - y).square() - (x @ fitted.mean - y).square())
    torch.testing.assert_close(found.matrix[4], gap)


def test_bad_input() -> None:
    model, data = regression()
    fitted = model.fit(data)
    for wrong in (
        {},
        {"remove": [0], "passes": 0},
        {"remove": [0], "solver": "cg"},
        {"add": (data[0],)},
        {"remove": [99]},
    ):
        with pytest.raises(InputError):
            blr.what_if(fitted, **wrong)
    with pytest.raises(InputError):
        blr.influence(fitted)

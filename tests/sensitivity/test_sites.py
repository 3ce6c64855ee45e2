"""The analyses of posteriors that are sums of sites, against fitting again without the examples."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from sklearn.datasets import load_iris
from torch import Tensor

import blr_analysis as blr
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families import (
    Beta,
    DiagonalGaussian,
    Dirichlet,
    FullGaussian,
    Gamma,
    NormalWishart,
)
from blr_analysis.learning_rule.inference import (
    LDA,
    BayesianGaussianMixture,
    Conjugate,
    FactorAnalysis,
    Fitted,
    GaussianMixtureEM,
    GaussianProcess,
    GeneralizedLinear,
    HiddenMarkov,
    MeanFieldRegression,
    OnlineNewton,
    SkewNormal,
    StateSpace,
    bernoulli,
    categorical,
    fit_skew_normal,
    gaussian,
    linear,
    poisson,
    rbf,
)
from blr_analysis.learning_rule.inference.fitted import rows

F64 = torch.float64
ONE = torch.ones((), dtype=F64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=seeded(seed))


def prior(kind: Any) -> Any:
    precision = torch.eye(3, dtype=F64) if kind is FullGaussian else torch.ones(3, dtype=F64)
    return kind(torch.zeros(3, dtype=F64), precision)


def regression(n: int = 20) -> tuple[Conjugate, tuple[Tensor, Tensor]]:
    x = normal(n, 3)
    return Conjugate(prior(FullGaussian), linear(0.25)), (x, x.sum(1) + 0.5 * normal(n, seed=1))


def outlier() -> Fitted:
    model, (x, y) = regression(25)
    y[7] += 20.0  # shapes the fit most
    return model.fit((x, y))


# Conjugate models are exact, whatever is asked.


CONJUGATE: dict[str, tuple[Conjugate, Any]] = {
    "regression": regression(12),
    "Bernoulli": (Conjugate(Beta(2 * ONE, ONE), bernoulli()), (normal(12) > 0.3).to(F64)),
    "Poisson": (Conjugate(Gamma(ONE, ONE), poisson()), normal(12).exp().round()),
    "categorical": (
        Conjugate(Dirichlet(torch.ones(3, dtype=F64)), categorical(3)),
        torch.arange(12) % 5 % 3,
    ),
    "Gaussian": (
        Conjugate(NormalWishart(normal(2), ONE, 4 * ONE, torch.eye(2, dtype=F64)), gaussian()),
        normal(12, 2),
    ),
}


@pytest.mark.parametrize("name", CONJUGATE)
def test_conjugate_models_are_exact(name: str) -> None:
    model, data = CONJUGATE[name]
    fitted = model.fit(data)
    loo = blr.leave_one_out(fitted)
    scores = blr.sensitivity(fitted)
    rises = blr.influence(fitted, None, fitted.data)
    torch.testing.assert_close(scores.deviation, loo.losses - loo.losses_before)
    for i in range(12):
        again = model.fit(rows(data, torch.arange(12) != i))
        exact = -again.log_predictive(rows(data, torch.tensor([i])))
        torch.testing.assert_close(loo.losses[i : i + 1], exact, rtol=1e-10, atol=1e-10)
        rise = fitted.log_predictive(data) - again.log_predictive(data)
        torch.testing.assert_close(rises.matrix[i], rise, rtol=1e-8, atol=1e-9)
    assert rises.top(1).helpful_values[0, 0] == rises.matrix[:, 0].max()


def test_groups_of_a_conjugate_model() -> None:
    model, (x, y) = regression()
    fitted = model.fit((x[:15], y[:15]))
    test = (x[15:], y[15:])
    result = blr.what_if(fitted, remove=[0, 3], add=(x[15:17], y[15:17]), evaluate=test)
    rest = torch.tensor([i for i in range(17) if i not in (0, 3)])
    again = model.fit((x[rest], y[rest]))
    assert result.nll == pytest.approx(float(-again.log_predictive(test).mean()), abs=1e-10)
    assert result.error == pytest.approx(0, abs=1e-12)
    assert result.before.nll != result.nll


@pytest.mark.parametrize("name", ["Bernoulli", "categorical"])
def test_each_label_taken_out_of_a_conjugate_model(name: str) -> None:
    model, labels = CONJUGATE[name]
    test = labels[:5]
    table = blr.what_if_each(model.fit(labels), evaluate=test)
    assert table.group.tolist() == labels.unique().tolist()
    for label, nll in zip(table.group, table.nll_after, strict=True):
        again = model.fit(labels[labels != label])
        assert nll == pytest.approx(float(-again.log_predictive(test).mean()), abs=1e-10)


def test_a_gaussian_process_classifier() -> None:
    x = normal(30, 2)
    y = (x[:, 0] + 0.5 * normal(30, seed=1) > 0).to(F64)
    model = GaussianProcess(partial(rbf, lengthscale=1.5, variance=4.0))
    loo = blr.leave_one_out(None, model.fit((x, y)))
    for i in (0, 11, 29):
        rest = torch.arange(30) != i
        probability = float(model.fit((x[rest], y[rest])).predict(x[i : i + 1]))
        exact = -torch.tensor(probability if y[i] else 1 - probability).log()
        assert float(loo.losses[i]) == pytest.approx(float(exact), abs=0.02)


# Other models: a subtraction, then steps that come nearer to fitting again.


def skew(y: Tensor) -> Any:
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


def documents() -> Tensor:
    topics = torch.tensor([[8.0, 8, 4, 1, 1, 1], [1, 1, 1, 4, 8, 8]])
    g = seeded(1)
    shares = torch.rand(25, 1, generator=g)
    return torch.poisson(shares * topics[0] + (1 - shares) * topics[1], generator=g)


def lda(counts: Tensor, start: Dirichlet | None = None) -> Any:
    model = LDA(2, local_tol=1e-8)
    return model.fit(counts, passes=200, batch_size=None, tol=1e-8, start=start, progress=False)


def two_clusters(apart: float = 4.0) -> Tensor:
    return normal(30, 2) + apart * (torch.arange(30) < 15)[:, None]


def mixture(y: Tensor, start: Any = None) -> Any:
    options = {"tol": 1e-12, "generator": seeded(), "progress": False}
    return GaussianMixtureEM(2).fit(y, start=start, **options)


def by_vmp(y: Tensor) -> Any:
    return BayesianGaussianMixture.for_data(two_clusters(), 2).fit(y, generator=seeded())


def logistic(data: Any) -> Any:
    return GeneralizedLinear(prior(FullGaussian), "bernoulli").fit(data, progress=False)


def counted(data: Any) -> Any:
    model = MeanFieldRegression(prior(DiagonalGaussian), "poisson")
    return model.fit(data, tol=1e-13, progress=False)


def factors(y: Tensor) -> Any:
    return FactorAnalysis(1).fit(y, tol=1e-11, progress=False)


def one_factor() -> Tensor:
    z = normal(18, 1, seed=3)
    return z * torch.tensor([1.0, 0.8, -0.7, 0.5], dtype=F64) + 0.5 * normal(18, 4, seed=4)


def chain(data: Tensor) -> Any:
    model = HiddenMarkov(2, poisson(), Gamma(ONE, ONE))
    return model.fit(data, generator=seeded(), tol=1e-13, progress=False)


X, Y = regression()[1]
SWITCHING = torch.tensor([[1.0, 1, 5, 5, 5, 1]]).expand(8, -1)
CASES: dict[str, tuple[Any, Any, list[int]]] = {
    "skew normal of four rows": (skew, torch.tensor([0.0, 1.0, 3.0, 2.0], dtype=F64), [2]),
    "LDA of 25 documents": (lda, documents(), [0, 1, 2]),
    "logistic regression": (logistic, (X, (Y > 0).to(F64)), [0, 4, 5]),
    "EM": (mixture, two_clusters(), [0, 3, 20]),
    "factor analysis": (factors, one_factor(), [0, 1]),
    "non-conjugate VMP": (counted, (X, Y.exp().round()), [0, 4]),
    "hidden Markov model": (chain, torch.poisson(SWITCHING, generator=seeded(4)), [0, 5]),
}


SLOW = "LDA of 25 documents"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == SLOW else n for n in CASES]
)
def test_further_steps_come_nearer_and_say_how_near(name: str) -> None:
    """Those that leave, and the same that join a fit without them; ten steps, and until they rest.

    The truth is a fit of what is left, from the fitted posterior where there are several optima.
    """
    fit, data, removed = CASES[name]
    has_many_optima = fit in (lda, mixture)
    fitted = fit(data)
    rest_rows = torch.tensor([i for i in range(fitted.n_data) if i not in removed])
    rest = rows(data, rest_rows)
    less = fit(rest)
    for start, after, first, change in (
        (fitted, rest, fitted.without(removed), {"remove": removed}),
        (less, data, less.q, {"add": rows(data, torch.tensor(removed)), "evaluate": data}),
    ):
        again = fit(after, start.q) if has_many_optima else fit(after)
        truth = float(-again.log_predictive(data).mean())
        before = float(-start.predictive(first, data).mean())
        result = blr.what_if(start, **change, passes=10)
        assert abs(result.nll - truth) < 0.5 * abs(before - truth)
        assert abs(result.nll - truth) <= 3 * result.error + 1e-6
        assert result.passes == 10
        assert f"{result.nll:.4f}" in repr(result)
    if fit in (skew, logistic, mixture, factors):
        again = fit(rest, fitted.q) if has_many_optima else fit(rest)
        result = blr.what_if(fitted, remove=removed)
        assert result.nll == pytest.approx(float(-again.log_predictive(data).mean()), abs=5e-5)
        assert result.error < 1e-5
        assert not result.note


@pytest.mark.parametrize("fit", [mixture, by_vmp, logistic, counted], ids=lambda f: f.__name__)
def test_the_subtraction_ranks_as_fitting_again_does(fit: Any) -> None:
    """Of the rises of the loss: their order, and their sum."""
    x = normal(60, 3)
    data: Any = normal(40, 2) + 4 * (torch.arange(40) % 2)[:, None]
    if fit is logistic:
        data = x, (x[:, 0] + normal(60, seed=1) > 0).to(F64)
    elif fit is counted:
        data = x, (0.5 * x[:, 0] + 0.3 * normal(60, seed=1)).exp().round()
    fitted = fit(data)
    loo = blr.leave_one_out(fitted)
    scores = blr.sensitivity(fitted)
    chosen = scores.top(len(loo))[:: len(loo) // 12]
    exact = []
    for i in chosen.tolist():
        rest = rows(data, torch.arange(len(loo)) != i)
        again = fit(rest, fitted.q) if fit is mixture else fit(rest)
        exact.append(-again.log_predictive(rows(data, torch.tensor([i]))) - loo.losses_before[i])
    pair = torch.stack([scores.deviation[chosen], torch.cat(exact)])
    assert float(torch.corrcoef(pair)[0, 1]) > 0.99
    assert 0.9 < float(pair[0].sum() / pair[1].sum()) < 1.05


def test_a_step_that_hardly_moves_is_no_rest() -> None:
    """A mixture that goes on as it is for 40 steps without flower 3, and then to another one."""
    iris = load_iris()
    y = torch.tensor(iris.data)[::5, :2]
    kind = torch.tensor(iris.target)[::5]
    start = 0.8 * torch.nn.functional.one_hot(kind, 3).double() + 0.2 / 3
    model = GaussianMixtureEM(3, "diag")
    options = {"tol": 1e-13, "max_iter": 5000, "progress": False}
    fitted = model.fit(y, start=start, **options)
    again = model.fit(y[[i for i in range(30) if i != 3]], start=fitted.q, **options)
    result = blr.what_if(fitted, remove=[3])
    assert result.nll == pytest.approx(float(-again.log_predictive(y).mean()), abs=1e-6)
    assert result.error < 1e-6
    assert not result.note
    early = blr.what_if(fitted, remove=[3], passes=30)
    assert early.error == float("inf")
    assert "passes=" in repr(early)


def states() -> tuple[StateSpace, Tensor]:
    """Six times, the last without an observation."""
    identity = torch.eye(1, dtype=F64)
    y = torch.tensor([[1.0], [2.5], [4.0], [3.0], [5.0], [torch.nan]], dtype=F64)
    start = FullGaussian(torch.zeros(1, dtype=F64), identity)
    return StateSpace(identity, 0.5 * identity, identity, identity, start), y


def test_states_are_exact_and_rest_at_once() -> None:
    """Observations taken out of a chain or put behind it, against the filter without or with."""
    model, y = states()
    fitted = model.fit(y)
    less = y.clone()
    less[1] = torch.nan
    result = blr.what_if(fitted, remove=[1])
    expected = model.log_predictive(model.fit(less).q, y)[:5]
    assert result.nll == pytest.approx(float(-expected.mean()))
    assert result.error == 0
    later = torch.tensor([[6.0], [2.0]], dtype=F64)
    added = blr.what_if(fitted, add=later)
    longer = model.fit(torch.cat([y, later]))
    torch.testing.assert_close(added.posterior.mean, longer.q.mean[:6])


def test_a_pass_of_online_newton_is_made_again() -> None:
    def half_square(theta: Tensor, example: Any) -> Tensor:
        inputs, target = example
        return 0.5 * (inputs @ theta - target).square()

    model = OnlineNewton(prior(FullGaussian), half_square, 0.3)
    x = X[:8]
    y = Y[:8]
    fitted = model.fit((x, y))
    rest = [0, 1, 4, 5, 6, 7]
    q = model.fit((x[rest], y[rest])).q
    result = blr.what_if(fitted, remove=[2, 3])
    torch.testing.assert_close(result.losses, 0.5 * (x @ q.mean - y).square())
    assert result.error == 0
    assert not torch.allclose(fitted.without([2, 3]).mean, q.mean)


# Views, and what is refused.


def test_tables_pictures_and_ranks() -> None:
    fitted = outlier()
    scores = blr.sensitivity(None, fitted)
    loo = blr.leave_one_out(None, fitted)
    assert int(scores.deviation.argmax()) == 7
    assert list(scores.table.columns) == ["index", "target", "loss", "deviation"]
    assert list(loo.table.columns) == ["index", "target", "loss", "loss_before", "correction"]
    ranked = scores.table.sort_values("deviation", ascending=False)["index"]
    assert scores.top(3).tolist() == ranked[:3].tolist()
    deviations = sorted(scores.deviation.tolist(), reverse=True)
    curve = scores.plot(n_labels=2).lines[0]
    assert curve.get_ydata().tolist() == pytest.approx(deviations)
    rises = (loo.losses - loo.losses_before).sort(descending=True).values
    curve = loo.plot(n_labels=1).lines[0]
    assert curve.get_ydata().tolist() == pytest.approx(rises.tolist())


def test_unobserved_times_have_no_loss_and_are_neither_ranked_nor_drawn() -> None:
    model, y = states()
    fitted = model.fit(y)
    scores = blr.sensitivity(None, fitted)
    loo = blr.leave_one_out(None, fitted)
    assert loo.losses.isnan().tolist() == [False] * 5 + [True]
    assert loo.nll == pytest.approx(float(loo.losses[:5].mean()))
    assert sorted(scores.top(5).tolist()) == list(range(5))
    assert "nan" not in repr(scores)
    assert len(scores.plot().lines[0].get_xdata()) == 5
    assert len(loo.plot().lines[0].get_xdata()) == 5
    with pytest.raises(InputError, match="at most 5"):
        scores.top(6)


TASK = blr.Task(torch.nn.Linear(3, 1).double(), (X, Y), likelihood="gaussian")
REFUSED: list[tuple[Any, type, str]] = [
    (lambda f: blr.leave_one_out(None, f, refine=3), InputError, "refine"),
    (lambda f: blr.leave_one_out(None, f, correction="cavity"), InputError, "correction"),
    (lambda f: blr.sensitivity(None, f, variance=True), InputError, "variance"),
    (lambda f: blr.sensitivity(f, TASK), InputError, "stands alone"),
    (lambda f: blr.leave_one_out(f, TASK), InputError, "stands alone"),
    (lambda f: blr.influence(f, f.data), InputError, "test data come third"),
    (lambda f: blr.report(f), InputError, "has no audit or report"),
    (lambda f: blr.leave_one_out(None, Fitted(f.q, [0.0], "evidence")), InputError, "no sites"),
    (lambda f: blr.sensitivity(f).top(0), InputError, "k must be"),
    (lambda f: blr.memory_map(blr.sensitivity(f)), InputError, "prediction error and variance"),
    (lambda f: blr.influence(f), InputError, "predict"),
    (lambda f: blr.influence(f, f, TASK), DataError, "pair"),
    (lambda f: blr.what_if_each(f, None, by="source"), InputError, "no column 'source'"),
    (lambda f: blr.what_if(f), InputError, "remove"),
    (lambda f: blr.what_if(f, remove=[0], solver="cg"), InputError, "solver"),
    (lambda f: blr.what_if(f, remove=[0], passes=0), InputError, "passes"),
    (lambda f: blr.what_if(f, remove=[99]), InputError, "99"),
    (lambda f: blr.what_if(f, add=(X,)), DataError, "pair"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_refused(case: int) -> None:
    call, kind, words = REFUSED[case]
    fitted = outlier()
    with pytest.raises(kind, match=words):
        call(fitted)

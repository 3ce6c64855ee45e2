"""What every fitted model answers: one contract for all models.

Each case fits data by its own settings. The oracles of single models are in the files beside this
one; here each fit is compared with itself: fitted twice, again without an example, on broken data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from inference_problems import F64, ONE, WEIGHTS, WISHART, M, draws, normal
from torch import Tensor
from torch.nn.functional import one_hot

import blr_analysis as blr
from blr_analysis.errors import BLRError, InputError
from blr_analysis.learning_rule import families as fam
from blr_analysis.learning_rule import inference as inf
from blr_analysis.learning_rule.inference import Conjugate, Fitted, NotConverged, bernoulli
from blr_analysis.learning_rule.inference.fitted import CHUNK, count, rows, until_flat

X = torch.cat([torch.ones(30, 1, dtype=F64), draws(30, 2)], 1)
REAL = X.sum(1) + 0.5 * draws(30, seed=1)
LABELS = (REAL > 1).double()
COUNTS = (0.5 * REAL).exp().round()
CLUSTERS = draws(30, 2) + 4 * (torch.arange(30) % 2).unsqueeze(1)
HALVES = 0.8 * one_hot(torch.arange(30) % 2).double() + 0.1
RATES = torch.tensor([[1.0, 1, 6, 6, 6, 1]]).expand(9, -1)
SERIES = torch.poisson(RATES, generator=torch.Generator().manual_seed(4)).double()
SHARES = torch.rand(25, 1, generator=torch.Generator().manual_seed(1))
MIXED = SHARES * torch.tensor([8.0, 8, 4, 1, 1, 1]) + (1 - SHARES) * torch.tensor(
    [1.0, 1, 1, 4, 8, 8]
)
DOCUMENTS = torch.poisson(MIXED, generator=torch.Generator().manual_seed(1)).double()
STATES = inf.StateSpace(M, M, M, M, normal(1))


def two_coins(mu: Any, heads: Tensor) -> Tensor:
    """The log-likelihood of ten throws of one of two coins, summed over the coin."""
    up = mu["coin"]["log"]
    down = mu["coin"]["log_complement"]
    return (heads.unsqueeze(1) * up + (10 - heads.unsqueeze(1)) * down).logsumexp(1)


COIN = fam.Beta(*torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=F64))
COINS = inf.MessagePassing({"coin": COIN}, two_coins)


def squared(theta: Tensor, example: tuple[Tensor, Tensor]) -> Tensor:
    return 0.5 * (example[0] @ theta - example[1]).square()


def skewed(data: Tensor, **settings: Any) -> Fitted:
    return inf.fit_skew_normal(
        lambda theta: -theta.square() / 20,
        inf.SkewNormal(*torch.tensor([0.0, -1.0, 1.0], dtype=F64)),
        log_likelihood=lambda y, theta: y[:, None] * theta - theta.exp(),
        data=data,
        **{"rho": 1.0, "tol": 1e-9, **settings},
    )


@dataclass(frozen=True)
class Case:
    """A model, its data, and what the contract asks of it."""

    fit: Callable[..., Fitted]  # (data, settings) → fit
    data: Any
    exact: bool = False  # taking examples out is fitting without them
    steps: int = 30  # otherwise so many further steps come near to that
    bound: bool = True  # the history never falls
    adds_up: float | None = 1e-9  # λ = λ_prior + Σ λ̃_i, to this tolerance
    iterations: str | None = "max_iter"  # the setting that counts them; None: there is but one


def once(prior: Any, factor: Any, data: Any) -> Case:
    return Case(Conjugate(prior, factor).fit, data, exact=True, iterations=None)


def seeded(model: Any, **settings: Any) -> Callable[..., Fitted]:
    def fit(data: Any, **overrides: Any) -> Fitted:
        generator = torch.Generator().manual_seed(0)
        return model.fit(data, **{"generator": generator, "tol": 1e-11, **settings, **overrides})

    return fit


def started(model: Any) -> Callable[..., Fitted]:
    """Every example starts in its own class, whichever examples are there."""

    def fit(data: Tensor, **overrides: Any) -> Fitted:
        start = None
        if isinstance(data, Tensor):
            matches = (data[:, None] == CLUSTERS).all(2).double()
            start = HALVES[matches.argmax(1)]
        return model.fit(data, **{"start": start, "tol": 1e-12, **overrides})

    return fit


FACTORS = draws(30, 1) * torch.tensor([1.0, 0.8, -0.7, 0.5]) + 0.5 * draws(30, 4, seed=5)
KINDS = fam.Dirichlet(torch.ones(3, dtype=F64))
GAMMA = fam.Gamma(ONE, ONE)
HEDGE = fam.CategoricalFamily(torch.zeros(3, dtype=F64))
DIAGONAL = fam.DiagonalGaussian(torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64))
TOPICS = partial(inf.LDA(2, local_tol=1e-5).fit, passes=200, batch_size=None, tol=1e-6)
PROCESS = partial(inf.rbf, variance=4.0)

CASES = {
    "Bernoulli": once(fam.Beta(2 * ONE, ONE), bernoulli(), LABELS),
    "Poisson": once(GAMMA, inf.poisson(), COUNTS),
    "categorical": once(KINDS, inf.categorical(3), torch.arange(30) % 5 % 3),
    "Gaussian": once(WISHART, inf.gaussian(), CLUSTERS),
    "regression": once(normal(3), inf.linear(0.25), (X, REAL)),
    "exponential weights": once(HEDGE, inf.experts(4, 0.4), draws(30, 4)),
    "Kalman": Case(
        STATES.fit,
        REAL.unsqueeze(1),
        exact=True,
        bound=False,
        adds_up=None,
        iterations=None,
    ),
    "online Newton": Case(
        inf.OnlineNewton(normal(3), squared, 0.3).fit,
        (X, REAL),
        steps=2,
        bound=False,
        iterations=None,
    ),
    **{
        f"EM, {kind}": Case(started(inf.GaussianMixtureEM(2, kind, 1e-9)), CLUSTERS, adds_up=None)
        for kind in ("full", "diag", "spherical")
    },
    "factor analysis": Case(
        partial(inf.FactorAnalysis(1).fit, tol=1e-10), FACTORS, steps=100, adds_up=None
    ),
    "VMP": Case(started(inf.BayesianGaussianMixture(WEIGHTS, WISHART)), CLUSTERS, adds_up=1e-4),
    "hidden Markov": Case(seeded(inf.HiddenMarkov(2, inf.poisson(), GAMMA)), SERIES, adds_up=1e-4),
    "message passing": Case(
        seeded(COINS), torch.tensor([1.0, 2.0, 9.0, 8.0, 3.0]).double(), adds_up=1e-4
    ),
    "logistic": Case(inf.GeneralizedLinear(normal(3)).fit, (X, LABELS)),
    "probit": Case(inf.GeneralizedLinear(normal(3), "probit").fit, (X, LABELS)),
    "log-linear": Case(inf.GeneralizedLinear(normal(3), "poisson").fit, (X, COUNTS)),
    "mean field": Case(inf.MeanFieldRegression(DIAGONAL).fit, (X, COUNTS)),
    "process": Case(inf.GaussianProcess(PROCESS).fit, (X, LABELS)),
    "sparse process": Case(inf.GaussianProcess(PROCESS, inducing=X[::4]).fit, (X, LABELS)),
    "topics": Case(TOPICS, DOCUMENTS, adds_up=1e-2, iterations="passes"),
    "skew normal": Case(skewed, torch.tensor([0.0, 1.0, 3.0, 2.0], dtype=F64), adds_up=None),
}
GONE = [0, 2]


@cache
def fitted_of(name: str) -> Fitted:
    return CASES[name].fit(CASES[name].data)


@cache
def rest_of(name: str) -> Fitted:
    """The fit without the examples of GONE."""
    data = CASES[name].data
    if name == "Kalman":
        with_gaps = data.clone()
        with_gaps[GONE] = math.nan
        return CASES[name].fit(with_gaps)
    remaining = [i for i in range(count(data)) if i not in GONE]
    return CASES[name].fit(rows(data, torch.tensor(remaining)))


def numbers(q: Any) -> Tensor:
    """All numbers of a posterior, as one vector."""
    if isinstance(q, dict):
        return torch.cat([numbers(node) for node in q.values()])
    if hasattr(q, "natural") and not hasattr(q, "components"):
        return torch.cat([part.flatten() for part in q.natural.values()])
    fields = vars(q).values()
    return torch.cat([x.flatten() if isinstance(x, Tensor) else numbers(x) for x in fields])


def broken(data: Any, value: float) -> Any:
    """The data with this value as the first number of the (first) tensor."""
    if isinstance(data, tuple):
        return (broken(data[0], value), data[1])
    data = data.double().clone()
    data.view(-1)[0] = value
    return data


@pytest.mark.filterwarnings("error::blr_analysis.learning_rule.inference.NotConverged")
@pytest.mark.parametrize("name", CASES)
class TestFittedContract:
    """What holds for the fit of every model."""

    def test_it_says_what_it_is(self, name: str) -> None:
        fitted = fitted_of(name)
        n = count(CASES[name].data)
        assert fitted.converged
        assert fitted.n_data == n
        shown = repr(fitted)
        assert type(fitted).__name__ in shown
        assert f"N={n}" in shown
        assert "converged=True" in shown
        assert f"{fitted.objective} {fitted.history[-1]:.6g}" in shown
        assert fitted.note in shown
        with pytest.raises(AttributeError, match="has 'covarance'"):
            _ = fitted.covarance

    def test_it_rises_to_the_same_from_the_same_start(self, name: str) -> None:
        case = CASES[name]
        history = fitted_of(name).history
        assert torch.equal(numbers(fitted_of(name).q), numbers(case.fit(case.data).q))
        if case.bound:
            assert np.diff(history, prepend=history[0]).min() > -1e-9 * (1 + abs(history[-1]))

    def test_one_iteration_is_too_few(self, name: str, capfd: Any) -> None:
        """It warns, and a bar shows with progress=True."""
        case = CASES[name]
        if case.iterations is None:
            return
        with pytest.warns(NotConverged, match="raise max_iter"):
            hasty = case.fit(case.data, progress=False, **{case.iterations: 1})
        assert not hasty.converged
        assert len(hasty.history) == 1
        assert capfd.readouterr().err == ""
        with pytest.raises(InputError, match="max_iter must be a positive"):
            case.fit(case.data, **{case.iterations: 0})
        with pytest.raises(InputError, match="tol"):
            case.fit(case.data, tol="a")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.fit(case.data, progress=True, **{case.iterations: 2})
        assert capfd.readouterr().err

    def test_prior_and_sites_add_up(self, name: str) -> None:
        fitted = fitted_of(name)
        close = CASES[name].adds_up
        leaves = torch.utils._pytree.tree_leaves(fitted.sites)
        assert all(len(leaf) == fitted.n_data for leaf in leaves)
        if close is not None:
            empty = numbers(fitted.without(range(len(leaves[0]))))
            torch.testing.assert_close(empty, numbers(fitted.prior), rtol=close, atol=close * 30)

    def test_examples_leave_by_index_or_mask_and_once(self, name: str) -> None:
        fitted = fitted_of(name)
        assert fitted.without([]) is fitted.q or name == "Kalman"
        mask = np.isin(np.arange(fitted.n_data), GONE)
        expected = numbers(fitted.without(GONE))
        for chosen in (mask, torch.tensor(GONE), [*GONE, *GONE]):
            torch.testing.assert_close(numbers(fitted.without(chosen)), expected, rtol=0, atol=0)
        for wrong in ([fitted.n_data], [-1], np.ones(fitted.n_data + 1, dtype=bool)):
            with pytest.raises(InputError, match=r"example|entries"):
                fitted.without(wrong)

    def test_an_example_left_out_is_foretold_without_it(self, name: str) -> None:
        fitted = fitted_of(name)
        data = fitted.data
        left_out = fitted.left_out()
        before = fitted.log_predictive(fitted.data)
        assert left_out.shape == before.shape == (fitted.n_data,)
        assert bool(left_out.isfinite().all())
        assert float((before - left_out).sum()) > 0
        for i in (0, fitted.n_data - 1):
            q = fitted.without([i])
            index = torch.tensor([i])
            if name == "Kalman":  # predicts an observation within its series
                expected = fitted.predictive(q, data)[index]
            else:
                expected = fitted.predictive(q, rows(data, index))
            torch.testing.assert_close(left_out[index], expected, rtol=1e-8, atol=1e-8)

    def test_taking_out_leads_to_fitting_again(self, name: str) -> None:
        """One step is the fit without them where it is exact; elsewhere the first step is nearer
        to it, and the last is there."""
        fitted = fitted_of(name)
        again = rest_of(name)
        case = CASES[name]
        path = [*fitted.refitted(GONE, steps=1 if case.exact else case.steps)]
        torch.testing.assert_close(numbers(path[0]), numbers(fitted.without(GONE)))
        data = fitted.data
        expected = again.log_predictive(data)

        def gap(q: Any) -> float:
            return float((fitted.predictive(q, data) - expected).norm())

        first_gap = gap(path[0])
        last_gap = gap(path[-1])
        if case.exact:
            torch.testing.assert_close(numbers(path[0]), numbers(again.q), rtol=1e-9, atol=1e-9)
            assert last_gap <= 1e-8
        else:
            assert first_gap < gap(fitted.q) or name == "online Newton"
            assert last_gap < 0.1 * gap(fitted.q)

    def test_examples_that_come_are_as_those_that_were_there(self, name: str) -> None:
        """Examples that were taken out and added again lead back to the fit."""
        if name == "Kalman":  # new observations come behind the others
            return
        fitted = fitted_of(name)
        without = rest_of(name)
        case = CASES[name]
        examples = rows(case.data, torch.tensor(GONE))
        *_, restored = without.refitted(add=examples, steps=case.steps)
        # Online Newton sees the examples last now; a process knows f at its former inputs alone.
        if name not in ("online Newton", "process"):
            expected = fitted.log_predictive(fitted.data)
            actual = without.predictive(restored, fitted.data)
            torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
        with pytest.raises(BLRError):
            list(fitted.refitted(add=broken(examples, math.inf)))

    def test_numbers_that_are_none_and_no_examples_are_refused(self, name: str) -> None:
        data = CASES[name].data
        wrong = [broken(data, math.inf), rows(data, torch.arange(0)), None]
        if name != "Kalman":  # NaN is a missing observation there
            wrong.append(broken(data, math.nan))
        for bad in wrong:
            with pytest.raises(BLRError):
                CASES[name].fit(bad)


# Fitted itself


COIN_PRIOR = fam.Beta(ONE, ONE)


def coin() -> Fitted[fam.Beta]:
    return Conjugate(COIN_PRIOR, bernoulli()).fit(torch.tensor([1.0, 0.0, 1.0, 1.0]))


def test_a_fit_answers_as_its_posterior_does() -> None:
    fitted = coin()
    factors = fitted_of("VMP")
    assert float(fitted.a) == 4.0
    assert float(fitted.entropy()) == float(fitted.q.entropy())
    assert factors["weights"] is factors.q["weights"]


def test_many_examples_are_added_up_in_parts() -> None:
    n = 2 * CHUNK + 1
    fitted = Conjugate(COIN_PRIOR, bernoulli()).fit(torch.arange(n) % 2)
    ones = n // 2
    torch.testing.assert_close(fitted.without(range(n)).natural, COIN_PRIOR.natural)
    heads = fitted.left_out()[1::2].unique()
    tails = fitted.left_out()[::2].unique()
    assert float(heads) == pytest.approx(math.log(ones / (n + 1)))
    assert float(tails) == pytest.approx(math.log((n - ones) / (n + 1)))


def test_a_mean_field_moves_only_the_factors_with_sites() -> None:
    node = fam.DiagonalGaussian(torch.zeros(3), torch.ones(3))
    q = {"left": node, "right": fam.DiagonalGaussian(torch.ones(3), 2 * torch.ones(3))}
    sites = {"right": {"linear": torch.eye(3), "square": -0.25 * torch.eye(3)}}
    less = Fitted(q, [0.0], "ELBO", data=torch.zeros(3), messages=sites).without([2])
    assert less["left"] is node
    torch.testing.assert_close(less["right"].precision, torch.tensor([2.0, 2.0, 1.5]))
    torch.testing.assert_close(less["right"].mean, torch.tensor([1.0, 1.0, 1 / 1.5]))


def test_iterations_stop_when_the_objective_rests() -> None:
    values = [0.0, 1.0, 1.15, 1.2, 9.0]
    run = until_flat(values.__getitem__, "bound", max_iter=5, tol=0.1)
    assert run["history"] == [0.0, 1.0, 1.15, 1.2]
    assert run["converged"]
    run = until_flat(values.__getitem__, "bound", 10, max_iter=5, tol=0.1)
    assert run["history"] == [0.0, 1.0]
    with pytest.warns(NotConverged, match="the bound still changed by more than 0.1"):
        run = until_flat(float, "bound", max_iter=3, tol=0.1)
    assert run["history"] == [0.0, 1.0, 2.0]
    assert not run["converged"]
    run = until_flat(lambda t: 0.0, "bound", max_iter=3, tol=0.1, noisy=True)
    assert run == {"history": [0.0] * 3, "objective": "bound", "converged": False}


def test_the_table_says_what_each_example_did() -> None:
    """Beta(1, 1) and three heads of four: 4/6 for a head, 3/5 without it; 2/6 for the tail, 1/5."""
    table = coin().table
    assert table["index"].tolist() == [0, 1, 2, 3]
    heads = np.log([2 / 3, 3 / 5, 10 / 9])
    tails = np.log([1 / 3, 1 / 5, 5 / 3])
    actual = table[["log_predictive", "left_out", "gain"]].to_numpy()
    np.testing.assert_allclose(actual, [heads, tails, heads, heads])


@pytest.mark.parametrize("converged", [True, False])
def test_the_picture_shows_the_history(converged: bool) -> None:
    ax = Fitted(coin().q, [-3.0, -2.0, -1.5], "ELBO", converged=converged).plot()
    assert ax.lines[0].get_ydata().tolist() == [-3.0, -2.0, -1.5]
    assert ax.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert ax.get_ylabel() == "ELBO [nats]"
    assert (ax.get_legend() is None) == converged


@pytest.mark.parametrize("name", ["skew normal", "topics"])
def test_results_show_what_to_know_of_them(name: str) -> None:
    fitted = fitted_of(name)
    loo = blr.leave_one_out(None, fitted)
    scores = blr.sensitivity(None, fitted)
    assert all("one step" in repr(result) for result in (fitted, loo, scores))
    assert "one step" in fitted.table.attrs["note"]
    torch.testing.assert_close(-loo.losses, fitted.left_out())
    torch.testing.assert_close(scores.deviation, loo.losses - loo.losses_before)

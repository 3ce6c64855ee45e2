"""Leave-one-out and sensitivity of posteriors that are sums of sites."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
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
    BayesianGaussianMixture,
    Conjugate,
    Fitted,
    GaussianMixtureEM,
    GaussianProcess,
    GeneralizedLinear,
    MeanFieldRegression,
    StateSpace,
    bernoulli,
    categorical,
    gaussian,
    linear,
    poisson,
    rbf,
)

F64 = torch.float64


def regression() -> tuple[Conjugate, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(25, 3, dtype=F64, generator=generator)
    y = x.sum(1) + 0.5 * torch.randn(25, dtype=F64, generator=generator)
    prior = FullGaussian(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))
    return Conjugate(prior, linear(0.25)), x, y


def test_it_agrees_with_the_networks_road() -> None:
    """Linear regression as a torch model: the cavity's outputs give the same squared errors."""
    model, x, y = regression()
    fitted = model.fit((x, y))
    net = torch.nn.Linear(3, 1, bias=False).double()
    net.weight.data = fitted.q.mean[None].clone()
    task = blr.Task(net, (x, y), likelihood=blr.Gaussian(0.25))
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    cavity = blr.leave_one_out(task, q)
    left = torch.stack([x[i] @ fitted.without([i]).mean for i in range(len(y))])
    torch.testing.assert_close(cavity.logits.flatten(), left, rtol=1e-9, atol=1e-9)


def test_sensitivity_is_what_an_example_tells_about_itself() -> None:
    model, x, y = regression()
    y[7] += 20.0  # an outlier shapes the fit most
    fitted = model.fit((x, y))
    scores = blr.sensitivity(None, fitted)
    loo = blr.leave_one_out(None, fitted)
    torch.testing.assert_close(scores.deviation, loo.losses - loo.losses_before)
    assert int(scores.deviation.argmax()) == 7
    assert list(scores.table.columns) == ["index", "loss", "deviation"]
    assert list(loo.table.columns) == ["index", "loss", "loss_before"]
    assert len(loo.table) == 25


def test_a_gaussian_process_classifier() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 2, dtype=F64, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(30, dtype=F64, generator=generator) > 0).to(F64)
    model = GaussianProcess(partial(rbf, lengthscale=1.5, variance=4.0))
    loo = blr.leave_one_out(None, model.fit((x, y)))
    for i in (0, 11, 29):
        rest = torch.arange(30) != i
        probability = float(model.fit((x[rest], y[rest])).predict(x[i : i + 1]))
        exact = -torch.tensor(probability if y[i] else 1 - probability).log()
        assert float(loo.losses[i]) == pytest.approx(float(exact), abs=0.02)


def chain() -> tuple[Any, Any]:
    """Four times, the second without an observation."""
    y = torch.tensor([[1.0], [torch.nan], [4.0], [3.0]], dtype=F64)
    one = torch.eye(1, dtype=F64)
    states = StateSpace(one, one, one, one, FullGaussian(torch.zeros(1, dtype=F64), one))
    fitted = states.fit(y)
    return blr.sensitivity(None, fitted), blr.leave_one_out(None, fitted)


def test_times_without_an_observation_have_no_loss() -> None:
    _, loo = chain()
    assert loo.losses.isnan().tolist() == [False, True, False, False]
    assert loo.nll == pytest.approx(float(loo.losses[[0, 2, 3]].mean()))


def test_what_makes_no_sense_is_refused() -> None:
    model, x, y = regression()
    fitted = model.fit((x, y))
    with pytest.raises(InputError, match="refine"):
        blr.leave_one_out(None, fitted, refine=3)
    with pytest.raises(InputError, match="correction"):
        blr.leave_one_out(None, fitted, correction="cavity")
    with pytest.raises(InputError, match="variance"):
        blr.sensitivity(None, fitted, variance=True)
    with pytest.raises(InputError, match="no sites"):
        blr.leave_one_out(None, Fitted(fitted.q, [0.0], "log evidence"))


def test_the_strongest_examples_by_index() -> None:
    model, x, y = regression()
    y[7] += 20.0
    scores = blr.sensitivity(None, model.fit((x, y)))
    ranked = scores.table.sort_values("deviation", ascending=False)["index"]
    assert scores.top(3).tolist() == ranked[:3].tolist() and int(scores.top(1)) == 7
    for k in (0, 26, "3"):
        with pytest.raises(InputError, match="k must be"):
            scores.top(k)


def test_unobserved_times_are_neither_ranked_nor_drawn() -> None:
    scores, loo = chain()
    assert sorted(scores.top(3).tolist()) == [0, 2, 3]
    assert "nan" not in repr(scores)
    with pytest.raises(InputError, match="at most 3"):
        scores.top(4)
    assert len(scores.plot().lines[0].get_xdata()) == 3
    assert len(loo.plot().lines[0].get_xdata()) == 3


def test_pictures() -> None:
    model, x, y = regression()
    y[7] += 20.0
    fitted = model.fit((x, y))
    scores, loo = blr.sensitivity(None, fitted), blr.leave_one_out(None, fitted)
    ax = scores.plot(labels=[f"row {i}" for i in range(25)], n_labels=2)
    drawn = sorted(scores.deviation.tolist(), reverse=True)
    assert ax.lines[0].get_ydata().tolist() == pytest.approx(drawn)
    assert "shapes more" in ax.get_ylabel()
    rises = (loo.losses - loo.losses_before).sort(descending=True).values
    ax = loo.plot(n_labels=1)
    assert ax.lines[0].get_ydata().tolist() == pytest.approx(rises.tolist())
    assert "loss without it" in ax.get_ylabel() and loo.plot(ax=ax) is ax
    with pytest.raises(InputError, match="labels"):
        loo.plot(labels=["one"])


def test_a_memory_map_is_refused_with_what_to_use_instead() -> None:
    model, x, y = regression()
    scores = blr.sensitivity(None, model.fit((x, y)))
    with pytest.raises(InputError, match="SiteScores"):
        blr.memory_map(scores)


@pytest.mark.parametrize("ask", [blr.sensitivity, blr.leave_one_out], ids=lambda f: f.__name__)
def test_the_fit_stands_alone(ask: Any) -> None:
    model, x, y = regression()
    fitted = model.fit((x, y))
    for found in (ask(fitted), ask(fitted, None)):
        assert torch.equal(found.losses, ask(None, fitted).losses)
    task = blr.Task(torch.nn.Linear(3, 1).double(), (x, y), likelihood="gaussian")
    with pytest.raises(InputError, match="stands alone"):
        ask(fitted, task)
    with pytest.raises(DataError, match="pair"):
        blr.influence(fitted, fitted, task)
    for alone, match in ((blr.influence, "predict"), (blr.what_if, "remove")):
        with pytest.raises(InputError, match=match):
            alone(fitted)
    for alone in (blr.suspicious, blr.calibrate):
        with pytest.raises(InputError, match="without"):
            alone(fitted, None)
    with pytest.raises(InputError, match="posterior"):
        ask(task)


# Every probabilistic model with sites goes through ``leave_one_out`` and ``sensitivity``.


ONE = torch.tensor(1.0, dtype=F64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=seeded(seed))


def rows(data: Any, chosen: Any) -> Any:
    return data[chosen] if isinstance(data, Tensor) else tuple(part[chosen] for part in data)


def prior(kind: Any) -> Any:
    precision = torch.eye(3, dtype=F64) if kind is FullGaussian else torch.ones(3, dtype=F64)
    return kind(torch.zeros(3, dtype=F64), precision)


CONJUGATE: dict[str, tuple[Conjugate, Any]] = {
    "regression": (Conjugate(prior(FullGaussian), linear(0.25)), (normal(12, 3), normal(12))),
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
    """Against fitting again without each example."""
    model, data = CONJUGATE[name]
    loo = blr.leave_one_out(model.fit(data))
    for i in range(12):
        again = model.fit(rows(data, torch.arange(12) != i))
        exact = -again.log_predictive(rows(data, slice(i, i + 1)))
        torch.testing.assert_close(loo.losses[i : i + 1], exact, rtol=1e-10, atol=1e-10)


def two_clusters() -> Tensor:
    return normal(40, 2) + 4 * (torch.arange(40) % 2)[:, None]


def labels() -> tuple[Tensor, Tensor]:
    x = normal(60, 3)
    return x, (x[:, 0] + normal(60, seed=1) > 0).to(F64)


def counts() -> tuple[Tensor, Tensor]:
    x = normal(60, 3)
    return x, (0.5 * x[:, 0] + 0.3 * normal(60, seed=1)).exp().round()


def by_em(data: Any) -> Fitted:
    """From the same two centres, so that components keep their names."""
    return GaussianMixtureEM(2).fit(data, generator=seeded(), tol=1e-10, max_iter=500)


def by_vmp(data: Any) -> Fitted:
    model = BayesianGaussianMixture.for_data(two_clusters(), 2)
    return model.fit(data, generator=seeded())


OTHERS: dict[str, tuple[Callable[[Any], Fitted], Any]] = {
    "EM": (by_em, two_clusters()),
    "VMP": (by_vmp, two_clusters()),
    "logistic regression": (
        lambda data: GeneralizedLinear(prior(FullGaussian), "bernoulli").fit(data),
        labels(),
    ),
    "mean field": (
        lambda data: MeanFieldRegression(prior(DiagonalGaussian), "poisson").fit(data),
        counts(),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_first_step_ranks_as_fitting_again_does(name: str) -> None:
    """Of the rises of the loss: their order, and their sum."""
    fit, data = OTHERS[name]
    fitted = fit(data)
    loo, scores = blr.leave_one_out(fitted), blr.sensitivity(fitted)
    torch.testing.assert_close(scores.deviation, loo.losses - loo.losses_before)
    n = len(loo)
    chosen = scores.top(n)[:: n // 12]
    exact = []
    for i in chosen.tolist():
        again = fit(rows(data, torch.arange(n) != i))
        exact.append(-again.log_predictive(rows(data, slice(i, i + 1))) - loo.losses_before[i])
    pair = torch.stack([scores.deviation[chosen], torch.cat(exact)])
    assert float(torch.corrcoef(pair)[0, 1]) > 0.99
    assert 0.9 < float(pair[0].sum() / pair[1].sum()) < 1.05


def test_a_fit_answers_as_its_posterior_does() -> None:
    model, data = CONJUGATE["Bernoulli"]
    fitted = model.fit(data)
    assert torch.equal(fitted.mean, fitted.q.mean)
    assert fitted.natural.keys() == fitted.q.natural.keys()
    assert fitted.history and float(fitted.entropy()) == float(fitted.q.entropy())
    with pytest.raises(AttributeError, match="neither Fitted nor its q, a Beta, has 'covarance'"):
        _ = fitted.covarance
    with pytest.raises(blr.errors.InputError, match="q has none"):
        _ = fitted["z"]
    factors = by_vmp(two_clusters())
    name = next(iter(factors.q))
    assert factors[name] is factors.q[name]
    with pytest.raises(blr.errors.InputError, match="its factors are"):
        _ = factors["other"]

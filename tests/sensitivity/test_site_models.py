"""Every probabilistic model with sites goes through ``leave_one_out`` and ``sensitivity``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import blr_analysis as blr
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
    GeneralizedLinear,
    MeanFieldRegression,
    bernoulli,
    categorical,
    gaussian,
    linear,
    poisson,
)

F64 = torch.float64
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

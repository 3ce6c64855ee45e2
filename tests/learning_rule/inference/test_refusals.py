"""What the models refuse: the call, the error, and a word that names what is wrong."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families import (
    Beta,
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
    GaussianMixtureEM,
    GaussianProcess,
    GeneralizedLinear,
    HiddenMarkov,
    MeanFieldRegression,
    MessagePassing,
    MultimodalOptimisation,
    OnlineNewton,
    SkewNormal,
    StateSpace,
    VariationalNewton,
    bernoulli,
    categorical,
    experts,
    fit_skew_normal,
    gaussian,
    likelihood_step,
    linear,
    minima,
    poisson,
    rbf,
)

F64 = torch.float64
ONE = torch.ones((), dtype=F64)
M = torch.ones(1, 1, dtype=F64)


def normal(size: int, *copies: int) -> FullGaussian:
    eye = torch.eye(size, dtype=F64).expand(*copies, size, size)
    return FullGaussian(torch.zeros(*copies, size, dtype=F64), eye)


X = torch.randn(20, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).double()
WISHART = NormalWishart(torch.zeros(2, dtype=F64), ONE, 4 * ONE, torch.eye(2, dtype=F64))
WEIGHTS = Dirichlet(torch.ones(2, dtype=F64))
BETA, GAMMA, CLASSES = Beta(ONE, ONE), Gamma(ONE, ONE), Dirichlet(torch.ones(3, dtype=F64))
ALIKE = torch.full((20, 2), 0.5)
VMP = BayesianGaussianMixture(WEIGHTS, WISHART)
EM = GaussianMixtureEM(2)
GLM = GeneralizedLinear(normal(2))
MARKOV = HiddenMarkov(2, poisson(), GAMMA)
SERIES = torch.ones(3, 4)
COUNTS = np.arange(60.0).reshape(10, 6) % 7 + 1
LEANING = SkewNormal(0 * ONE, ONE, ONE)
BOTH = torch.tensor([[0.0], [1.0]], dtype=F64)


def states(**change: Any) -> StateSpace:
    parts = dict.fromkeys(("transition", "transition_noise", "observation", "observation_noise"), M)
    return StateSpace(**{**parts, "prior": normal(1), **change})


def process(kernel: Any) -> Any:
    return GaussianProcess(kernel).fit((X, Y))


def glm(likelihood: Any, **settings: Any) -> Any:
    return GeneralizedLinear(normal(2), likelihood).fit((X, Y), **settings)


def topics(counts: Any = COUNTS, **settings: Any) -> Any:
    return LDA(2).fit(counts, **{"passes": 1, "progress": False, **settings})


def changed(place: Any, value: float) -> np.ndarray:
    counts = COUNTS.copy()
    counts[place] = value
    return counts


def skewed(**settings: Any) -> Any:
    return fit_skew_normal(lambda t: -0.5 * t**2, **{"start": LEANING, **settings})


def told(y: Tensor, theta: Tensor) -> Tensor:
    return -0.5 * (y[:, None] - theta) ** 2


def quartic(t: Tensor) -> Tensor:
    return (t[0] ** 2 - 4) ** 2 / 8


def newton(loss: Any, look: str = "quadrature", start: Any = None) -> Any:
    return VariationalNewton(look=look).fit(loss, start or normal(1), progress=False)


many = MultimodalOptimisation().fit
REFUSED: list[tuple[Any, type[Exception], str]] = [
    # conjugate models and their factors
    (lambda: Conjugate(BETA, bernoulli), InputError, r"must be one such as bernoulli\(\)"),
    (lambda: Conjugate(BETA, poisson()), InputError, "one Gamma without copies, got Beta"),
    (lambda: Conjugate(Beta(*torch.ones(2, 3)), bernoulli()), InputError, "without copies"),
    (lambda: Conjugate(BETA, bernoulli()).fit([0, 1]), DataError, "real tensor, got list"),
    (lambda: Conjugate(BETA, bernoulli()).fit(Y + 0.5), DataError, "y must be 0 or 1; example 0"),
    (lambda: Conjugate(GAMMA, poisson()).fit(-Y), DataError, "whole number from 0 up"),
    (lambda: Conjugate(CLASSES, categorical(3)).fit(3 * Y), DataError, "integer from 0 to 2"),
    (lambda: Conjugate(CLASSES, categorical(4)).fit(Y), InputError, "has 3 classes, not 4"),
    (lambda: categorical(1), InputError, "n_classes must be a whole number"),
    (lambda: Conjugate(WISHART, gaussian()).fit(X[:, :1]), DataError, r"y must be \[N, 2\]"),
    (lambda: Conjugate(normal(2), linear(1.0)).fit(X), DataError, "regression are a pair"),
    (lambda: Conjugate(normal(1), linear(1.0)).fit((X, Y)), DataError, "x has 2 columns"),
    (lambda: linear(math.nan), InputError, "noise_variance must be positive"),
    (lambda: experts(1, 0.3), InputError, "n_experts"),
    (lambda: OnlineNewton(BETA, quartic, 1.0), InputError, "prior must be a FullGaussian"),
    (
        lambda: OnlineNewton(normal(2), lambda t, y: t - y, 1.0).fit(Y),
        InputError,
        r"loss must be a function.*here \[\]; it gave \[2\]",
    ),
    (lambda: likelihood_step(GAMMA, Y + 1, 0.2, along="theta"), InputError, "along must be one"),
    # chains of states
    (
        lambda: states(transition=torch.eye(2)),
        InputError,
        r"transition must be a real matrix \[1, 1\]",
    ),
    (lambda: states(transition_noise=math.nan * M), InputError, "transition_noise must be finite"),
    (lambda: states(transition_noise=-M), InputError, "transition_noise is no covariance"),
    (lambda: states(observation_noise=0 * M), InputError, "observation_noise is no covariance"),
    (lambda: states(observation=torch.ones(1)), InputError, "observation must be a real matrix"),
    (lambda: states(prior=M), InputError, "prior must be a FullGaussian, got Tensor"),
    (lambda: states(prior=normal(1, 2)), InputError, "not copies"),
    (
        lambda: StateSpace(*[torch.eye(2)] * 3, torch.tensor([[1, 0.5], [0, 1]]), normal(2)),
        InputError,
        "observation_noise is no covariance",
    ),
    (lambda: states().fit(torch.zeros(3)), DataError, r"got \[3\]"),
    (lambda: states().fit(torch.tensor([[0.0], [math.inf]])), DataError, "finite or NaN"),
    (lambda: states().fit(1e200 * BOTH), DataError, "log-likelihood is -inf from time 1"),
    (
        lambda: states(transition=0 * M, transition_noise=0 * M).fit(BOTH),
        InputError,
        "predicted covariance is singular",
    ),
    (lambda: states().fit(BOTH).log_predictive(BOTH[:1]), DataError, "2 states need as many"),
    # hidden classes
    (lambda: GaussianMixtureEM(1), InputError, "n_components must be"),
    (lambda: GaussianMixtureEM(2, "tied"), InputError, "covariance must be one of"),
    (lambda: GaussianMixtureEM(2, floor=0.0), InputError, "floor must be positive"),
    (lambda: EM.fit(X[:, 0]), DataError, r"non-empty tensor \[N, D\], got \(20,\)"),
    (lambda: EM.fit(X[:1]), DataError, "2 components need as many examples, got 1"),
    (lambda: EM.fit(X, start=torch.ones(20, 3) / 3), InputError, r"responsibilities \[20, 2\]"),
    (lambda: EM.fit(X, start=2 * ALIKE), InputError, "0 or more and sum to 1"),
    (lambda: EM.fit(X, start=ALIKE), InputError, "two components of start are the same"),
    (
        lambda: EM.fit(X, start=torch.tensor([1.0, 0.0]).expand(20, 2)),
        DataError,
        "a component has no examples left",
    ),
    (lambda: EM.fit(X, batch=21), InputError, "batch is 21 of 20 examples"),
    (lambda: EM.fit(X, rho=1.5), InputError, "rho must be above 0"),
    (lambda: EM.fit(X).responsibilities(X[:, :1]), DataError, r"data must be \[N, 2\], as fitted"),
    (lambda: FactorAnalysis(2, noise="full"), InputError, "noise must be one of"),
    (lambda: FactorAnalysis(2).fit(X), DataError, "2 factors need more columns"),
    (
        lambda: FactorAnalysis(2).fit(torch.cat([X, X[:, :1]], 1), progress=False),
        DataError,
        "explain a column wholly",
    ),
    (lambda: VMP.fit(X[:, :1]), DataError, r"y must be \[N, 2\]"),
    (
        lambda: BayesianGaussianMixture(Dirichlet(torch.ones(2, 3)), WISHART),
        InputError,
        "without copies",
    ),
    (lambda: BayesianGaussianMixture(WEIGHTS, WEIGHTS), InputError, "must be a Normal–Wishart"),
    (lambda: BayesianGaussianMixture.for_data(X, 1), InputError, "n_components must be"),
    (lambda: BayesianGaussianMixture.for_data(X[:, :1].expand(20, 2), 2), DataError, "singular"),
    (lambda: MARKOV.fit(torch.ones(3)), DataError, r"series, a tensor \[S, T\]"),
    (lambda: MARKOV.fit(-SERIES), DataError, "whole number"),
    (lambda: HiddenMarkov(2, poisson(), BETA), InputError, "prior must be Gamma, got Beta"),
    (lambda: MessagePassing({}, lambda mu, y: y), InputError, "exponential families by name"),
    (lambda: MessagePassing({"a": GAMMA}, lambda mu, y: y).fit(Y), InputError, "differentiable"),
    (lambda: MessagePassing({"a": GAMMA}, lambda mu, y: 1.0).fit(Y), InputError, "gave float"),
    # topics
    (lambda: LDA(1), InputError, "n_topics"),
    (lambda: LDA(2, topic_word_prior=-1.0), InputError, "topic_word_prior must"),
    (lambda: LDA(2, learning_decay=1.5), InputError, "learning_decay"),
    (lambda: topics(changed((3, 5), -1)), DataError, "document 3 is no whole number.*-1"),
    (lambda: topics(changed((2, 1), 0.5)), DataError, "document 2 is no whole number.*0.5"),
    (lambda: topics(changed(6, 0)), DataError, "document 6 .* has no words"),
    (lambda: topics([[1, 2], [3]]), DataError, "counts must be a real matrix"),
    (lambda: topics(np.ones((3, 1))), DataError, "two words or more"),
    (lambda: topics().transform(COUNTS[:, :5]), DataError, "5 words.* 6"),
    (lambda: topics(start=LDA(2).prior(5)), InputError, r"start must be \[K, V\].*\[2, 5\]"),
    (lambda: topics(batch_size=0), InputError, "batch_size"),
    (lambda: topics(seed=-1), InputError, "seed must .* at least 0, got -1"),
    (lambda: topics().topics(["one", "two"]), InputError, "vocabulary must be 6 words"),
    # likelihoods that are not conjugate
    (lambda: GeneralizedLinear(normal(2), "softmax"), InputError, "must be one of 'bernoulli'"),
    (lambda: GeneralizedLinear(BETA), InputError, "must be a FullGaussian over θ"),
    (lambda: MeanFieldRegression(normal(2)), InputError, "must be a DiagonalGaussian over θ"),
    (lambda: GLM.fit(X), DataError, "regression are a pair"),
    (lambda: GLM.fit((X[:, :1], Y)), DataError, "x has 1 columns; the model takes 2"),
    (lambda: GLM.fit((X, Y[1:])), DataError, "same length, got 20 and 19"),
    (lambda: GLM.fit((X, Y + 1)), DataError, "must lie in 0"),
    (lambda: glm("bernoulli", rho=1.5), InputError, "rho must be above 0"),
    (lambda: glm(lambda y, f: f.sum()), InputError, r"here \[2, 20\]; it gave \[\]"),
    (lambda: glm(lambda y, f: y - f.detach()), InputError, "differentiable in f"),
    (lambda: glm(lambda y, f: (y - f) ** 2), InputError, "turn the sign of a loss"),
    (lambda: glm(lambda y, f: f * torch.nan), InputError, "no step along the natural"),
    (lambda: glm(lambda y, f: -((y - f) ** 2)).predict(X), InputError, "has no mean"),
    (lambda: GaussianProcess("rbf"), InputError, "kernel must be a function"),
    (lambda: GaussianProcess(inducing=3), InputError, "inducing must be a matrix"),
    (lambda: process(lambda x, z: -rbf(x, z)), InputError, "positive semi-definite"),
    (lambda: process(lambda x, z: rbf(x, z) + x[:, :1]), InputError, "not symmetric"),
    (lambda: process(lambda x, z: 0 * rbf(x, z)), InputError, "positive semi-definite"),
    (lambda: process(lambda x, z: x), InputError, r"here \[20, 20\]"),
    (lambda: process(lambda x, z: rbf(x, z) * math.nan), InputError, "NaN or infinite"),
    (lambda: process(rbf).predict(X[:, :1]), DataError, "x has 1 columns"),
    (lambda: process(partial(rbf, variance=-1.0)), InputError, "positive semi-definite"),
    (lambda: process(partial(rbf, lengthscale=0.0)), InputError, "NaN or infinite"),
    # skew normals
    (lambda: SkewNormal(0 * ONE, ONE, -ONE), InputError, "no skew normal of positive precision"),
    (lambda: skewed(rho=0.0), InputError, "rho must be above 0"),
    (lambda: skewed(start=SkewNormal(0 * ONE, 0 * ONE, ONE)), InputError, "lean ≠ 0"),
    (lambda: skewed(data=Y), InputError, "go together"),
    (lambda: skewed(log_likelihood=told), InputError, "go together"),
    (lambda: skewed(log_likelihood=told, data=(Y, Y[1:])), DataError, "must be N examples"),
    (
        lambda: skewed(log_likelihood=lambda y, t: told(y, t).sum(0), data=Y),
        InputError,
        r"here \[20, 2001\].* gave \[2001\]",
    ),
    # functions
    (lambda: VariationalNewton(rho=2.0), InputError, "rho"),
    (lambda: VariationalNewton(look="everywhere"), InputError, "look must be one of"),
    (lambda: VariationalNewton(samples=500).fit(quartic, normal(1)), InputError, "370 nodes"),
    (lambda: newton(quartic, start=M), InputError, "start must be a FullGaussian"),
    (lambda: newton(quartic, start=normal(1, 2)), InputError, r"got copies \[2\]"),
    (lambda: newton(quartic, start=normal(2)), InputError, "one variable"),
    (lambda: newton(lambda t: t.outer(t)), InputError, r"here \[\]; it gave \[1, 1\]"),
    (lambda: newton(lambda t: t[0].log()), InputError, "not finite"),
    (lambda: MultimodalOptimisation(temperature=(1.0, 0.0)), InputError, "temperature"),
    (lambda: MultimodalOptimisation(look="quadrature"), InputError, "look"),
    (lambda: many(quartic, torch.zeros(2, 1)), InputError, "start at the same place"),
    (lambda: many(quartic, BOTH, precision=None), InputError, "precision must be positive"),
    (lambda: many(lambda t: torch.log(t[0] - 100), BOTH), InputError, "not finite"),
    (lambda: minima(quartic, BOTH.long()), InputError, "floating-point numbers"),
    (lambda: minima(quartic, BOTH, max_iter=0), InputError, "max_iter"),
]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    REFUSED,
    ids=[f"{i}: {row[2][:30]}" for i, row in enumerate(REFUSED)],
)
def test_refusals(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()

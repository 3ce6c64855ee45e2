"""What the models refuse: the call, the error, and a word that names what is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from inference_problems import F64, ONE, WEIGHTS, WISHART, M, draws, normal
from torch import Tensor

from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule import inference as inf
from blr_analysis.learning_rule.families import Beta, Dirichlet, Gamma
from blr_analysis.learning_rule.inference import bernoulli, gaussian, linear, poisson, rbf
from blr_analysis.learning_rule.inference.fitted import until_flat

X = draws(20, 2)
Y = (X[:, 0] > 0).double()
BETA = Beta(ONE, ONE)
GAMMA = Gamma(ONE, ONE)
CLASSES = Dirichlet(torch.ones(3, dtype=F64))
EYE = torch.eye(2)
ALIKE = torch.full((20, 2), 0.5)
FAR = torch.cat([X, 1e3 + X[:1]])
ALONE = EYE.double()[[0] * 20 + [1]]
VMP = inf.BayesianGaussianMixture(WEIGHTS, WISHART)
EM = inf.GaussianMixtureEM(2)
GLM = inf.GeneralizedLinear(normal(2))
MARKOV = inf.HiddenMarkov(2, poisson(), GAMMA)
SERIES = torch.ones(3, 4)
COUNTS = np.arange(60.0).reshape(10, 6) % 7 + 1
LEANING = inf.SkewNormal(0 * ONE, ONE, ONE)
BOTH = torch.tensor([[0.0], [1.0]], dtype=F64)


def states(**change: Any) -> inf.StateSpace:
    parts = dict.fromkeys(("transition", "transition_noise", "observation", "observation_noise"), M)
    return inf.StateSpace(**{**parts, "prior": normal(1), **change})


def process(kernel: Any) -> Any:
    return inf.GaussianProcess(kernel).fit((X, Y))


def glm(likelihood: Any, **settings: Any) -> Any:
    return inf.GeneralizedLinear(normal(2), likelihood).fit((X, Y), **settings)


def topics(counts: Any = COUNTS, **settings: Any) -> Any:
    return inf.LDA(2).fit(counts, **{"passes": 1, "progress": False, **settings})


def changed(place: Any, value: float) -> np.ndarray:
    counts = COUNTS.copy()
    counts[place] = value
    return counts


def skewed(**settings: Any) -> Any:
    return inf.fit_skew_normal(lambda t: -0.5 * t**2, **{"start": LEANING, **settings})


def log_likelihood(y: Tensor, theta: Tensor) -> Tensor:
    return -0.5 * (y[:, None] - theta) ** 2


def quartic(t: Tensor) -> Tensor:
    return (t[0] ** 2 - 4) ** 2 / 8


def newton(loss: Any, look: str = "quadrature", start: Any = None) -> Any:
    return inf.VariationalNewton(look=look).fit(loss, start or normal(1), progress=False)


def bare(history: Any = (0.0,), data: Any = None) -> Any:
    return inf.Fitted(LEANING, history, "ELBO", data=data)


multimodal = inf.MultimodalOptimisation().fit
DATA: list[tuple[Any, str]] = [
    (lambda: inf.Conjugate(BETA, bernoulli()).fit([0, 1]), "real tensor, got list"),
    (lambda: inf.Conjugate(BETA, bernoulli()).fit(Y + 0.5), "y must be 0 or 1; example 0"),
    (lambda: inf.Conjugate(GAMMA, poisson()).fit(-Y), "whole number from 0 up"),
    (lambda: inf.Conjugate(CLASSES, inf.categorical(3)).fit(3 * Y), "integer from 0 to 2"),
    (lambda: inf.Conjugate(WISHART, gaussian()).fit(X[:, :1]), r"y must be \[N, 2\]"),
    (lambda: inf.Conjugate(normal(2), linear(1.0)).fit(X), "regression are a pair"),
    (lambda: inf.Conjugate(normal(1), linear(1.0)).fit((X, Y)), "x has 2 columns"),
    (lambda: states().fit(torch.zeros(3)), r"got \[3\]"),
    (lambda: states().fit(torch.tensor([[0.0], [math.inf]])), "finite or NaN"),
    (lambda: states().fit(1e200 * BOTH), "log-likelihood is -inf from time 1"),
    (lambda: states().fit(BOTH).log_predictive(BOTH[:1]), "2 states need as many"),
    (lambda: EM.fit(X[:, 0]), r"non-empty tensor \[N, D\], got \(20,\)"),
    (lambda: EM.fit(X[:1]), "2 components need as many examples, got 1"),
    (lambda: EM.fit(X, start=2 * ALIKE * BOTH.mT), "a component has no examples left"),
    (lambda: EM.fit(X).responsibilities(X[:, :1]), r"data must be \[N, 2\], as fitted"),
    (lambda: EM.fit(FAR, start=ALONE).without([20]), "rests on these examples alone"),
    (lambda: inf.FactorAnalysis(2).fit(X), "2 factors need more columns"),
    (lambda: inf.FactorAnalysis(2).fit(X[:, [0, 1, 0]], progress=False), "explain a column wholly"),
    (lambda: VMP.fit(X[:, :1]), r"y must be \[N, 2\]"),
    (lambda: inf.BayesianGaussianMixture.for_data(X[:, :1].expand(20, 2), 2), "singular"),
    (lambda: MARKOV.fit(torch.ones(3)), r"series, a tensor \[S, T\]"),
    (lambda: MARKOV.fit(-SERIES), "whole number"),
    (lambda: topics(changed((3, 5), -1)), "document 3 is no whole number.*-1"),
    (lambda: topics(changed((2, 1), 0.5)), "document 2 is no whole number.*0.5"),
    (lambda: topics(changed(6, 0)), "document 6 .* has no words"),
    (lambda: topics([[1, 2], [3]]), "counts must be a real matrix"),
    (lambda: topics(np.ones((3, 1))), "two words or more"),
    (lambda: topics().transform(COUNTS[:, :5]), "5 words.* 6"),
    (lambda: GLM.fit(X), "regression are a pair"),
    (lambda: GLM.fit((X[:, :1], Y)), "x has 1 columns; the model takes 2"),
    (lambda: GLM.fit((X, Y[1:])), "same length, got 20 and 19"),
    (lambda: GLM.fit((X, Y + 1)), "must lie in 0"),
    (lambda: process(rbf).predict(X[:, :1]), "x has 1 columns"),
    (lambda: skewed(log_likelihood=log_likelihood, data=(Y, Y[1:])), "must be N examples"),
]
SETTINGS: list[tuple[Any, str]] = [
    (lambda: inf.Conjugate(BETA, bernoulli), r"must be one such as bernoulli\(\)"),
    (lambda: inf.Conjugate(BETA, poisson()), "one Gamma without copies, got Beta"),
    (lambda: inf.Conjugate(Beta(*torch.ones(2, 3)), bernoulli()), "without copies"),
    (lambda: inf.Conjugate(CLASSES, inf.categorical(4)).fit(Y), "has 3 classes, not 4"),
    (lambda: inf.categorical(1), "n_classes must be a whole number"),
    (lambda: linear(math.nan), "noise_variance must be positive"),
    (lambda: inf.experts(1, 0.3), "n_experts"),
    (lambda: inf.OnlineNewton(BETA, quartic, 1.0), "prior must be a FullGaussian"),
    (lambda: inf.OnlineNewton(normal(2), torch.sub, 1.0).fit(Y), r"loss must .*it gave \[2\]"),
    (lambda: inf.likelihood_step(GAMMA, Y + 1, 0.2, along="theta"), "along must be one"),
    (lambda: states(transition=torch.eye(2)), r"transition must be a real matrix \[1, 1\]"),
    (lambda: states(transition_noise=math.nan * M), "transition_noise must be finite"),
    (lambda: states(transition_noise=-M), "transition_noise is no covariance"),
    (lambda: states(observation_noise=0 * M), "observation_noise is no covariance"),
    (lambda: states(observation=torch.ones(1)), "observation must be a real matrix"),
    (lambda: states(prior=M), "prior must be a FullGaussian, got Tensor"),
    (lambda: states(prior=normal(1, copies=(2,))), "not copies"),
    (lambda: inf.StateSpace(*[EYE] * 3, EYE + EYE[0], normal(2)), "observation_noise is no cov"),
    (lambda: states(transition=0 * M, transition_noise=0 * M).fit(BOTH), "is singular"),
    (lambda: inf.GaussianMixtureEM(1), "n_components must be"),
    (lambda: inf.GaussianMixtureEM(2, "tied"), "covariance must be one of"),
    (lambda: inf.GaussianMixtureEM(2, floor=0.0), "floor must be positive"),
    (lambda: EM.fit(X, start=torch.ones(20, 3) / 3), r"responsibilities \[20, 2\]"),
    (lambda: EM.fit(X, start=2 * ALIKE), "0 or more and sum to 1"),
    (lambda: EM.fit(X, start=ALIKE), "two components of start are the same"),
    (lambda: EM.fit(X, batch=21), "batch is 21 of 20 examples"),
    (lambda: EM.fit(X, rho=1.5), "rho must be above 0"),
    (lambda: inf.FactorAnalysis(2, noise="full"), "noise must be one of"),
    (lambda: inf.BayesianGaussianMixture(Dirichlet(torch.ones(2, 3)), WISHART), "without copies"),
    (lambda: inf.BayesianGaussianMixture(WEIGHTS, WEIGHTS), "must be a Normal–Wishart"),
    (lambda: inf.BayesianGaussianMixture.for_data(X, 1), "n_components must be"),
    (lambda: inf.HiddenMarkov(2, poisson(), BETA), "prior must be Gamma, got Beta"),
    (lambda: inf.MessagePassing({}, lambda mu, y: y), "exponential families by name"),
    (lambda: inf.MessagePassing({"a": GAMMA}, lambda mu, y: y).fit(Y), "differentiable"),
    (lambda: inf.MessagePassing({"a": GAMMA}, lambda mu, y: 1.0).fit(Y), "gave float"),
    (lambda: inf.LDA(1), "n_topics"),
    (lambda: inf.LDA(2, topic_word_prior=-1.0), "topic_word_prior must"),
    (lambda: inf.LDA(2, learning_decay=1.5), "learning_decay"),
    (lambda: topics(start=inf.LDA(2).prior(5)), r"start must be \[K, V\].*\[2, 5\]"),
    (lambda: topics(batch_size=0), "batch_size"),
    (lambda: topics(seed=-1), "seed must .* at least 0, got -1"),
    (lambda: topics().topics(["one", "two"]), "vocabulary must be 6 words"),
    (lambda: inf.GeneralizedLinear(normal(2), "softmax"), "must be one of 'bernoulli'"),
    (lambda: inf.GeneralizedLinear(BETA), "must be a FullGaussian over θ"),
    (lambda: inf.MeanFieldRegression(normal(2)), "must be a DiagonalGaussian over θ"),
    (lambda: glm("bernoulli", rho=1.5), "rho must be above 0"),
    (lambda: glm(lambda y, f: f.sum()), r"here \[2, 20\]; it gave \[\]"),
    (lambda: glm(lambda y, f: y - f.detach()), "differentiable in f"),
    (lambda: glm(lambda y, f: (y - f) ** 2), "turn the sign of a loss"),
    (lambda: glm(lambda y, f: f * torch.nan), "no step along the natural"),
    (lambda: glm(lambda y, f: -((y - f) ** 2)).predict(X), "has no mean"),
    (lambda: inf.GaussianProcess("rbf"), "kernel must be a function"),
    (lambda: inf.GaussianProcess(inducing=3), "inducing must be a matrix"),
    (lambda: process(lambda x, z: -rbf(x, z)), "positive semi-definite"),
    (lambda: process(lambda x, z: rbf(x, z) + x[:, :1]), "not symmetric"),
    (lambda: process(lambda x, z: 0 * rbf(x, z)), "positive semi-definite"),
    (lambda: process(lambda x, z: x), r"here \[20, 20\]"),
    (lambda: process(lambda x, z: rbf(x, z) * math.nan), "NaN or infinite"),
    (lambda: inf.SkewNormal(0 * ONE, ONE, -ONE), "no skew normal of positive precision"),
    (lambda: skewed(rho=0.0), "rho must be above 0"),
    (lambda: skewed(start=inf.SkewNormal(0 * ONE, 0 * ONE, ONE)), "lean ≠ 0"),
    (lambda: skewed(data=Y), "go together"),
    (lambda: skewed(log_likelihood=log_likelihood), "go together"),
    (lambda: skewed(log_likelihood=lambda y, t: t, data=Y), r"\[20, 2001\].* gave \[2001\]"),
    (lambda: inf.VariationalNewton(rho=2.0), "rho"),
    (lambda: inf.VariationalNewton(look="everywhere"), "look must be one of"),
    (lambda: inf.VariationalNewton(samples=500).fit(quartic, normal(1)), "370 nodes"),
    (lambda: newton(quartic, start=M), "start must be a FullGaussian"),
    (lambda: newton(quartic, start=normal(1, copies=(2,))), r"got copies \[2\]"),
    (lambda: newton(quartic, start=normal(2)), "one variable"),
    (lambda: newton(lambda t: t.outer(t)), r"here \[\]; it gave \[1, 1\]"),
    (lambda: newton(lambda t: t[0].log()), "not finite"),
    (lambda: inf.MultimodalOptimisation(temperature=(1.0, 0.0)), "temperature"),
    (lambda: inf.MultimodalOptimisation(look="quadrature"), "look"),
    (lambda: multimodal(quartic, torch.zeros(2, 1)), "start at the same place"),
    (lambda: multimodal(quartic, BOTH, precision=None), "precision must be positive"),
    (lambda: multimodal(lambda t: torch.log(t[0] - 100), BOTH), "not finite"),
    (lambda: inf.minima(quartic, BOTH.long()), "floating-point numbers"),
    (lambda: inf.minima(quartic, BOTH, max_iter=0), "max_iter"),
    (lambda: bare().sites, "no sites"),
    (lambda: bare().left_out(), "no sites"),
    (lambda: bare().table, "no sites"),
    (lambda: skewed(tol=1e-3).left_out(), "no sites"),
    (lambda: bare().without([0]), "example 0"),
    (lambda: bare().log_predictive(Y), "no closed form"),
    (lambda: list(bare(data=Y).refitted()), "no step"),
    (lambda: bare(history=()).plot(), "history is empty"),
    (lambda: bare()["z"], "q has none"),
    (lambda: VMP.fit(X, max_iter=500, tol=1e-3)["other"], "its factors are"),
    (lambda: until_flat([0.0, math.nan, 1.0].__getitem__, "bound"), "bound became nan at iter.* 2"),
]
REFUSED = [(*row, DataError) for row in DATA] + [(*row, InputError) for row in SETTINGS]


@pytest.mark.parametrize(("call", "word", "error"), REFUSED)
def test_refusals(call: Any, word: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=word):
        call()

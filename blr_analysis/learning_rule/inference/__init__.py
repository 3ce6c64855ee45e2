"""The rows of the rule that fit probabilistic models: ``Model(prior…).fit(data) -> Fitted``."""

from __future__ import annotations

from blr_analysis.learning_rule.inference.conjugate import Conjugate
from blr_analysis.learning_rule.inference.em import Collapsed, FittedMixture, GaussianMixtureEM
from blr_analysis.learning_rule.inference.factors import (
    Factor,
    bernoulli,
    categorical,
    gaussian,
    linear,
    poisson,
)
from blr_analysis.learning_rule.inference.fitted import Fitted, NotConverged
from blr_analysis.learning_rule.inference.functions import VariationalNewton
from blr_analysis.learning_rule.inference.generalized_linear import GeneralizedLinear
from blr_analysis.learning_rule.inference.gp import GaussianProcess, linear_kernel, rbf
from blr_analysis.learning_rule.inference.kalman import FittedStates, StateSpace
from blr_analysis.learning_rule.inference.latent_fit import LatentFitted
from blr_analysis.learning_rule.inference.lda import LDA, FittedTopics, TopicWords
from blr_analysis.learning_rule.inference.multimodal import MultimodalOptimisation, minima
from blr_analysis.learning_rule.inference.nonconjugate import MeanFieldRegression
from blr_analysis.learning_rule.inference.skew_normal import (
    FittedSkewNormal,
    SkewNormal,
    fit_skew_normal,
)
from blr_analysis.learning_rule.inference.vmp import BayesianGaussianMixture, FittedMeanField

__all__ = [
    "LDA",
    "BayesianGaussianMixture",
    "Collapsed",
    "Conjugate",
    "Factor",
    "Fitted",
    "FittedMeanField",
    "FittedMixture",
    "FittedSkewNormal",
    "FittedStates",
    "FittedTopics",
    "GaussianMixtureEM",
    "GaussianProcess",
    "GeneralizedLinear",
    "LatentFitted",
    "MeanFieldRegression",
    "MultimodalOptimisation",
    "NotConverged",
    "SkewNormal",
    "StateSpace",
    "TopicWords",
    "VariationalNewton",
    "bernoulli",
    "categorical",
    "fit_skew_normal",
    "gaussian",
    "linear",
    "linear_kernel",
    "minima",
    "poisson",
    "rbf",
]

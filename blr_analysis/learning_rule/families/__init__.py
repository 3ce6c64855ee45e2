"""The exponential families to which the posteriors of the rule belong."""

from __future__ import annotations

from blr_analysis.learning_rule.families.base import (
    ExponentialFamily,
    Natural,
    add,
    scale,
    subtract,
)
from blr_analysis.learning_rule.families.bernoulli import BernoulliFamily
from blr_analysis.learning_rule.families.categorical import CategoricalFamily
from blr_analysis.learning_rule.families.dirichlet import Beta, Dirichlet
from blr_analysis.learning_rule.families.fixed import FixedFullGaussian, FixedGaussian
from blr_analysis.learning_rule.families.gamma import (
    Gamma,
    NormalWishart,
    Wishart,
)
from blr_analysis.learning_rule.families.gaussian import (
    DiagonalGaussian,
    FullGaussian,
)
from blr_analysis.learning_rule.families.mixture import GaussianMixture

__all__ = [
    "BernoulliFamily",
    "Beta",
    "CategoricalFamily",
    "DiagonalGaussian",
    "Dirichlet",
    "ExponentialFamily",
    "FixedFullGaussian",
    "FixedGaussian",
    "FullGaussian",
    "Gamma",
    "GaussianMixture",
    "Natural",
    "NormalWishart",
    "Wishart",
    "add",
    "scale",
    "subtract",
]

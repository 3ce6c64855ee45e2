"""The families of posteriors that the rule moves in."""

from __future__ import annotations

from blr_analysis.learning_rule.families.base import (
    ExponentialFamily,
    Natural,
    add,
    scale,
    subtract,
)
from blr_analysis.learning_rule.families.dirichlet import Beta, Dirichlet
from blr_analysis.learning_rule.families.discrete import Bernoulli, Categorical
from blr_analysis.learning_rule.families.gamma import Gamma, InverseGamma
from blr_analysis.learning_rule.families.gaussian import (
    DiagonalGaussian,
    FixedGaussian,
    FullGaussian,
)
from blr_analysis.learning_rule.families.mixture import GaussianMixture
from blr_analysis.learning_rule.families.normal_gamma import NormalGamma
from blr_analysis.learning_rule.families.product import Product
from blr_analysis.learning_rule.families.wishart import NormalWishart, Wishart

__all__ = [
    "Bernoulli",
    "Beta",
    "Categorical",
    "DiagonalGaussian",
    "Dirichlet",
    "ExponentialFamily",
    "FixedGaussian",
    "FullGaussian",
    "Gamma",
    "GaussianMixture",
    "InverseGamma",
    "Natural",
    "NormalGamma",
    "NormalWishart",
    "Product",
    "Wishart",
    "add",
    "scale",
    "subtract",
]

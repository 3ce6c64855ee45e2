"""The families of posteriors that the rule moves in."""

from __future__ import annotations

from blr_analysis.learning_rule.families.base import (
    ExponentialFamily,
    Natural,
    add,
    scale,
    subtract,
)
from blr_analysis.learning_rule.families.dirichlet import (
    BernoulliFamily,
    Beta,
    CategoricalFamily,
    Dirichlet,
)
from blr_analysis.learning_rule.families.gamma import (
    Gamma,
    InverseGamma,
    NormalGamma,
    NormalWishart,
    Wishart,
)
from blr_analysis.learning_rule.families.gaussian import (
    DiagonalGaussian,
    FixedGaussian,
    FullGaussian,
)
from blr_analysis.learning_rule.families.mixture import GaussianMixture
from blr_analysis.learning_rule.families.product import Product

__all__ = [
    "BernoulliFamily",
    "Beta",
    "CategoricalFamily",
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

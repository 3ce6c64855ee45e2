"""The families of posteriors that the rule moves in."""

from __future__ import annotations

from blr_analysis.learning_rule.families.base import (
    ExponentialFamily,
    Natural,
    add,
    scale,
    subtract,
)
from blr_analysis.learning_rule.families.gaussian import (
    DiagonalGaussian,
    FixedGaussian,
    FullGaussian,
)

__all__ = [
    "DiagonalGaussian",
    "ExponentialFamily",
    "FixedGaussian",
    "FullGaussian",
    "Natural",
    "add",
    "scale",
    "subtract",
]

"""Shapes that a precision matrix S can take; the contract that all keep is in ``contract``."""

from blr_analysis.posterior.structures.contract import (
    Prior,
    Spectral,
    Structure,
    Tree,
    is_spectral,
    prior_of,
    total,
)
from blr_analysis.posterior.structures.diagonal import Diagonal
from blr_analysis.posterior.structures.full import Full
from blr_analysis.posterior.structures.kronecker import Block, Kronecker
from blr_analysis.posterior.structures.lowrank import LowRank

__all__ = [
    "Block",
    "Diagonal",
    "Full",
    "Kronecker",
    "LowRank",
    "Prior",
    "Spectral",
    "Structure",
    "Tree",
    "is_spectral",
    "prior_of",
    "total",
]

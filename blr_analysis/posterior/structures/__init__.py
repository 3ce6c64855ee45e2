"""Shapes that a precision matrix S can take; the contract that all keep is in ``contract``."""

from blr_analysis.posterior.structures.contract import KINDS, Fit, Spectral, Structure, Tree
from blr_analysis.posterior.structures.diagonal import Diagonal
from blr_analysis.posterior.structures.full import Full
from blr_analysis.posterior.structures.kronecker import Gram, Kronecker
from blr_analysis.posterior.structures.lowrank import LowRank

__all__ = [
    "KINDS",
    "Diagonal",
    "Fit",
    "Full",
    "Gram",
    "Kronecker",
    "LowRank",
    "Spectral",
    "Structure",
    "Tree",
]

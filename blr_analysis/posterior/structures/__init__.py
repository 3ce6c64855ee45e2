"""Shapes that a precision matrix S can take; the contract that all keep is in ``contract``."""

from blr_analysis.posterior.structures.contract import KINDS as KINDS
from blr_analysis.posterior.structures.contract import Spectral as Spectral
from blr_analysis.posterior.structures.contract import Structure as Structure
from blr_analysis.posterior.structures.contract import Tree as Tree
from blr_analysis.posterior.structures.diagonal import Diagonal as Diagonal
from blr_analysis.posterior.structures.full import Full as Full
from blr_analysis.posterior.structures.kronecker import Gram as Gram
from blr_analysis.posterior.structures.kronecker import Kronecker as Kronecker
from blr_analysis.posterior.structures.lowrank import LowRank as LowRank

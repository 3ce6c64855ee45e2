"""Influence of training examples on test examples."""

from blr_analysis.sensitivity.influence.index import Index
from blr_analysis.sensitivity.influence.influence import influence
from blr_analysis.sensitivity.influence.results import (
    GroupInfluence,
    Influence,
    Matches,
    ProjectionError,
    TopInfluence,
)

__all__ = [
    "GroupInfluence",
    "Index",
    "Influence",
    "Matches",
    "ProjectionError",
    "TopInfluence",
    "influence",
]

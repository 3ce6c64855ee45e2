"""The memory-perturbation equation: what a model would be without some of its data."""

from blr_analysis.sensitivity.acquire import acquire
from blr_analysis.sensitivity.adapt import adapt
from blr_analysis.sensitivity.calibrate import calibrate
from blr_analysis.sensitivity.index.index import Index
from blr_analysis.sensitivity.influence.influence import influence
from blr_analysis.sensitivity.influence.results import (
    GroupInfluence,
    Influence,
    ProjectionError,
    TopInfluence,
)
from blr_analysis.sensitivity.leave_one_out import leave_one_out
from blr_analysis.sensitivity.monitor import Monitor
from blr_analysis.sensitivity.prior_selection import PriorSelection, select_prior_precision
from blr_analysis.sensitivity.results import LeaveOneOut, Scores, Suspicions, WhatIf
from blr_analysis.sensitivity.scores import sensitivity
from blr_analysis.sensitivity.suspicious import suspicious
from blr_analysis.sensitivity.token_scores import TokenScores, token_sensitivity
from blr_analysis.sensitivity.training import rerun
from blr_analysis.sensitivity.validate import validate
from blr_analysis.sensitivity.validation import Validation
from blr_analysis.sensitivity.what_if import what_if, what_if_each

__all__ = [
    "GroupInfluence",
    "Index",
    "Influence",
    "LeaveOneOut",
    "Monitor",
    "PriorSelection",
    "ProjectionError",
    "Scores",
    "Suspicions",
    "TokenScores",
    "TopInfluence",
    "Validation",
    "WhatIf",
    "acquire",
    "adapt",
    "calibrate",
    "influence",
    "leave_one_out",
    "rerun",
    "select_prior_precision",
    "sensitivity",
    "suspicious",
    "token_sensitivity",
    "validate",
    "what_if",
    "what_if_each",
]

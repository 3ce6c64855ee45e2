"""The memory-perturbation equation: what a model would be without some of its data."""

from blr_analysis.sensitivity.calibration import calibrate
from blr_analysis.sensitivity.ensemble import replays
from blr_analysis.sensitivity.groups import Adapted, WhatIf, adapt, what_if, what_if_each
from blr_analysis.sensitivity.influence import (
    GroupInfluence,
    Index,
    Influence,
    ProjectionError,
    TopInfluence,
    influence,
    top_influence,
)
from blr_analysis.sensitivity.leave_one_out import LeaveOneOut, leave_one_out
from blr_analysis.sensitivity.monitor import Monitor
from blr_analysis.sensitivity.prior_selection import PriorSelection, select_prior_precision
from blr_analysis.sensitivity.scores import Scores, sensitivity
from blr_analysis.sensitivity.sequences import SequenceLeaveOneOut, SequenceScores
from blr_analysis.sensitivity.sites import SiteLeaveOneOut, SiteScores
from blr_analysis.sensitivity.subsets import subset_posterior
from blr_analysis.sensitivity.suspicious import Suspicions, suspicious
from blr_analysis.sensitivity.tokens import TokenScores, token_sensitivity

__all__ = [
    "Adapted",
    "GroupInfluence",
    "Index",
    "Influence",
    "LeaveOneOut",
    "Monitor",
    "PriorSelection",
    "ProjectionError",
    "Scores",
    "SequenceLeaveOneOut",
    "SequenceScores",
    "SiteLeaveOneOut",
    "SiteScores",
    "Suspicions",
    "TokenScores",
    "TopInfluence",
    "WhatIf",
    "adapt",
    "calibrate",
    "influence",
    "leave_one_out",
    "replays",
    "select_prior_precision",
    "sensitivity",
    "subset_posterior",
    "suspicious",
    "token_sensitivity",
    "top_influence",
    "what_if",
    "what_if_each",
]

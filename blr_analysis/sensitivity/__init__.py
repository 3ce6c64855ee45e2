"""The memory-perturbation equation: what a model would be without some of its data."""

from blr_analysis.sensitivity.calibrate import calibrate
from blr_analysis.sensitivity.influence import (
    GroupInfluence,
    Index,
    Influence,
    ProjectionError,
    TopInfluence,
    influence,
)
from blr_analysis.sensitivity.leave_one_out import LeaveOneOut, leave_one_out
from blr_analysis.sensitivity.monitor import Monitor
from blr_analysis.sensitivity.prior_selection import PriorSelection, select_prior_precision
from blr_analysis.sensitivity.scores import Scores, sensitivity
from blr_analysis.sensitivity.sequences import SequenceLeaveOneOut, SequenceScores
from blr_analysis.sensitivity.sites import SiteLeaveOneOut, SiteScores
from blr_analysis.sensitivity.suspicious import Suspicions, suspicious
from blr_analysis.sensitivity.tokens import TokenScores, token_sensitivity
from blr_analysis.sensitivity.training import rerun
from blr_analysis.sensitivity.what_if import WhatIf, what_if, what_if_each

__all__ = [
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
    "calibrate",
    "influence",
    "leave_one_out",
    "rerun",
    "select_prior_precision",
    "sensitivity",
    "suspicious",
    "token_sensitivity",
    "what_if",
    "what_if_each",
]

"""The memory-perturbation equation: what a model would be without some of its data."""

from blr_analysis.sensitivity.leave_one_out import LeaveOneOut, leave_one_out
from blr_analysis.sensitivity.scores import Scores, sensitivity
from blr_analysis.sensitivity.what_if import WhatIf, what_if, what_if_each

__all__ = [
    "LeaveOneOut",
    "Scores",
    "WhatIf",
    "leave_one_out",
    "sensitivity",
    "what_if",
    "what_if_each",
]

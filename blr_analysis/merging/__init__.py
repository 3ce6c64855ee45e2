"""Uncertainty-weighted merging of fine-tuned models."""

from __future__ import annotations

from blr_analysis.merging.curve import MergeCurve, MergePoint, merge_curve
from blr_analysis.merging.folders import MergeReport, execute
from blr_analysis.merging.forecast import MergeForecast, TaskForecast, forecast
from blr_analysis.merging.job import Job, Member
from blr_analysis.merging.merge import merge
from blr_analysis.merging.mismatch import GradientMismatch, gradient_mismatch
from blr_analysis.merging.plan import make_plan

__all__ = [
    "GradientMismatch",
    "Job",
    "Member",
    "MergeCurve",
    "MergeForecast",
    "MergePoint",
    "MergeReport",
    "TaskForecast",
    "execute",
    "forecast",
    "gradient_mismatch",
    "make_plan",
    "merge",
    "merge_curve",
]

"""Results as pandas DataFrames, and DataFrames as files.

One function per kind of result, each over plain attributes; they are registered with
:func:`blr_analysis.views.make_table`, so that ``scores.table`` and its like find them.

    >>> each_table([dict(group=3, n=10, nll_before=0.2, nll_after=0.5)]).nll_change.tolist()
    [0.3]
"""

from __future__ import annotations

from blr_analysis.learning_rule.inference.fitted import Fitted
from blr_analysis.learning_rule.inference.topics import TopicWords
from blr_analysis.learning_rule.table import Table1
from blr_analysis.memory_map import MemoryMap
from blr_analysis.merging.curve import MergeCurve
from blr_analysis.merging.merge import MergeReport
from blr_analysis.merging.mismatch import GradientMismatch
from blr_analysis.merging.plan import Plan
from blr_analysis.sensitivity.influence_results import (
    GroupInfluence,
    Influence,
    TopInfluence,
)
from blr_analysis.sensitivity.leave_one_out import LeaveOneOut
from blr_analysis.sensitivity.monitor import Histories, Monitor
from blr_analysis.sensitivity.prior_selection import PriorSelection
from blr_analysis.sensitivity.scores import Scores
from blr_analysis.sensitivity.sequences import SequenceLeaveOneOut, SequenceScores
from blr_analysis.sensitivity.sites import SiteLeaveOneOut, SiteScores
from blr_analysis.sensitivity.suspicious import Suspicions
from blr_analysis.sensitivity.tokens import TokenScores
from blr_analysis.sensitivity.what_if import ByClass, WhatIf
from blr_analysis.tables.calibration import calibration_table
from blr_analysis.tables.examples import leave_one_out_table, memory_map_table, scores_table
from blr_analysis.tables.files import read_table, write_table
from blr_analysis.tables.fitted import fitted_table
from blr_analysis.tables.groups import class_table, each_table, what_if_table
from blr_analysis.tables.influence import (
    group_influence_table,
    influence_table,
    top_influence_table,
)
from blr_analysis.tables.merge_fates import plan_table, report_table
from blr_analysis.tables.merging import merge_curve_table, mismatch_table
from blr_analysis.tables.monitor import histories_table, monitor_table, prior_selection_table
from blr_analysis.tables.rule import rule_table
from blr_analysis.tables.sequences import (
    sequence_leave_one_out_table,
    sequence_scores_table,
    token_scores_table,
)
from blr_analysis.tables.sites import site_leave_one_out_table, site_scores_table
from blr_analysis.tables.suspicious import suspicious_table
from blr_analysis.tables.topics import topics_table
from blr_analysis.views import GroupRows, make_table

__all__ = [
    "calibration_table",
    "class_table",
    "each_table",
    "fitted_table",
    "group_influence_table",
    "histories_table",
    "influence_table",
    "leave_one_out_table",
    "memory_map_table",
    "merge_curve_table",
    "mismatch_table",
    "monitor_table",
    "plan_table",
    "prior_selection_table",
    "read_table",
    "report_table",
    "rule_table",
    "scores_table",
    "sequence_leave_one_out_table",
    "sequence_scores_table",
    "site_leave_one_out_table",
    "site_scores_table",
    "suspicious_table",
    "token_scores_table",
    "top_influence_table",
    "topics_table",
    "what_if_table",
    "write_table",
]

make_table.register(Scores, scores_table)
make_table.register(SequenceScores, sequence_scores_table)
make_table.register(SequenceLeaveOneOut, sequence_leave_one_out_table)
make_table.register(SiteLeaveOneOut, site_leave_one_out_table)
make_table.register(SiteScores, site_scores_table)
make_table.register(Suspicions, suspicious_table)
make_table.register(TokenScores, token_scores_table)
make_table.register(LeaveOneOut, leave_one_out_table)
make_table.register(WhatIf, what_if_table)
make_table.register(ByClass, what_if_table)
make_table.register(Influence, influence_table)
make_table.register(TopInfluence, top_influence_table)
make_table.register(GroupInfluence, group_influence_table)
make_table.register(MemoryMap, memory_map_table)
make_table.register(Monitor, monitor_table)
make_table.register(Histories, histories_table)
make_table.register(PriorSelection, prior_selection_table)
make_table.register(GradientMismatch, mismatch_table)
make_table.register(MergeCurve, merge_curve_table)
make_table.register(Plan, plan_table)
make_table.register(MergeReport, report_table)
make_table.register(Table1, rule_table)
make_table.register(Fitted, fitted_table)
make_table.register(TopicWords, topics_table)
make_table.register(GroupRows, lambda groups: each_table(groups.rows))

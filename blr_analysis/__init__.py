"""Post-hoc analysis of models trained with the Bayesian learning rule.

Which data made this model, and what would it be without them?

    task = Task(model, data, likelihood="categorical")
    posterior = fit_laplace(task)
    scores = sensitivity(task, posterior)
    memory_map(scores).plot()
"""

from importlib.metadata import PackageNotFoundError, version

from blr_analysis import errors, likelihoods
from blr_analysis.errors import BLRError
from blr_analysis.learning_rule.optim import BSAM, IVON, OGN, STE, VOGN, BayesBiNN, Vadam, Vprop
from blr_analysis.learning_rule.table import table1
from blr_analysis.likelihoods import (
    Bernoulli,
    Categorical,
    CausalLM,
    Gaussian,
    Likelihood,
    Poisson,
    TokenCategorical,
)
from blr_analysis.memory_map import MemoryMap, memory_map
from blr_analysis.merging import (
    GradientMismatch,
    MergeCurve,
    MergeReport,
    SuggestedWeights,
    gradient_mismatch,
    merge,
    merge_curve,
    suggest_weights,
)
from blr_analysis.posterior import KroneckerRecorder, Posterior, fit_laplace
from blr_analysis.report import report
from blr_analysis.sensitivity import (
    GroupInfluence,
    Index,
    Influence,
    LeaveOneOut,
    Monitor,
    PriorSelection,
    ProjectionError,
    Scores,
    SequenceLeaveOneOut,
    SequenceScores,
    SiteLeaveOneOut,
    SiteScores,
    Suspicions,
    TokenScores,
    TopInfluence,
    WhatIf,
    calibrate,
    influence,
    leave_one_out,
    replays,
    select_prior_precision,
    sensitivity,
    subset_posterior,
    suspicious,
    token_sensitivity,
    top_influence,
    what_if,
    what_if_each,
)
from blr_analysis.task import Task

try:
    __version__ = version("blr-analysis")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0.0.0"

__all__ = [
    "BSAM",
    "IVON",
    "OGN",
    "STE",
    "VOGN",
    "BLRError",
    "BayesBiNN",
    "Bernoulli",
    "Categorical",
    "CausalLM",
    "Gaussian",
    "GradientMismatch",
    "GroupInfluence",
    "Index",
    "Influence",
    "KroneckerRecorder",
    "LeaveOneOut",
    "Likelihood",
    "MemoryMap",
    "MergeCurve",
    "MergeReport",
    "Monitor",
    "Poisson",
    "Posterior",
    "PriorSelection",
    "ProjectionError",
    "Scores",
    "SequenceLeaveOneOut",
    "SequenceScores",
    "SiteLeaveOneOut",
    "SiteScores",
    "SuggestedWeights",
    "Suspicions",
    "Task",
    "TokenCategorical",
    "TokenScores",
    "TopInfluence",
    "Vadam",
    "Vprop",
    "WhatIf",
    "calibrate",
    "errors",
    "fit_laplace",
    "gradient_mismatch",
    "influence",
    "leave_one_out",
    "likelihoods",
    "memory_map",
    "merge",
    "merge_curve",
    "replays",
    "report",
    "select_prior_precision",
    "sensitivity",
    "subset_posterior",
    "suggest_weights",
    "suspicious",
    "table1",
    "token_sensitivity",
    "top_influence",
    "what_if",
    "what_if_each",
]

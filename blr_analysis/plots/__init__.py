"""Pictures of results: each function draws on Axes and returns them.

Every function takes ``ax=``. Without it, a figure of its own is made that pyplot does not know
(nothing to close, nothing pops up): ``ax.figure.savefig("map.png")`` saves it. No function
changes rcParams. Colours are those of Okabe and Ito, and markers or hatches differ with them,
so that colour-blind readers and grey prints miss nothing; axis labels say which way is worse.

``memory.plot()``, ``scores.plot()`` and ``result.plot()`` find their pictures here by their class.
"""

from __future__ import annotations

from blr_analysis.plots.examples import image_of, plot_deviations, plot_examples, plot_suspicious
from blr_analysis.plots.influence import plot_influence
from blr_analysis.plots.memory import extremes, plot_memory_map
from blr_analysis.plots.merging import plot_merge_curve, plot_mismatch
from blr_analysis.plots.reliability import plot_reliability
from blr_analysis.plots.training import (
    plot_history,
    plot_leave_one_out,
    plot_monitor,
    plot_prior_selection,
)
from blr_analysis.plots.validation import plot_validation
from blr_analysis.plots.what_if import plot_what_if

PICTURES = {  # by the class of the result
    "MemoryMap": plot_memory_map,
    "Monitor": plot_monitor,
    "PriorSelection": plot_prior_selection,
    "Scores": plot_deviations,
    "LeaveOneOut": plot_deviations,
    "Suspicions": plot_suspicious,
    "Influence": plot_influence,
    "TopInfluence": plot_influence,
    "WhatIf": plot_what_if,
    "Predictions": plot_reliability,
    "GradientMismatch": plot_mismatch,
    "MergeCurve": plot_merge_curve,
    "Fitted": plot_history,
    "Validation": plot_validation,
}

__all__ = ["extremes", "image_of", "plot_examples", "plot_leave_one_out"]
__all__ += sorted({picture.__name__ for picture in PICTURES.values()})

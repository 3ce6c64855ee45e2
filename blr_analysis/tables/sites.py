"""One row per example of a posterior that is a sum of sites."""

from __future__ import annotations

import numpy as np
import pandas as pd

from blr_analysis.sensitivity.sites import SiteLeaveOneOut, SiteScores
from blr_analysis.tables._columns import array_of

__all__ = ["site_leave_one_out_table", "site_scores_table"]


def site_leave_one_out_table(loo: SiteLeaveOneOut) -> pd.DataFrame:
    """Columns: index, loss (without the example) and loss_before, in nats."""
    return pd.DataFrame(
        {
            "index": np.arange(len(loo)),
            "loss": array_of(loo.losses),
            "loss_before": array_of(loo.losses_before),
        }
    )


def site_scores_table(scores: SiteScores) -> pd.DataFrame:
    """Columns: index, loss and deviation (what the loss rises by without the example), in nats."""
    return pd.DataFrame(
        {
            "index": np.arange(len(scores)),
            "loss": array_of(scores.losses),
            "deviation": array_of(scores.deviation),
        }
    )

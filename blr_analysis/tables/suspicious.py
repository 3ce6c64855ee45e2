"""One row per example, the most suspicious first."""

from __future__ import annotations

import numpy as np
import pandas as pd

from blr_analysis.sensitivity.suspicious import KINDS, NONE, Suspicions
from blr_analysis.tables._columns import array_of, frame_of, spread

__all__ = ["suspicious_table"]


def suspicious_table(found: Suspicions) -> pd.DataFrame:
    """One row per example, the most suspicious first.

    ============= ========================================================== ===============
    column        what                                                       more is
    ============= ========================================================== ===============
    index         position in the dataset
    kind          the fault that is suspected: "label", "unfamiliar",
                  "duplicate" or "none"
    target        y_i (``target_0`` … where each example has several)
    prediction    what the model answers
    proposed      the label that would gain most; NaN for regression
    gain          nats that its loss would fall by with that label, for a    worse (label)
                  model without the example; for regression its left-out
                  loss
    unfamiliarity tr(Λ_i V_i), parameters that the example takes up          worse
    closeness     how much nearer its twin is than its tenth neighbour,      worse
                  0 … 1; NaN where twins were not asked for
    twin          index of the nearest other example; −1 where not asked
    …             the user's metadata; a name taken above gets the suffix ``_metadata``
    ============= ========================================================== ===============
    """
    n = len(found)
    kinds = pd.Categorical(found.kind, categories=[*KINDS, NONE])
    proposed = {"proposed": None} if found.proposed is None else spread("proposed", found.proposed)
    columns = {
        "index": np.arange(n),
        "kind": kinds,
        **spread("target", found.targets),
        **spread("prediction", found.predictions),
        **proposed,
        "gain": array_of(found.gain),
        "unfamiliarity": array_of(found.unfamiliarity),
        "closeness": array_of(found.closeness),
        "twin": np.full(n, -1) if found.twin is None else array_of(found.twin),
    }
    table = frame_of(columns, found.metadata)
    return table.iloc[found.order.numpy()].reset_index(drop=True)

"""One row per example: scores, leave-one-out, memory map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from blr_analysis.memory_map import REGIONS, MemoryMap, error_size, variance_size
from blr_analysis.tables._columns import array_of, frame_of, free_name, spread
from blr_analysis.views import make_table

__all__ = ["leave_one_out_table", "memory_map_table", "scores_table"]


def scores_table(scores: Any) -> pd.DataFrame:
    """One row per example, in the order of the dataset.

    ============== ========================================================== ==============
    column         what                                                       more is
    ============== ========================================================== ==============
    index          position in the dataset
    target         y_i (``target_0`` … where each example has several)
    prediction     class, or mean (``prediction_0`` … where several)
    loss           ℓ_i = −log p(y_i | f_i), nats                              worse fitted
    error          ‖e_i‖₂, Euclidean norm of the prediction error; |e_i| if   more wrong
                   C = 1
    variance       tr V_i, trace of the prediction variance; V_i if C = 1;    less certain
                   NaN where V was not computed
    deviation      how far the prediction would move without the example;     more influential
                   NaN where V was not computed
    self_influence g_iᵀΣg_i, first-order rise of its own loss, nats           more influential
    leverage       largest eigenvalue of V_iΛ_i; NaN where unknown            more influential
    …              the user's metadata; a name taken above gets the suffix ``_metadata``
    ============== ========================================================== ==============
    """
    columns = {
        "index": np.arange(len(scores.losses)),
        **spread("target", scores.targets),
        **spread("prediction", scores.predictions),
        "loss": array_of(scores.losses),
        "error": error_size(scores.error).numpy(),
        "variance": None if scores.variance is None else variance_size(scores.variance).numpy(),
        "deviation": array_of(scores.deviation),
        "self_influence": array_of(scores.self_influence),
        "leverage": array_of(scores.leverage),
    }
    return frame_of(columns, scores.metadata)


def leave_one_out_table(loo: Any) -> pd.DataFrame:
    """One row per example: what it would have been predicted as, had it not been there.

    Columns: index, target, prediction and loss without the example, prediction_before and
    loss_before with it, deviation, leverage, correction ("first_order", "cavity", "bounded" or
    "descent", as used for this row), then the user's metadata.
    """
    columns = {
        "index": np.arange(len(loo.losses)),
        **spread("target", loo.targets),
        **spread("prediction", loo.predictions),
        **spread("prediction_before", loo.predictions_before),
        "loss": array_of(loo.losses),
        "loss_before": array_of(loo.losses_before),
        "deviation": array_of(loo.deviation),
        "leverage": array_of(loo.leverage),
        "correction": np.asarray(loo.correction, dtype=object),
    }
    return frame_of(columns, loo.metadata)


def memory_map_table(memory: MemoryMap) -> pd.DataFrame:
    """The table of the scores, its error and variance as mapped, and the region of each row."""
    table = pd.DataFrame(make_table(memory.scores))
    if "region" in table:
        table = table.rename(columns={"region": free_name("region", set(table))})
    after = list(table).index("leverage") + 1
    table = table.assign(error=memory.error.numpy(), variance=memory.variance.numpy())
    table.insert(after, "region", pd.Categorical(memory.region, categories=REGIONS))
    return table

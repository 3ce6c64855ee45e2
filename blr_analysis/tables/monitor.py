"""One row per epoch that was watched, per epoch and example, per prior precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from blr_analysis.sensitivity.monitor import COLUMNS
from blr_analysis.tables._columns import array_of, frame_of

__all__ = ["histories_table", "monitor_table", "prior_selection_table"]


def monitor_table(monitor: Any) -> pd.DataFrame:
    """One row per recorded epoch.

    =================== ====================================================== ==============
    column              what                                                   more is
    =================== ====================================================== ==============
    epoch               epochs done
    train_nll           mean loss of the watched training examples, nats       worse
    train_accuracy      theirs
    loo_nll             mean left-out loss: the estimate of test_nll           worse
    loo_accuracy        of the left-out predictions; NaN for regression        better
    test_nll            mean loss of the test task; NaN without one            worse
    test_accuracy       its
    mean_deviation      mean over the watched examples
    mean_self_influence mean g_iᵀΣg_i, nats
    max_leverage        largest eigenvalue of V_iΛ_i over all examples; from 1
                        on, the posterior overstates V_i
    seconds             what the recording took
    =================== ====================================================== ==============
    """
    return pd.DataFrame(monitor.rows, columns=list(COLUMNS)).astype({"epoch": np.int64})


def histories_table(histories: Any) -> pd.DataFrame:
    """Epoch × watched example: epoch, index, the measures that were kept, the user's metadata."""
    epochs, n = len(histories.epochs), len(histories.indices)
    columns = {
        "epoch": np.repeat(np.asarray(histories.epochs, dtype=np.int64), n),
        "index": np.tile(array_of(histories.indices), epochs),
        **{name: array_of(values).reshape(-1) for name, values in histories.kept.items()},
    }
    metadata = {name: list(values) * epochs for name, values in histories.metadata.items()}
    return frame_of(columns, metadata)


def prior_selection_table(selection: Any) -> pd.DataFrame:
    """One row per δ, rising; the columns of :class:`blr_analysis.PriorSelection`."""
    return pd.DataFrame(list(selection.rows))

"""What each example did to a fitted probabilistic model, as a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from blr_analysis.errors import InputError
from blr_analysis.tables._columns import array_of

__all__ = ["fitted_table"]


def fitted_table(fitted: Any) -> pd.DataFrame:
    """One row per example of a :class:`blr_analysis.learning_rule.inference.Fitted`.

    ============== ============================================================= ============
    column         what                                                          more is
    ============== ============================================================= ============
    index          position in the data
    log_predictive log p(y_i) under the posterior, in nats                       better
    left_out       log p(y_i) under the posterior without the example, in nats   better
    gain           log_predictive − left_out: what the example told the model    shapes more
                   about itself
    ============== ============================================================= ============

    Raises:
        InputError: a model without sites or without a predictive, or fitted without keeping its
            data; its history is in ``fitted.history``.
    """
    left_out = array_of(fitted.left_out())
    if fitted.predictive is None or fitted.data is None:
        raise InputError("the table needs the model's predictive and its data")
    before = array_of(fitted.log_predictive(fitted.data))
    return pd.DataFrame(
        {
            "index": np.arange(len(left_out)),
            "log_predictive": before,
            "left_out": left_out,
            "gain": before - left_out,
        }
    )

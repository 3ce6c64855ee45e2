"""The probe that a posterior's scale was checked on, one row per example."""

from __future__ import annotations

import numpy as np
import pandas as pd

from blr_analysis.errors import InputError
from blr_analysis.posterior.gaussian import Posterior

__all__ = ["calibration_table"]


def calibration_table(posterior: Posterior) -> pd.DataFrame:
    """What :func:`blr_analysis.calibrate` found, one row per example of its probe.

    ========== =====================================================================
    column     what
    ========== =====================================================================
    index      position in the dataset
    weight     how many examples it stands for in the totals
    exact      rise of its own loss without it by the exact solve, nats; NaN if unusable
    estimated  the same by leave-one-out with the posterior as it was given
    calibrated … and as it is now
    ratio      exact / calibrated
    residual   of the conjugate gradients, relative
    converged  whether they met the tolerance
    ========== =====================================================================

    Raises:
        InputError: the posterior was not calibrated.

    Example:
        >>> import torch, blr_analysis as blr
        >>> task = blr.Task(torch.nn.Linear(2, 2), (torch.randn(30, 2), torch.randint(2, (30,))))
        >>> q = blr.fit_laplace(task, structure="diag", prior_precision=1.0, progress=False)
        >>> table = calibration_table(blr.calibrate(task, q, probe=8, progress=False))
        >>> len(table), bool(table.converged.all())
        (8, True)
    """
    found = posterior.record.get("calibration") if isinstance(posterior, Posterior) else None
    if not found:
        raise InputError("the posterior holds no calibration; blr_analysis.calibrate makes one")
    exact = np.asarray([np.nan if r is None else r for r in found["exact"]], dtype=float)
    return pd.DataFrame(
        {
            "index": found["probe"],
            "weight": found["weight"],
            "exact": exact,
            "estimated": found["estimated"],
            "calibrated": found["calibrated"],
            "ratio": exact / np.asarray(found["calibrated"], dtype=float),
            "residual": found["residual"],
            "converged": found["converged"],
        }
    )

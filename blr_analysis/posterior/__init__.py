"""What was learned: the posterior, where it comes from, and how it is kept."""

from blr_analysis.posterior.forecast import Forecast, Stage, fit_stages
from blr_analysis.posterior.gaussian import Posterior, predict
from blr_analysis.posterior.laplace import (
    check_finite,
    curvature_root,
    drawn_labels,
    fit_kept,
    fit_laplace,
)
from blr_analysis.posterior.precision_files import (
    FACTORED,
    read_precision_record,
    write_captured,
    write_factors,
    write_precision,
)
from blr_analysis.posterior.prior import Prior, n_data_of, take_off
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.posterior.stored import check_dtype

__all__ = [
    "FACTORED",
    "Forecast",
    "KroneckerRecorder",
    "Posterior",
    "Prior",
    "Stage",
    "check_dtype",
    "check_finite",
    "curvature_root",
    "drawn_labels",
    "fit_kept",
    "fit_laplace",
    "fit_stages",
    "n_data_of",
    "predict",
    "read_precision_record",
    "take_off",
    "write_captured",
    "write_factors",
    "write_precision",
]

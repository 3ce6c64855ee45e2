"""What was learned: the posterior, where it comes from, and how it is kept."""

from blr_analysis.posterior.capture.assemble import write_captured as write_captured
from blr_analysis.posterior.factor_files import write_factors as write_factors
from blr_analysis.posterior.forecast import Forecast as Forecast
from blr_analysis.posterior.forecast import fit_examples as fit_examples
from blr_analysis.posterior.laplace import fit_laplace as fit_laplace
from blr_analysis.posterior.one_fit import fit_at_weights as fit_at_weights
from blr_analysis.posterior.optimality import checked as checked
from blr_analysis.posterior.posterior import Posterior as Posterior
from blr_analysis.posterior.posterior import predict as predict
from blr_analysis.posterior.precision_files import FACTORED as FACTORED
from blr_analysis.posterior.precision_files import check_dtype as check_dtype
from blr_analysis.posterior.precision_files import read_precision_record as read_precision_record
from blr_analysis.posterior.precision_files import write_precision as write_precision
from blr_analysis.posterior.prior import Prior as Prior
from blr_analysis.posterior.prior import n_data_of as n_data_of
from blr_analysis.posterior.prior import take_off as take_off
from blr_analysis.posterior.recorder import KroneckerRecorder as KroneckerRecorder
from blr_analysis.posterior.recorder import is_recordable as is_recordable

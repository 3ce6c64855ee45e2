"""What was learned: the posterior, where it comes from, and how it is kept."""

from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import fit_laplace

__all__ = ["Posterior", "fit_laplace"]

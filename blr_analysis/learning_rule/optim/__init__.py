"""The rows of the Bayesian learning rule that train networks, as ``torch.optim.Optimizer``."""

from typing import Any

from blr_analysis.learning_rule.optim.binary import STE, BayesBiNN
from blr_analysis.learning_rule.optim.bsam import BSAM
from blr_analysis.learning_rule.optim.diagonal_newton import DiagonalNewton
from blr_analysis.learning_rule.optim.dropout import Dropout
from blr_analysis.learning_rule.optim.ivon import IVON
from blr_analysis.learning_rule.optim.learned_dropout import LearnedDropout
from blr_analysis.learning_rule.optim.mixture import Mixture
from blr_analysis.learning_rule.optim.newton import Newton
from blr_analysis.learning_rule.optim.preconditioned import PreconditionedSGD
from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer
from blr_analysis.learning_rule.optim.sam import SAM
from blr_analysis.learning_rule.optim.structured import OGGN, SLANG, VOGGN, NoisyKFAC
from blr_analysis.learning_rule.optim.variational import OGN, VOGN, Vadam, Vprop
from blr_analysis.recipe import OPTIMIZERS

__all__ = [
    "BSAM",
    "IVON",
    "OGGN",
    "OGN",
    "SAM",
    "SLANG",
    "STE",
    "VOGGN",
    "VOGN",
    "BayesBiNN",
    "DiagonalNewton",
    "Dropout",
    "LearnedDropout",
    "Mixture",
    "Newton",
    "NoisyKFAC",
    "PreconditionedSGD",
    "RowOptimizer",
    "Vadam",
    "Vprop",
]

BY_NAME: dict[str, Any] = {
    name.lower(): globals()[name] for name in __all__ if name not in ("Mixture", "RowOptimizer")
}
"""The optimizers of networks by their names in lower case."""

OPTIMIZERS |= BY_NAME  # which recipes know by name

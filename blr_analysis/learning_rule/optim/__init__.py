"""The rows of the Bayesian learning rule that train networks, as ``torch.optim.Optimizer``."""

from blr_analysis.learning_rule.optim.binary import STE, BayesBiNN
from blr_analysis.learning_rule.optim.bsam import BSAM
from blr_analysis.learning_rule.optim.dropout import Dropout
from blr_analysis.learning_rule.optim.ivon import IVON
from blr_analysis.learning_rule.optim.mixture import Mixture
from blr_analysis.learning_rule.optim.newton import Newton
from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer
from blr_analysis.learning_rule.optim.structured import OGGN, SLANG, VOGGN, NoisyKFAC
from blr_analysis.learning_rule.optim.variational import OGN, VOGN, Vadam, Vprop
from blr_analysis.recipe import OPTIMIZERS

__all__ = [
    "BSAM",
    "IVON",
    "OGGN",
    "OGN",
    "SLANG",
    "STE",
    "VOGGN",
    "VOGN",
    "BayesBiNN",
    "Dropout",
    "Mixture",
    "Newton",
    "NoisyKFAC",
    "RowOptimizer",
    "Vadam",
    "Vprop",
]

BY_NAME = {
    "bayesbinn": BayesBiNN,
    "bsam": BSAM,
    "dropout": Dropout,
    "ivon": IVON,
    "newton": Newton,
    "noisykfac": NoisyKFAC,
    "oggn": OGGN,
    "ogn": OGN,
    "slang": SLANG,
    "ste": STE,
    "vadam": Vadam,
    "voggn": VOGGN,
    "vogn": VOGN,
    "vprop": Vprop,
}
"""The optimizers of networks by their names in lower case."""

OPTIMIZERS |= BY_NAME  # which recipes know by name

"""The rows of the Bayesian learning rule that train networks, as ``torch.optim.Optimizer``."""

from blr_analysis.learning_rule.optim.ivon import IVON

__all__ = ["IVON"]

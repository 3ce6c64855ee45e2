"""Training with the rule's optimizers, and watching it, in Lightning.

With this module lightning is imported:

    from blr_analysis.lightning import LightningMonitor, VariationalSteps
    from blr_analysis.lightning import LightningCheckpoints  # checkpoints and recipe for a Task
"""

from blr_analysis.huggingface.lightning import LightningCheckpoints as LightningCheckpoints
from blr_analysis.huggingface.lightning import LightningMonitor as LightningMonitor
from blr_analysis.huggingface.lightning import VariationalSteps as VariationalSteps

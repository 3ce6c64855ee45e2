"""Training with the rule's optimizers, and watching it, in Lightning.

The callbacks are loaded when they are asked for, and lightning with them:

    from blr_analysis.lightning import LightningMonitor, VariationalSteps
    from blr_analysis.lightning import LightningCheckpoints  # checkpoints and recipe for a Task
"""

from blr_analysis.huggingface import LightningCheckpoints as LightningCheckpoints
from blr_analysis.huggingface import LightningMonitor as LightningMonitor
from blr_analysis.huggingface import VariationalSteps as VariationalSteps

"""Training with the rule's optimizers, and watching it, in Lightning.

The callbacks are loaded when they are asked for, and lightning with them:

    from blr_analysis.lightning import LightningMonitor, VariationalSteps
    from blr_analysis.lightning import LightningCheckpoints  # checkpoints and recipe for a Task
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blr_analysis.huggingface.lightning import (
        LightningCheckpoints,
        LightningMonitor,
        VariationalSteps,
    )

__all__ = ["LightningCheckpoints", "LightningMonitor", "VariationalSteps"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from blr_analysis.huggingface import lightning

    return getattr(lightning, name)

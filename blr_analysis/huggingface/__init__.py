"""Where Hugging Face and Lightning models, their data and their training runs are read.

The callbacks are loaded when they are asked for, and their trainers' libraries with them:

    from blr_analysis.huggingface import TrainerPrecision      # imports transformers
    from blr_analysis.huggingface import IVONTrainer           # imports transformers
    from blr_analysis.huggingface import MonitorCallback       # imports transformers
    from blr_analysis.huggingface import LightningPrecision    # imports lightning
    from blr_analysis.huggingface import checkpoint_precision  # imports neither until called
"""

from typing import TYPE_CHECKING, Any

from blr_analysis.huggingface.checkpoints import checkpoint_precision

if TYPE_CHECKING:
    from blr_analysis.huggingface.lightning import LightningPrecision
    from blr_analysis.huggingface.monitoring import MonitorCallback
    from blr_analysis.huggingface.trainer import TrainerPrecision
    from blr_analysis.huggingface.training import IVONTrainer, VariationalSteps

__all__ = [
    "IVONTrainer",
    "LightningPrecision",
    "MonitorCallback",
    "TrainerPrecision",
    "VariationalSteps",
    "checkpoint_precision",
]


def __getattr__(name: str) -> Any:
    if name == "TrainerPrecision":
        from blr_analysis.huggingface.trainer import TrainerPrecision

        return TrainerPrecision
    if name in ("IVONTrainer", "VariationalSteps"):
        from blr_analysis.huggingface import training

        return getattr(training, name)
    if name == "MonitorCallback":
        from blr_analysis.huggingface.monitoring import MonitorCallback

        return MonitorCallback
    if name == "LightningPrecision":
        from blr_analysis.huggingface.lightning import LightningPrecision

        return LightningPrecision
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

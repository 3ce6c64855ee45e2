"""Where Hugging Face and Lightning models, their data and their training runs are read.

The callbacks are loaded when they are asked for, and their trainers' libraries with them:

    from blr_analysis.huggingface import TrainerPrecision      # imports transformers
    from blr_analysis.huggingface import IVONTrainer           # imports transformers
    from blr_analysis.huggingface import MonitorCallback       # imports transformers
    from blr_analysis.huggingface import LightningCheckpoints  # imports lightning
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

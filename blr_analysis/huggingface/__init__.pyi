from .lightning import LightningCheckpoints as LightningCheckpoints
from .recording import checkpoint_precision as checkpoint_precision
from .trainer import (
    CheckpointsCallback as CheckpointsCallback,
    IVONTrainer as IVONTrainer,
    MonitorCallback as MonitorCallback,
    TrainerPrecision as TrainerPrecision,
    VariationalTrainer as VariationalTrainer,
)

from .lightning import LightningCheckpoints as LightningCheckpoints
from .trainer import (
    BLRCallback as BLRCallback,
    CheckpointsCallback as CheckpointsCallback,
    IVONTrainer as IVONTrainer,
    MonitorCallback as MonitorCallback,
    TrainerPrecision as TrainerPrecision,
    VariationalTrainer as VariationalTrainer,
)

from .callbacks import (
    BLRCallback as BLRCallback,
    CheckpointsCallback as CheckpointsCallback,
    MonitorCallback as MonitorCallback,
    TrainerPrecision as TrainerPrecision,
)
from .lightning import LightningCheckpoints as LightningCheckpoints
from .trainer import (
    IVONTrainer as IVONTrainer,
    VariationalTrainer as VariationalTrainer,
)

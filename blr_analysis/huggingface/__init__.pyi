from .lightning import LightningPrecision as LightningPrecision
from .recording import checkpoint_precision as checkpoint_precision
from .trainer import (
    IVONTrainer as IVONTrainer,
    MonitorCallback as MonitorCallback,
    TrainerPrecision as TrainerPrecision,
    VariationalTrainer as VariationalTrainer,
)

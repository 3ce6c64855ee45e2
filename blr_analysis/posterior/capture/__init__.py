"""Where a posterior comes from: a live optimizer, or what a training run saved."""

from __future__ import annotations

from blr_analysis.posterior.capture.assemble import HALF_REASON, Captured, Told, tied_names
from blr_analysis.posterior.capture.checkpoints import from_checkpoint
from blr_analysis.posterior.capture.live import (
    from_optimizer,
    from_recorder,
    parameter_order,
    unwrap,
)
from blr_analysis.posterior.capture.readers import reader_of

__all__ = [
    "HALF_REASON",
    "Captured",
    "Told",
    "from_checkpoint",
    "from_optimizer",
    "from_recorder",
    "parameter_order",
    "reader_of",
    "tied_names",
    "unwrap",
]

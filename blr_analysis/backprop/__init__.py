"""Per-example quantities without per-example gradients of the whole model: the hot path."""

from blr_analysis.backprop.engine import Chunk, chunks, predict

__all__ = ["Chunk", "chunks", "predict"]

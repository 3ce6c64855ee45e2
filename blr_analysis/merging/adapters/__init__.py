"""LoRA adapters as fine-tuned models: exactly what they make of their base, or a refusal."""

from __future__ import annotations

from blr_analysis.merging.adapters.opening import apply_adapter, is_adapter, open_adapter
from blr_analysis.merging.adapters.source import Adapter

__all__ = ["Adapter", "apply_adapter", "is_adapter", "open_adapter"]

"""A model's tensors on disk, described and read piece by piece, never loaded whole."""

from __future__ import annotations

from blr_analysis.weights.fingerprint import fingerprint
from blr_analysis.weights.folder import Folder
from blr_analysis.weights.loaded import Loaded
from blr_analysis.weights.source import Scratch, Source, Spec

__all__ = ["Folder", "Loaded", "Scratch", "Source", "Spec", "fingerprint"]

"""A model's tensors on disk, described and read piece by piece, never loaded whole."""

from __future__ import annotations

from blr_analysis.files.fingerprint import fingerprint
from blr_analysis.files.folder import Folder
from blr_analysis.files.loaded import Loaded
from blr_analysis.files.source import Scratch, Source, Spec

__all__ = ["Folder", "Loaded", "Scratch", "Source", "Spec", "fingerprint"]

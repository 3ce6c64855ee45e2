"""Tensors on disk, one format: described and read piece by piece, written whole or not at all."""

from __future__ import annotations

from blr_analysis.files.comparing import same_bytes
from blr_analysis.files.folder import Folder, read_config
from blr_analysis.files.placing import drafted, held
from blr_analysis.files.shards import Shards
from blr_analysis.files.source import Loaded, Owned, Scratch, Source, Spec, fingerprint
from blr_analysis.files.storage import Unfinished
from blr_analysis.files.verify import Verified, verify

__all__ = [
    "Folder",
    "Loaded",
    "Owned",
    "Scratch",
    "Shards",
    "Source",
    "Spec",
    "Unfinished",
    "Verified",
    "drafted",
    "fingerprint",
    "held",
    "read_config",
    "same_bytes",
    "verify",
]

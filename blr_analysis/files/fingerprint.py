"""One number that says whether two folders hold the same weights, however they are sharded."""

from __future__ import annotations

import hashlib

import torch

from blr_analysis.files.source import Scratch, Source
from blr_analysis.progress import track

PIECE = 2**22  # bytes at a time


def fingerprint(source: Source, *, progress: bool | None = None) -> str:
    """The sha256, in hexadecimal, of every tensor's name, dtype, shape and bytes, sorted by name.

    Two folders that hold the same tensors agree, whatever their shards and metadata.

    Raises:
        StorageError: a file cannot be read.
    """
    digest, scratch = hashlib.sha256(), Scratch()
    for name in track(sorted(source.specs), label="sha256", show=progress):
        spec = source.specs[name]
        dtype = str(spec.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{list(spec.shape)}\0".encode())
        step = max(1, PIECE // spec.dtype.itemsize)
        for start in range(0, spec.numel, step):
            flat = source.read(name, start, min(start + step, spec.numel), scratch)
            digest.update(flat.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""Safetensors files of a chosen size and their index, as Hugging Face names them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from blr_analysis.checks import positive_int
from blr_analysis.files.headers import write_header
from blr_analysis.files.source import Spec, bytes_of


def split(nbytes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Names, in order, in runs of at most ``max_shard_bytes`` (a larger tensor stands alone).

    >>> split({"a": 20, "b": 8, "c": 8}, 16)
    [['a'], ['b', 'c']]
    """
    shards: list[list[str]] = []
    room = 0
    for name, size in nbytes.items():
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def shard_name(stem: str, k: int, count: int) -> str:
    """The file of shard ``k`` of ``count``, counted from 1."""
    return f"{stem}-{k:05d}-of-{count:05d}.safetensors"


def write_index(
    folder: Path, stem: str, held: Mapping[str, str], metadata: Mapping[str, Any]
) -> None:
    """Which file holds which tensor, and what else is to be said of them."""
    text = json.dumps({"metadata": metadata, "weight_map": held}, indent=2)
    (folder / f"{stem}.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """One safetensors file; wide numbers first, so that each begins where its dtype may."""
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    specs = {name: Spec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    head, _ = write_header(specs, metadata)
    with open(path, "wb") as file:
        file.write(head)
        for tensor in tensors.values():
            file.write(bytes_of(tensor.detach().cpu().resolve_neg()))


class Shards:
    """Files whose every tensor is placed before the first is written, piece by piece.

    ``begin`` makes the files, headers written and space reserved; then ``put`` may be called by
    several threads, never twice for one entry. ``names`` are the files'.

    >>> import tempfile, torch
    >>> from blr_analysis.files import Folder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     shards = Shards(Path(folder), {"w": Spec((3,), torch.float32)}, 100)
    ...     shards.begin()
    ...     shards.put("w", 1, torch.ones(2))
    ...     shards.names, Folder.open(folder).tensor("w")
    (['model.safetensors'], tensor([0., 1., 1.]))
    """

    def __init__(
        self, folder: Path, specs: Mapping[str, Spec], max_shard_bytes: int, stem: str = "model"
    ) -> None:
        self.folder, self.stem, self.specs = folder, stem, specs
        runs = split(
            {n: s.nbytes for n, s in specs.items()},
            positive_int("max_shard_bytes", max_shard_bytes),
        )
        count = len(runs)
        names = [shard_name(stem, k, count) for k in range(1, count + 1)]
        self._shards = dict(
            zip([f"{stem}.safetensors"] if count == 1 else names, runs, strict=True)
        )
        self.names = list(self._shards)
        self._places: dict[str, tuple[Path, int]] = {}

    def begin(self) -> None:
        """Make the files."""
        for file, names in self._shards.items():
            path = self.folder / file
            tensors = {n: self.specs[n] for n in names}
            head, starts = write_header(tensors, {"format": "pt"})
            with open(path, "xb", buffering=0) as made:
                _reserve(made.fileno(), len(head) + sum(s.nbytes for s in tensors.values()))
                made.write(head)
            self._places |= {n: (path, at) for n, at in zip(names, starts, strict=True)}
        if len(self._shards) > 1:
            total = sum(spec.nbytes for spec in self.specs.values())
            held = {name: file for file, names in self._shards.items() for name in names}
            write_index(self.folder, self.stem, held, {"total_size": total})

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Write entries ``[start, start + len(values))`` of a tensor, in its dtype."""
        path, offset = self._places[name]
        with open(path, "r+b") as file:
            file.seek(offset + start * self.specs[name].dtype.itemsize)
            file.write(bytes_of(values))


def _reserve(fd: int, size: int) -> None:
    """Room for a file, so that a full disk shows before anything is computed."""
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as error:
        unsupported = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
        if isinstance(error, OSError) and error.errno not in unsupported:
            raise
        os.ftruncate(fd, size)

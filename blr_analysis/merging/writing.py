"""The merged weights on disk: shards of a chosen size and their index, or tensors in memory."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import positive_int
from blr_analysis.errors import StorageError
from blr_analysis.files.headers import CODES
from blr_analysis.merging.fates import Item

INDEX = "model.safetensors.index.json"


class Shards:
    """Safetensors files whose every tensor is placed before the first is written.

    ``begin`` makes the files, headers written and space reserved; then it is a sink of
    :func:`blr_analysis.merging.stream.stream`.

    Raises:
        StorageError: no room, or a place that cannot be written.
    """

    def __init__(self, folder: Path, items: Sequence[Item], max_shard_bytes: int) -> None:
        positive_int("max_shard_bytes", max_shard_bytes)
        self.folder = folder
        self.groups = _split(items, max_shard_bytes)
        count = len(self.groups)
        self.names = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
        )
        self._places: dict[str, tuple[Path, int]] = {}

    def begin(self) -> None:
        """Make the files."""
        try:
            for name, group in zip(self.names, self.groups, strict=True):
                self._begin(self.folder / name, group)
            if len(self.names) > 1:
                self._write_index()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def put(self, item: Item, start: int, values: Tensor) -> None:
        path, offset = self._places[item.name]
        view = values.contiguous().view(torch.uint8).numpy().data
        try:
            with open(path, "r+b", buffering=0) as file:
                file.seek(offset + start * item.spec.dtype.itemsize)
                while view:
                    view = view[file.write(view) :]
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def _begin(self, path: Path, group: Sequence[Item]) -> None:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for item in group:
            entries[item.name] = {
                "dtype": CODES[item.spec.dtype],
                "shape": list(item.spec.shape),
                "data_offsets": [end, end + item.spec.nbytes],
            }
            end += item.spec.nbytes
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # so that the numbers begin where processors like it
        head = len(text).to_bytes(8, "little") + text
        with open(path, "xb", buffering=0) as file:
            _reserve(file.fileno(), len(head) + end)
            file.write(head)
        for item in group:
            self._places[item.name] = path, len(head) + entries[item.name]["data_offsets"][0]

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": sum(i.spec.nbytes for group in self.groups for i in group)},
            "weight_map": {
                item.name: name
                for name, group in zip(self.names, self.groups, strict=True)
                for item in group
            },
        }
        text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
        (self.folder / INDEX).write_text(text, encoding="utf-8")


class Memory:
    """Whole tensors in memory; a sink like :class:`Shards`."""

    def __init__(self, items: Sequence[Item], devices: Mapping[str, torch.device]) -> None:
        self.tensors = {
            i.name: torch.empty(i.spec.shape, dtype=i.spec.dtype, device=devices[i.name])
            for i in items
        }

    def put(self, item: Item, start: int, values: Tensor) -> None:
        self.tensors[item.name].view(-1)[start : start + len(values)] = values


def write_text(folder: Path, documents: Mapping[str, str]) -> None:
    """Texts by file name."""
    for name, text in documents.items():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise _cannot_write(folder, error) from error


def check_room(out: Path, needed: int) -> None:
    """Raise :class:`StorageError` unless the disk of ``out`` has ``needed`` bytes free."""
    place = out.parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise StorageError(
            f"the disk of {str(out)!r} has {free:,} bytes free, the merge writes {needed:,}: "
            "make room, or name another place."
        )


def _split(items: Sequence[Item], most: int) -> list[list[Item]]:
    groups: list[list[Item]] = []
    room = 0
    for item in items:
        if not groups or item.spec.nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(item)
        room -= item.spec.nbytes
    return groups


def _reserve(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as error:
        unsupported = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
        if isinstance(error, OSError) and error.errno not in unsupported:
            raise
        os.ftruncate(fd, size)


def _cannot_write(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write beside {str(folder.parent)!r}: {error.strerror or error}. Nothing is left "
        "behind; name a place that can be written and has room."
    )

"""Safetensors files of a chosen size and their index, as Hugging Face names them."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from blr_analysis.checks import positive_int
from blr_analysis.files.checksums import Checksum, checksum_of, checksum_of_file
from blr_analysis.files.headers import RECORD, read_header, write_header
from blr_analysis.files.source import Spec, bytes_of, specs_of


def split(nbytes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """The names in lists of at most ``max_shard_bytes`` bytes, in order; a larger tensor is alone.

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


def shard_name(stem: str, number: int, count: int) -> str:
    """The name of the file of shard ``number`` of ``count``, counted from 1."""
    return f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> str:
    """Write one safetensors file with its checksums, and return the header's own."""
    specs = specs_of(tensors)
    dense = {name: tensor.detach().cpu().resolve_neg() for name, tensor in tensors.items()}
    checksums = {name: checksum_of(bytes_of(tensor)) for name, tensor in dense.items()}
    head, starts = write_header(specs, metadata, checksums)
    with open(path, "wb") as file:
        file.write(head)
        for name in starts:
            file.write(bytes_of(dense[name]))
    return read_header(path).checksum


def save_folder(
    tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int, *, stem: str, record: str
) -> dict[str, str]:
    """Write numbered safetensors files and their index into a folder that exists.

    Args:
        record: the name of the file that will list their checksums.

    Returns:
        The checksum of each file by its name.
    """
    positive_int("max_shard_bytes", max_shard_bytes)
    sizes = {name: spec.nbytes for name, spec in specs_of(tensors).items()}
    runs = split(sizes, max_shard_bytes)
    metadata = {"format": "pt", RECORD: record}
    files = {}
    weight_map = {}
    for k, names in enumerate(runs, start=1):
        file = shard_name(stem, k, len(runs))
        files[file] = save_file({n: tensors[n] for n in names}, folder / file, metadata)
        weight_map |= dict.fromkeys(names, file)
    index = write_index(folder, stem, weight_map, sum(sizes.values()))
    files[index.name] = checksum_of_file(index)
    return files


def write_index(folder: Path, stem: str, weight_map: Mapping[str, str], total_size: int) -> Path:
    """Write the file that names the shard of each tensor, and return its path."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    path = folder / f"{stem}.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return path


class Shards:
    """Safetensors files that are made first and then filled, piece by piece.

    Headers are written and space is reserved at once. Then several threads may call :meth:`put`,
    never twice for one entry. The headers hold no checksums, because these are known only after the
    last piece.

    Args:
        folder: the folder for the files, which exists.
        specs: of all tensors, by name.
        max_shard_bytes: of a file; a larger tensor has a file of its own.
        stem: of the files' names.
        counts: whether to compute the files' :attr:`checksums`.

    Attributes:
        names: of the files; they are numbered, unless there is only one.

    >>> import tempfile, torch
    >>> from blr_analysis.files import Folder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     shards = Shards(Path(folder), {"w": Spec((3,), torch.float32)}, 100)
    ...     shards.put("w", 1, torch.ones(2))
    ...     shards.names, Folder.open(folder).tensor("w")
    (['model.safetensors'], tensor([0., 1., 1.]))
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, Spec],
        max_shard_bytes: int,
        *,
        stem: str = "model",
        counts: bool = False,
    ) -> None:
        positive_int("max_shard_bytes", max_shard_bytes)
        self.names: list[str] = []
        self._specs = specs
        self._places: dict[str, tuple[Path, int]] = {}  # file and first byte of each tensor
        self._counts = counts
        self._sums: dict[Path, Checksum] = {}
        self._lock = threading.Lock()
        sizes = {name: spec.nbytes for name, spec in specs.items()}
        runs = split(sizes, max_shard_bytes)
        if len(runs) == 1:
            self._make_file(folder / f"{stem}.safetensors", runs[0])
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(runs, start=1):
            file_name = shard_name(stem, number, len(runs))
            self._make_file(folder / file_name, names)
            weight_map |= dict.fromkeys(names, file_name)
        if weight_map:
            write_index(folder, stem, weight_map, sum(sizes.values()))

    def _make_file(self, path: Path, names: Sequence[str]) -> None:
        """Write the header of a file of these tensors, and reserve its space."""
        specs = {name: self._specs[name] for name in names}
        head, starts = write_header(specs, {"format": "pt"})
        size = len(head) + sum(spec.nbytes for spec in specs.values())
        with open(path, "xb", buffering=0) as file:
            _reserve(file.fileno(), size)
            file.write(head)
        self._sums[path] = Checksum(size)
        self._sums[path].add(head, 0)
        self.names.append(path.name)
        for name in names:
            self._places[name] = (path, starts[name])

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Write ``values`` as the entries of a tensor from ``start`` on, in the tensor's dtype."""
        path, offset = self._places[name]
        place = offset + start * self._specs[name].dtype.itemsize
        content = bytes_of(values)
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(content)
        if self._counts:
            part = Checksum()
            part.add_anywhere(content, place)
            with self._lock:
                self._sums[path].join(part)

    @property
    def checksums(self) -> dict[str, str]:
        """The checksum of each file by its name; right once all pieces are written."""
        return {path.name: checksum.hexdigest() for path, checksum in self._sums.items()}


def _reserve(fd: int, size: int) -> None:
    """Reserve the space of a file, so that a full disk is noticed before the computation."""
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.ftruncate(fd, size)

"""A folder of safetensors shards, or one file, as a source of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import StorageError
from blr_analysis.files.checksums import PIECE, WORD, Checksum, Pieces
from blr_analysis.files.headers import (
    AGAIN,
    Header,
    damaged,
    read_header,
    read_json,
    reading,
    state_of,
)
from blr_analysis.files.source import Scratch, Source, Spec

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Folder(Source):
    """The tensors of a Hugging Face folder, or of one ``.safetensors`` file.

    Opening reads headers and the index only, and checks them against each other: every tensor
    stands once, in the shard that the index names, and every shard is as long as its header says.
    Reading is by position into the caller's buffers; nothing is mapped, and a file that changes
    after it was opened is refused. A tensor of a file with checksums is compared with its own when
    it is read whole, in one piece or in several.

    Attributes:
        metadata: the texts in the files' headers, by name.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"w": torch.arange(6.0).view(2, 3)}, f"{folder}/model.safetensors")
        ...     source = Folder.open(folder)
        ...     source.specs["w"].shape, source.read("w", 2, 5, Scratch())
        ((2, 3), tensor([2., 3., 4.]))
    """

    def __init__(self, name: str, headers: Mapping[Path, Header]) -> None:
        self.name = name
        self.headers = headers
        self.metadata: dict[str, str] = {}
        self._places: dict[str, tuple[Path, Spec, int]] = {}
        self._pieces: dict[str, Pieces] = {}
        for path, header in headers.items():
            self.metadata |= header.metadata
            for tensor, (spec, offset) in header.tensors.items():
                self._places[tensor] = (path, spec, offset)
                if tensor in header.checksums:
                    self._pieces[tensor] = Pieces(header.checksums[tensor], spec.nbytes)
        self.specs: Mapping[str, Spec] = {
            tensor: spec for tensor, (_, spec, _) in self._places.items()
        }

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, stem: str = "model") -> Folder:
        """Open ``path``: a ``.safetensors`` file, or a folder with ``<stem>.safetensors`` or
        ``<stem>.safetensors.index.json`` and its shards.

        Raises:
            StorageError: nothing there, only pickles, or files that do not agree.
        """
        place = Path(path).expanduser()
        single = place if place.is_file() else place / f"{stem}.safetensors"
        index = place / f"{stem}.safetensors.index.json"
        if single.is_file() and index.is_file():
            raise StorageError(
                f"{str(path)!r} holds both {single.name} and {index.name}: remove one."
            )
        if index.is_file():
            return cls(str(path), _headers_of_shards(index))
        if single.is_file():
            return cls(str(path), {single: read_header(single)})
        raise StorageError(_why_no_tensors(place, stem))

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        path, spec, offset = self._places[name]
        first_byte = start * spec.dtype.itemsize
        end_byte = stop * spec.dtype.itemsize
        raw = scratch.take(self, end_byte - first_byte)
        buffer = raw.numpy().data
        pieces = self._pieces.get(name)
        ends_at_word = end_byte % WORD == 0 or end_byte == spec.nbytes
        is_aligned = first_byte % WORD == 0 and ends_at_word
        checksum = Checksum() if pieces is not None and is_aligned else None
        bytes_read = 0
        with reading(path), open(path, "rb") as file:
            state = state_of(file.fileno())
            file.seek(offset + first_byte)
            for position in range(0, len(raw), PIECE):
                part = buffer[position : position + PIECE]
                bytes_read += file.readinto(part)
                if checksum is not None:
                    checksum.add(part, first_byte + position)
        was_changed = state != self.headers[path].state
        if was_changed or bytes_read < len(raw):
            raise StorageError(f"{str(path)!r} was changed while it was being read.")
        if pieces is not None and checksum is not None:
            if len(raw) == spec.nbytes:
                is_intact = checksum.hexdigest() == pieces.expected
            else:
                is_intact = pieces.add(checksum, first_byte, end_byte)
            if not is_intact:
                raise StorageError(damaged(path))
        return raw.view(spec.dtype)


def read_config(model: Path) -> dict[str, Any]:
    """A model folder's ``config.json``; empty without such a file.

    Raises:
        StorageError: it is no JSON object.
    """
    file = model / "config.json"
    if not file.is_file():
        return {}
    return read_json(file)


def read_index(index: Path) -> dict[str, set[str]]:
    """The names of the tensors in each shard of a folder, from its ``.index.json``.

    Raises:
        StorageError: no index, or one that names files that are not beside it.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StorageError(f"{str(index)!r} is no index of weights: {AGAIN}.")
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    tensors_by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain(file, suffix):
            raise StorageError(
                f"{str(index)!r} places {name!r} in {file!r}, which is not a {suffix} file of the "
                "same folder."
            )
        tensors_by_file.setdefault(file, set()).add(name)
    return tensors_by_file


def _headers_of_shards(index: Path) -> dict[Path, Header]:
    """The header of every shard that an index names.

    Raises:
        StorageError: a shard holds other tensors than the index says.
    """
    headers = {}
    for file, names in read_index(index).items():
        path = index.parent / file
        headers[path] = read_header(path)
        unmatched = names ^ headers[path].tensors.keys()
        if unmatched:
            raise StorageError(
                f"{str(path)!r} and {index.name!r} disagree on {some(sorted(unmatched))}: {AGAIN}."
            )
    return headers


def _is_plain(file: str, suffix: str) -> bool:
    """Whether this is a file name of that kind without a folder, under any system's rules."""
    is_name = PurePath(file).name == file
    has_separator = bool(set(file) & set("/\\\0:"))
    return is_name and not has_separator and file.endswith(suffix) and not file.startswith(".")


def _why_no_tensors(folder: Path, stem: str) -> str:
    """The words of an error about a place without tensors."""
    if not folder.is_dir():
        return (
            f"{str(folder)!r} is no folder or .safetensors file on this machine "
            "(`huggingface-cli download` makes one)"
        )
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith((*PICKLES, ".distcp"))]
    text = (
        f"{str(folder)!r} holds no {stem}.safetensors and no {stem}.safetensors.index.json, but "
        f"{some(pickles or names)}"
    )
    if pickles:
        text += "; a pickle can run code: load it where you trust it, and save it as safetensors"
    return f"{text}."

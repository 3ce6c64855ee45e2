"""The header of a safetensors file: what lies where, believed once the library has checked it.

A file is 8 bytes (the length n of the header, little-endian), n bytes of JSON (tensor name →
dtype, shape, data_offsets) and the numbers, without holes. The offsets are needed to read and
write pieces of tensors without mapping the file into memory, of which a mapping would count as
used whatever was read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from blr_analysis.checks import some
from blr_analysis.errors import StorageError, told_as
from blr_analysis.files.source import Spec

DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (64, 32, 16, 8)},
    **{"BF16": torch.bfloat16, "BOOL": torch.bool, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
METADATA = "__metadata__"
PIECES = "DCP_SHARDING_INFO"  # of torch.distributed.checkpoint, in files with parts of tensors
AGAIN = "copy or save it again"


class Header(NamedTuple):
    """A file's tensors and the bytes at which they begin, in that order; its metadata; and its size
    and time of change."""

    tensors: dict[str, tuple[Spec, int]]
    metadata: dict[str, str]
    state: tuple[int, int]


def read_header(path: Path) -> Header:
    """The header of one file.

    Raises:
        StorageError: not there, truncated, malformed, of a dtype that torch lacks, or a part of
            what several processes wrote.
    """
    with reading(path), open(path, "rb") as file:
        state = state_of(file.fileno())
        with safe_open(path, "np") as checked:
            metadata = checked.metadata() or {}
        first = 8 + int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(first - 8))
    entries.pop(METADATA, None)
    if PIECES in metadata:
        raise StorageError(
            f"{str(path)!r} holds parts of tensors: join them with torch.distributed.checkpoint."
        )
    if odd := {entry["dtype"] for entry in entries.values()} - DTYPES.keys():
        raise StorageError(f"{str(path)!r} holds numbers of dtype {some(sorted(odd))}: cast them.")
    tensors = {
        name: (Spec(tuple(entry["shape"]), DTYPES[entry["dtype"]]), first + begin)
        for begin, name, entry in sorted((e["data_offsets"][0], n, e) for n, e in entries.items())
    }
    return Header(tensors, metadata, state)


def state_of(file: int) -> tuple[int, int]:
    """The size of an open file, and when it was changed."""
    state = os.fstat(file)
    return state.st_size, state.st_mtime_ns


def write_header(
    specs: Mapping[str, Spec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The header of a file of these tensors, and the byte at which each begins; wide numbers first,
    so that each begins where its dtype may."""
    entries, end = {}, 0
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
        offsets = [end, end := end + spec.nbytes]
        entry = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        entries[name] = entry
    text = json.dumps({METADATA: metadata, **entries}, separators=(",", ":"), ensure_ascii=False)
    said = text.encode()
    said += b" " * (-len(said) % 8)  # so that the numbers begin where processors like it
    head = len(said).to_bytes(8, "little") + said
    return head, {name: len(head) + entry["data_offsets"][0] for name, entry in entries.items()}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        StorageError: not there, or no JSON object.
    """
    with reading(path):
        return parse_json(path.read_bytes(), path)


def parse_json(text: str | bytes, path: Path) -> dict[str, Any]:
    """The JSON object in a text that stood in ``path``."""
    with reading(path):
        return {**json.loads(text)}


def reading(path: Path) -> AbstractContextManager[None]:
    """Around what fails where a file is not as it should be: an error of ours."""
    return told_as(StorageError, f"cannot read {str(path)!r} (truncated or damaged?)", AGAIN)

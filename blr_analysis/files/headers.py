"""The header of a safetensors file: what lies where, believed once the library has checked it.

A file is 8 bytes (the length n of the header, little-endian), n bytes of JSON (tensor name →
dtype, shape, data_offsets) and the numbers, without holes. The offsets are needed to read and
write pieces of tensors without mapping the file into memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from blr_analysis.errors import StorageError
from blr_analysis.files.source import Spec

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
METADATA = "__metadata__"
PIECES = "DCP_SHARDING_INFO"  # of torch.distributed.checkpoint, in files with parts of tensors
AGAIN = "Copy or save it again."


@dataclass(frozen=True)
class Located:
    """Where one tensor lies: the byte of the file at which it begins."""

    spec: Spec
    offset: int


@dataclass(frozen=True)
class Header:
    """A file's tensors, in the order of their bytes, and its metadata."""

    tensors: dict[str, Located]
    metadata: dict[str, str]
    size: int
    modified_ns: int


def read_header(path: Path) -> Header:
    """The header of one file.

    Raises:
        StorageError: not there, truncated, malformed, of a dtype that torch lacks, or a part of
            what several processes wrote.
    """
    with reading(path), open(path, "rb") as file:
        state = os.fstat(file.fileno())
        try:
            with safe_open(path, "np") as checked:
                metadata = checked.metadata() or {}
        except SafetensorError as error:
            raise _damaged(path, f"no safetensors file: {error}") from error
        first = 8 + int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(first - 8))
    if PIECES in metadata:
        raise StorageError(
            f"{str(path)!r} holds parts of tensors: join them with torch.distributed.checkpoint's "
            "consolidate_safetensors_files_on_every_rank."
        )
    entries.pop(METADATA, None)
    tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in DTYPES:
            raise StorageError(
                f"{name!r} of {str(path)!r} is of dtype {entry['dtype']!r}: cast it."
            )
        spec = Spec(tuple(entry["shape"]), DTYPES[entry["dtype"]])
        tensors[name] = Located(spec, first + entry["data_offsets"][0])
    return Header(tensors, metadata, state.st_size, state.st_mtime_ns)


def write_header(tensors: dict[str, Spec], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    """The header of a file that holds these tensors in this order, and where each will begin."""
    entries: dict[str, Any] = {METADATA: metadata}
    starts, end = [], 0
    for name, spec in tensors.items():
        starts.append(end)
        end += spec.nbytes
        entries[name] = {
            "dtype": CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [starts[-1], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers begin where processors like it
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + start for start in starts]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        StorageError: not there, or no JSON object.
    """
    with reading(path):
        return parse_json(path.read_bytes(), path)


def parse_json(text: str | bytes, path: Path) -> dict[str, Any]:
    """The JSON object in a text that stood in ``path``."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"no JSON document: {error}") from error
    if not isinstance(document, dict):
        raise _damaged(path, f"no JSON document with names: a {type(document).__name__}")
    return document


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A failure to read, as an error of ours."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error


def _damaged(path: Path, reason: str) -> StorageError:
    return StorageError(f"{str(path)!r} is truncated or damaged ({reason}). {AGAIN}")

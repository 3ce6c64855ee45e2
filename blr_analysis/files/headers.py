"""The header of a safetensors file: what lies where, believed only if all of it adds up.

A file is 8 bytes (the length n of the header, little-endian), n bytes of JSON (tensor name →
dtype, shape, data_offsets) and the numbers, without holes. The offsets are needed to read pieces
of tensors without mapping the file into memory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
LONGEST = 100_000_000  # bytes of header, the format's own limit
METADATA = "__metadata__"
AGAIN = "Download or copy the file again."


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies: the byte of the file at which it begins."""

    spec: Spec
    offset: int


@dataclass(frozen=True)
class Header:
    """A file's tensors, in the order of their bytes, and its metadata."""

    tensors: dict[str, Stored]
    metadata: dict[str, str]
    size: int
    modified_ns: int


def read_header(path: Path) -> Header:
    """The header of one file.

    Raises:
        StorageError: not there, truncated, longer than its header says, or malformed: unknown
            dtypes, names that stand twice, offsets with holes, overlaps, or of the wrong size.
    """
    try:
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if state.st_size < 8 or not 2 <= length <= min(LONGEST, state.st_size - 8):
                raise _damaged(path, f"its {state.st_size} bytes have no header of {length} bytes")
            text = file.read(length)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
    entries = parse_json(text, path)
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, "its metadata are no texts by name")
    tensors = _placed(entries, 8 + length, state.st_size, path)
    return Header(tensors, metadata, state.st_size, state.st_mtime_ns)


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """One JSON object, in which no name stands twice."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            names = [name for name, _ in items]
            twice = sorted({n for n in names if names.count(n) > 1})
            raise _damaged(path, f"the name {twice[0]!r} stands in it twice")
        return found

    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"no JSON: {error}") from error
    if not isinstance(document, dict):
        raise _damaged(path, f"a {type(document).__name__} where names are expected")
    return document


def _placed(entries: dict[str, Any], first: int, size: int, path: Path) -> dict[str, Stored]:
    found = sorted(
        ((_span(name, entry, path), name) for name, entry in entries.items()),
        key=lambda item: (item[0][1], item[0][2]),
    )
    tensors, end = {}, 0
    for (spec, start, stop), name in found:
        if start != end:
            raise _damaged(path, f"{name!r} begins at byte {start} of the data, not at {end}")
        tensors[name] = Stored(spec, first + start)
        end = stop
    if first + end != size:
        what = "truncated" if first + end > size else "longer than its tensors"
        raise _damaged(path, f"{what}: {size} bytes where the header asks for {first + end}")
    return tensors


def _span(name: str, entry: Any, path: Path) -> tuple[Spec, int, int]:
    try:
        code, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"{name!r} lacks dtype, shape or data_offsets") from error
    whole = isinstance(shape, list) and all(
        type(n) is int and n >= 0 for n in (*shape, start, stop)
    )
    if not whole:
        raise _damaged(path, f"{name!r} has an impossible shape or place: {shape}, {start}, {stop}")
    if not isinstance(code, str) or code not in DTYPES:
        raise StorageError(
            f"{name!r} of {str(path)!r} is of dtype {code!r}, which cannot be read here: expected "
            f"one of {', '.join(DTYPES)}."
        )
    spec = Spec(tuple(shape), DTYPES[code])
    if spec.nbytes != stop - start:
        raise _damaged(
            path, f"{name!r} ({code} {shape}) takes {spec.nbytes} bytes, placed in {stop - start}"
        )
    return spec, start, stop


def _damaged(path: Path, reason: str) -> StorageError:
    kind = "index" if path.suffix == ".json" else "safetensors file"
    return StorageError(f"{str(path)!r} is truncated or is no {kind} ({reason}). {AGAIN}")

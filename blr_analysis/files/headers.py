"""The header of a safetensors file: what lies where. The safetensors library checks it first.

A file is 8 bytes (the length n of the header, little-endian), n bytes of JSON (tensor name →
dtype, shape, data_offsets) and the numbers, without holes. With the offsets, pieces of tensors are
read and written in place. A mapping of the file into memory would do too, but systems count its
pages as memory in use.
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
from blr_analysis.files.checksums import DIGITS, ZEROS, is_stamped, stamped
from blr_analysis.files.source import Spec

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
METADATA = "__metadata__"
CHECKSUM = "checksum"  # of the text that it stands in
CHECKSUMS = "checksums"  # in a header: of the tensors, in the order of their names
FILES = "files"  # in a record: the checksums of the files beside it
RECORD = "record"  # in a header: the name of the record beside it, which lists the file
PIECES = "DCP_SHARDING_INFO"  # of torch.distributed.checkpoint, in files with parts of tensors
AGAIN = "copy or save it again"


class Header(NamedTuple):
    """The header of a file.

    Attributes:
        tensors: shape, dtype and first byte of each tensor, in the order of the file.
        metadata: texts by name.
        state: the file's size and time of change.
        checksum: of the header itself; "" if another program wrote the file.
        checksums: of the tensors, by name; empty if another program wrote the file.
    """

    tensors: dict[str, tuple[Spec, int]]
    metadata: dict[str, str]
    state: tuple[int, int]
    checksum: str
    checksums: dict[str, str]


def read_header(path: Path) -> Header:
    """The header of one file, compared with its own checksum.

    Raises:
        StorageError: a file that is missing, truncated, malformed or damaged, a dtype that torch
            lacks, or parts of tensors that several processes wrote.
    """
    with reading(path), open(path, "rb") as file:
        state = state_of(file.fileno())
        with safe_open(path, "np") as checked_file:
            metadata = checked_file.metadata() or {}
        length = file.read(8)
        text = file.read(int.from_bytes(length, "little"))
        entries = json.loads(text)
    entries.pop(METADATA, None)
    if PIECES in metadata:
        raise StorageError(
            f"{str(path)!r} holds parts of tensors: join them with torch.distributed.checkpoint."
        )
    unknown_dtypes = {entry["dtype"] for entry in entries.values()} - DTYPES.keys()
    if unknown_dtypes:
        raise StorageError(
            f"{str(path)!r} holds numbers of dtype {some(sorted(unknown_dtypes))}: cast them."
        )
    tensors = _placed(entries, first_byte=len(length) + len(text))
    checksum = metadata.pop(CHECKSUM, "")
    digests = metadata.pop(CHECKSUMS, None)
    if not checksum and digests is None:
        return Header(tensors, metadata, state, "", {})
    if digests is None or not is_stamped(length + text):
        raise StorageError(damaged(path))
    checksums = {}
    for k, name in enumerate(sorted(tensors)):
        checksums[name] = digests[k * DIGITS : (k + 1) * DIGITS]
    return Header(tensors, metadata, state, checksum, checksums)


def _placed(entries: Mapping[str, Any], first_byte: int) -> dict[str, tuple[Spec, int]]:
    """Each tensor's spec and its first byte in the file, in the order in which they lie there."""
    by_offset = sorted((entry["data_offsets"][0], name) for name, entry in entries.items())
    tensors = {}
    for offset, name in by_offset:
        entry = entries[name]
        spec = Spec(tuple(entry["shape"]), DTYPES[entry["dtype"]])
        tensors[name] = (spec, first_byte + offset)
    return tensors


def damaged(path: Path) -> str:
    """The words of an error about a file that is not as it was written."""
    return f"{str(path)!r} is damaged: it is not what was saved; {AGAIN}."


def state_of(file: int) -> tuple[int, int]:
    """The size of an open file in bytes, and the time of its last change in nanoseconds."""
    state = os.fstat(file)
    return state.st_size, state.st_mtime_ns


def write_header(
    specs: Mapping[str, Spec],
    metadata: Mapping[str, str],
    checksums: Mapping[str, str] | None = None,
) -> tuple[bytes, dict[str, int]]:
    """The header of a file of these tensors, and the byte at which each begins.

    Wide numbers come first, so that each tensor begins at a multiple of its numbers' size. With
    ``checksums`` of the tensors, the header holds them and its own.
    """
    entries: dict[str, Any] = {}
    end = 0
    widest_first = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    for name in widest_first:
        spec = specs[name]
        begin = end
        end = begin + spec.nbytes
        entries[name] = {
            "dtype": CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    texts = dict(metadata)
    if checksums is not None:
        texts[CHECKSUMS] = "".join(checksums[name] for name in sorted(checksums))
        texts[CHECKSUM] = ZEROS
    document = {METADATA: texts, **entries}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers begin where processors like it
    head = len(text).to_bytes(8, "little") + text
    if checksums is not None:
        head = stamped(head)
    starts = {name: len(head) + entry["data_offsets"][0] for name, entry in entries.items()}
    return head, starts


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; one with a checksum is compared with it.

    Raises:
        StorageError: not there, no JSON object, or damaged.
    """
    with reading(path):
        text = path.read_bytes()
    document = parse_json(text, path)
    if (CHECKSUM in document or FILES in document) and not is_whole(document, text):
        raise StorageError(damaged(path))
    return document


def read_record(path: Path) -> dict[str, Any]:
    """What :func:`record_text` was given, without the checksums.

    Raises:
        StorageError: as :func:`read_json`.
    """
    return plain_record(read_json(path))


def plain_record(document: Mapping[str, Any]) -> dict[str, Any]:
    """A record without its checksums."""
    return {key: value for key, value in document.items() if key not in (FILES, CHECKSUM)}


def is_whole(document: Mapping[str, Any], text: bytes) -> bool:
    """Whether a record of this package is the one that was written."""
    has_all = CHECKSUM in document and isinstance(document.get(FILES), dict)
    return has_all and is_stamped(text)


def record_text(document: Mapping[str, Any], files: Mapping[str, str] | None = None) -> str:
    """A record as JSON, with the checksums of the ``files`` beside it and its own."""
    content = {**document, FILES: dict(files or {}), CHECKSUM: ZEROS}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    return stamped(text.encode()).decode()


def parse_json(text: str | bytes, path: Path) -> dict[str, Any]:
    """The JSON object in a text that stood in ``path``."""
    with reading(path):
        return {**json.loads(text)}


def reading(path: Path) -> AbstractContextManager[None]:
    """A context that turns every failure to read a file into an error of this package."""
    return told_as(StorageError, f"cannot read {str(path)!r} (truncated or damaged?)", AGAIN)

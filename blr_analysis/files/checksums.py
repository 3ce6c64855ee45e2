"""Checksums of tensors and files, which are quick and notice the faults of disks and copies.

The bytes are read as 64-bit words, row by row, in rows of 1,021 words. The words of each column are
added modulo 2⁶⁴. The checksum is the SHA-256 of the 1,021 sums and of the number of bytes.

* A change inside of 8,168 bytes, such as a flipped bit, changes a sum for certain.
* Any other change is missed by chance alone, once in 2⁶⁴ such changes.
* Pages that change places change columns, since two pages have 1,024 words and a row 1,021.

The checksum takes pieces in any order, and is computed twenty times as fast as SHA-256. It is no
signature: it does not stop a forger.

Text files (JSON, and the header of a safetensors file) contain their own SHA-256, computed while
zeros stand in its place. A second entry beside it shows that there must be one, so that a flipped
bit in the name of the first does not hide it.

    >>> text = stamped(b'{"n_data": 10, "files": {}, "checksum": "%s"}' % ZEROS.encode())
    >>> is_stamped(text), is_stamped(text.replace(b"10", b"11"))
    (True, False)
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WORD = 8  # bytes
COLUMNS = 1021
ROW = WORD * COLUMNS
PIECE = 64 * ROW  # bytes that are read at a time; few enough to be in the cache when they are added
DIGITS = 16  # hexadecimal digits of a tensor's or a file's checksum
ZEROS = "0" * 64  # what stands in the place of a SHA-256 while it is computed
STAMP = re.compile(rb'"checksum": ?"([0-9a-f]{64})"')


class Checksum:
    """The checksum of bytes that arrive in pieces.

    >>> checksum = Checksum()
    >>> checksum.add(b"and some", start=8)
    >>> checksum.add(b"8 bytes ", start=0)
    >>> checksum.hexdigest() == checksum_of(b"8 bytes and some")
    True
    """

    def __init__(self, length: int = 0) -> None:
        self._sums: NDArray[np.uint64] = np.zeros(COLUMNS, dtype=np.uint64)
        self._length = length  # of all bytes: as announced, or up to the last byte so far

    def add(self, piece: bytes | memoryview, start: int | None = None) -> None:
        """Add bytes that begin at byte ``start``, a multiple of 8.

        Without ``start`` they begin where the last piece ended. Only the piece at the end may have
        a length that is no multiple of 8.
        """
        if start is None:
            start = self._length
        size = len(piece)
        whole_rows = size - size % ROW
        rows = np.frombuffer(piece, np.uint64, count=whole_rows // WORD).reshape(-1, COLUMNS)
        sums = np.add.reduce(rows, axis=0)
        if size > whole_rows:
            last_row = bytes(piece[whole_rows:])
            n_missing = -len(last_row) % WORD
            words = np.frombuffer(last_row + bytes(n_missing), np.uint64)
            sums[: len(words)] += words
        first_column = start // WORD % COLUMNS
        self._sums += np.roll(sums, first_column) if first_column else sums
        self._length = max(self._length, start + size)

    def add_anywhere(self, piece: bytes | memoryview, start: int) -> None:
        """Add bytes that begin and end anywhere, with zeros for the missing bytes of their words.

        No byte may be added twice.
        """
        n_before = start % WORD  # bytes of the first word that are not in this piece
        if n_before == 0:
            self.add(piece, start)
            return
        n_in_first_word = WORD - n_before
        first_word = bytes(n_before) + bytes(piece[:n_in_first_word])
        self.add(first_word, start - n_before)
        self.add(piece[n_in_first_word:], start + n_in_first_word)

    def join(self, part: Checksum) -> None:
        """Add the bytes of another checksum."""
        self._sums += part._sums
        self._length = max(self._length, part._length)

    def hexdigest(self) -> str:
        """Sixteen hexadecimal digits."""
        text = self._sums.astype("<u8").tobytes() + self._length.to_bytes(8, "little")
        return hashlib.sha256(text).hexdigest()[:DIGITS]


class Range(NamedTuple):
    """Bytes of a tensor from ``start`` to ``end`` and their checksum."""

    start: int
    end: int
    checksum: Checksum


class Pieces:
    """The checksums of a tensor's pieces, which threads read in any order, until all are there.

    A piece that is read again counts once, and must have the same bytes. A range that was read is
    forgotten where a piece of another length overlaps it.

    Args:
        expected: the checksum of the whole tensor.
        nbytes: the size of the tensor.
    """

    def __init__(self, expected: str, nbytes: int) -> None:
        self.expected = expected
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._ranges: list[Range] = []  # what was read, without overlaps
        self._digests: dict[tuple[int, int], str] = {}  # of the pieces in these ranges

    def add(self, part: Checksum, start: int, end: int) -> bool:
        """Add the bytes from ``start`` to ``end``, whose checksum is ``part``.

        Returns:
            False if the piece was read before with other bytes, or if all pieces are there and
            their checksum is wrong; True in any other case.
        """
        digest = part.hexdigest()
        with self._lock:
            if (start, end) in self._digests:
                return self._digests[start, end] == digest
            self._forget_overlaps(start, end)
            self._digests[start, end] = digest
            self._ranges = _with_range(self._ranges, Range(start, end, part))
            nbytes_read = sum(span.end - span.start for span in self._ranges)
            if nbytes_read < self._nbytes:
                return True
            total = Checksum()
            for span in self._ranges:
                total.join(span.checksum)
            self._ranges = []
            self._digests = {}
            return total.hexdigest() == self.expected

    def _forget_overlaps(self, start: int, end: int) -> None:
        """Forget the ranges that have bytes between ``start`` and ``end``, and their pieces."""
        for span in self._ranges:
            overlaps = span.start < end and start < span.end
            if overlaps:
                self._ranges = [other for other in self._ranges if other is not span]
                self._digests = {
                    (first, last): digest
                    for (first, last), digest in self._digests.items()
                    if last <= span.start or span.end <= first
                }


def _with_range(ranges: Sequence[Range], latest: Range) -> list[Range]:
    """The ranges with the latest one, which is joined to the range that it continues."""
    separate = []
    for earlier in ranges:
        is_continued = earlier.end == latest.start
        if is_continued:
            latest.checksum.join(earlier.checksum)
            latest = Range(earlier.start, latest.end, latest.checksum)
        else:
            separate.append(earlier)
    return [*separate, latest]


def checksum_of(content: bytes | memoryview) -> str:
    """The checksum of bytes in memory."""
    checksum = Checksum()
    for start in range(0, len(content), PIECE):
        checksum.add(content[start : start + PIECE])
    return checksum.hexdigest()


def checksum_of_file(path: Path) -> str:
    """The checksum of all bytes of a file."""
    checksum = Checksum()
    buffer = memoryview(bytearray(PIECE))
    with open(path, "rb") as file:
        while count := file.readinto(buffer):
            checksum.add(buffer[:count])
    return checksum.hexdigest()


def stamped(text: bytes) -> bytes:
    """The text with its own SHA-256 in place of the zeros after the last ``"checksum":``."""
    return _with_digest(text, hashlib.sha256(text).hexdigest())


def is_stamped(text: bytes) -> bool:
    """Whether a text is the one that :func:`stamped` made."""
    stamp = _last_stamp(text)
    if stamp is None:
        return False
    digest = stamp[1].decode()
    text_before = _with_digest(text, ZEROS)
    return hashlib.sha256(text_before).hexdigest() == digest


def _with_digest(text: bytes, digest: str) -> bytes:
    """The text with this digest after its last ``"checksum":``."""
    stamp = _last_stamp(text)
    assert stamp is not None, "the text has a place for its checksum"
    return text[: stamp.start(1)] + digest.encode() + text[stamp.end(1) :]


def _last_stamp(text: bytes) -> re.Match[bytes] | None:
    """The last checksum in a text; earlier ones belong to texts that it quotes."""
    stamps = list(STAMP.finditer(text))
    return stamps[-1] if stamps else None

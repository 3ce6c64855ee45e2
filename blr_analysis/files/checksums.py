"""Checksums of tensors and files: quick, and sure to notice the faults of disks and copies.

The bytes are read as 64-bit words, row by row, in rows of 1,021 words. The words of each column are
added modulo 2⁶⁴. The checksum is the SHA-256 of the 1,021 sums and of the number of bytes.

* A change inside of 8,168 bytes, such as a flipped bit, changes a sum for certain.
* Any other change is missed by chance alone, once in 2⁶⁴ such changes.
* Pages that change places change columns, since two pages have 1,024 words and a row 1,021.

It is as fast as a processor's cache, twenty times as fast as SHA-256, and takes pieces in any
order. It is no signature: it does not stop a forger.

Text files (JSON, and the header of a safetensors file) carry their own SHA-256, computed while
zeros stand in its place, and a second entry. One flipped bit cannot hide both.

    >>> text = stamped(b'{"n_data": 10, "files": {}, "checksum": "%s"}' % ZEROS.encode())
    >>> is_stamped(text), is_stamped(text.replace(b"10", b"11"))
    (True, False)
"""

from __future__ import annotations

import hashlib
import re
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WORD = 8  # bytes
COLUMNS = 1021
ROW = WORD * COLUMNS
PIECE = 64 * ROW  # bytes that are read and added at a time, so that they are still in the cache
DIGITS = 16  # hexadecimal, of a tensor's or a file's checksum
ZEROS = "0" * 64
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
        self._length = length  # of all bytes, if it is known before they arrive

    def add(self, piece: bytes | memoryview, start: int | None = None) -> None:
        """Add bytes that begin at byte ``start``, a multiple of 8.

        Without ``start`` they begin where the last piece ended. Only the piece at the end may have
        a length that is no multiple of 8.
        """
        first = self._length if start is None else start
        size = len(piece)
        whole_rows = size - size % ROW
        rows = np.frombuffer(piece, np.uint64, count=whole_rows // WORD).reshape(-1, COLUMNS)
        sums = np.add.reduce(rows, axis=0)
        if size > whole_rows:
            last_row = bytes(piece[whole_rows:])
            zeros = bytes(-len(last_row) % WORD)
            words = np.frombuffer(last_row + zeros, np.uint64)
            sums[: len(words)] += words
        column = first // WORD % COLUMNS
        self._sums += np.roll(sums, column) if column else sums
        self._length = max(self._length, first + size)

    def add_anywhere(self, piece: bytes | memoryview, start: int) -> None:
        """Add bytes that begin and end anywhere. Zeros fill their first and last word.

        No byte may be added twice.
        """
        fill = start % WORD
        if not fill:
            self.add(piece, start)
            return
        in_first_word = WORD - fill
        self.add(bytes(fill) + bytes(piece[:in_first_word]), start - fill)
        self.add(piece[in_first_word:], start + in_first_word)

    def join(self, part: Checksum) -> None:
        """Add the bytes of another checksum."""
        self._sums += part._sums
        self._length = max(self._length, part._length)

    def hexdigest(self) -> str:
        """Sixteen hexadecimal digits."""
        text = self._sums.astype("<u8").tobytes() + self._length.to_bytes(8, "little")
        return hashlib.sha256(text).hexdigest()[:DIGITS]


class Pieces:
    """The check of a tensor that is read in pieces, by any threads and in any order.

    A piece that is read again counts once, as it was read last.

    Args:
        expected: the checksum of the whole tensor.
        nbytes: its size.
    """

    def __init__(self, expected: str, nbytes: int) -> None:
        self.expected = expected
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int, Checksum]] = []

    def add(self, part: Checksum, start: int, end: int) -> bool:
        """Add the bytes from ``start`` to ``end``.

        Returns:
            False if all pieces are there and their checksum is wrong; True in any other case.
        """
        with self._lock:
            ranges = []
            for first, last, checksum in self._ranges:
                if last == start:  # this piece continues that range
                    part.join(checksum)
                    start = first
                elif last < start or end <= first:
                    ranges.append((first, last, checksum))
            self._ranges = [*ranges, (start, end, part)]
            if sum(last - first for first, last, _ in self._ranges) < self._nbytes:
                return True
            total = Checksum()
            for _, _, checksum in self._ranges:
                total.join(checksum)
            self._ranges = []
            return total.hexdigest() == self.expected


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
    """A text with its own SHA-256, which replaces the zeros after the last ``"checksum":``."""
    return _with_digest(text, hashlib.sha256(text).hexdigest())


def is_stamped(text: bytes) -> bool:
    """Whether a text is the one that :func:`stamped` made."""
    place = _last(text)
    if place is None:
        return False
    plain = _with_digest(text, ZEROS)
    return hashlib.sha256(plain).hexdigest() == place[1].decode()


def _with_digest(text: bytes, digest: str) -> bytes:
    """The text with this digest after its last ``"checksum":``."""
    place = _last(text)
    assert place is not None, "the text has a place for its checksum"
    return text[: place.start(1)] + digest.encode() + text[place.end(1) :]


def _last(text: bytes) -> re.Match[bytes] | None:
    """The place of the last checksum in a text; earlier ones belong to texts that it quotes."""
    places = list(STAMP.finditer(text))
    return places[-1] if places else None

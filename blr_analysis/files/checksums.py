"""Checksums of tensors and files: quick to take, and sure to see what disks and copies do.

The bytes are read as 64-bit words, row by row, in rows of 1,021 words. The words of each column are
added modulo 2⁶⁴. The checksum is the SHA-256 of the 1,021 sums and of the number of bytes.

* A change inside of 8,168 bytes, such as a flipped bit, changes a sum for certain.
* Any other change is missed by chance alone, once in 2⁶⁴ such changes.
* Pages that change places change columns, since two pages have 1,024 words and a row 1,021.

It takes the time that a processor's cache takes, a twentieth of what SHA-256 takes, and it may be
taken piece by piece in any order. It is no signature: whoever wants to deceive can.

Text files (JSON, and the header of a safetensors file) carry the SHA-256 of their own text, in
which zeros stand in its place, and a second entry. One flipped bit cannot hide both.

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
        self._length = length  # of all bytes, where it is known before

    def add(self, piece: bytes | memoryview, start: int | None = None) -> None:
        """Add bytes that begin at byte ``start``, a multiple of 8; None: where the last ended.

        Only the last piece may have a length that is no multiple of 8.
        """
        first = self._length if start is None else start
        size = len(piece)
        whole_rows = size - size % ROW
        rows = np.frombuffer(piece, np.uint64, count=whole_rows // WORD).reshape(-1, COLUMNS)
        sums = np.add.reduce(rows, axis=0)
        if size > whole_rows:
            rest = bytes(piece[whole_rows:])
            words = np.frombuffer(rest + bytes(-len(rest) % WORD), np.uint64)
            sums[: len(words)] += words
        column = first // WORD % COLUMNS
        self._sums += np.roll(sums, column) if column else sums
        self._length = max(self._length, first + size)

    def add_anywhere(self, piece: bytes | memoryview, start: int) -> None:
        """Add bytes that begin at any byte and end at any: zeros fill their first and last word,
        and bytes of others do not overlap with them."""
        fill = start % WORD
        if not fill:
            self.add(piece, start)
            return
        in_first_word = WORD - fill
        self.add(bytes(fill) + bytes(piece[:in_first_word]), start - fill)
        self.add(piece[in_first_word:], start + in_first_word)

    def join(self, part: Checksum) -> None:
        """Add the bytes that another was made of."""
        self._sums += part._sums
        self._length = max(self._length, part._length)

    def hexdigest(self) -> str:
        """Sixteen hexadecimal digits."""
        text = self._sums.astype("<u8").tobytes() + self._length.to_bytes(8, "little")
        return hashlib.sha256(text).hexdigest()[:DIGITS]


class Pieces:
    """Whether a tensor is whole that is read in pieces, by any threads and in any order.

    What is read again counts once, as it was read last.
    """

    def __init__(self, wanted: str, nbytes: int) -> None:
        self.wanted = wanted
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int, Checksum]] = []

    def add(self, part: Checksum, start: int, end: int) -> bool:
        """Add the bytes from ``start`` to ``end``; False where all are there and one is wrong."""
        with self._lock:
            ranges = []
            for first, last, checksum in self._ranges:
                if last == start:  # and grows by this piece
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
            return total.hexdigest() == self.wanted


def checksum_of(content: bytes | memoryview) -> str:
    """The checksum of bytes that are all there."""
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
    """A text with its own SHA-256 in the place of the zeros after the last ``"checksum":``."""
    return _with_digest(text, hashlib.sha256(text).hexdigest())


def is_stamped(text: bytes) -> bool:
    """Whether a text is the one that :func:`stamped` made."""
    place = _last(text)
    if place is None:
        return False
    plain = _with_digest(text, ZEROS)
    return hashlib.sha256(plain).hexdigest() == place[1].decode()


def _with_digest(text: bytes, digest: str) -> bytes:
    place = _last(text)
    assert place is not None, "the text has a place for its checksum"
    return text[: place.start(1)] + digest.encode() + text[place.end(1) :]


def _last(text: bytes) -> re.Match[bytes] | None:
    """The last checksum in a text; those before it belong to what the text quotes."""
    places = list(STAMP.finditer(text))
    return places[-1] if places else None

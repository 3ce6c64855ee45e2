"""Counts of words in documents: read, checked, and cut into blocks of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blr_analysis.errors import DataError

WASTE = 1 << 14
"""Entries of a block's table of words by topics that may be padding."""
MOST = 1 << 20
"""Entries of a block's table."""


@dataclass(frozen=True)
class Counts:
    """A sparse matrix of counts by its rows.

    Attributes:
        starts: ``[N + 1]``; the entries of document d are ``starts[d]`` to ``starts[d + 1]``.
        words: columns, ``[nnz]``.
        counts: ``[nnz]``.
        n_words: V, the size of the vocabulary.
    """

    starts: Tensor
    words: Tensor
    counts: Tensor
    n_words: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def totals(self) -> Tensor:
        """Words of each document, ``[N]``."""
        return sums(self.starts, self.counts)

    @property
    def lengths(self) -> Tensor:
        """Entries of each document, ``[N]``."""
        return self.starts.diff()

    @cached_property
    def _padded(self) -> tuple[Tensor, Tensor]:
        """Words and counts, and at the end an entry for what is padded."""
        return tuple(torch.cat([t, t.new_zeros(1)]) for t in (self.words, self.counts))  # type: ignore[return-value]

    def blocks(self, rows: Tensor, n_topics: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Blocks of documents: positions in ``rows`` ``[D]``, words and counts ``[D, L]``.

        Documents come by length; what is padded has the word 0 and the count 0.
        """
        lengths, order = self.lengths[rows].sort(stable=True)
        starts, (words, counts) = self.starts[rows[order]], self._padded
        for part in _similar(lengths.tolist(), WASTE // n_topics, MOST // n_topics):
            place = torch.arange(int(lengths[part.stop - 1]))
            entry = starts[part].unsqueeze(1) + place
            entry.masked_fill_(place >= lengths[part].unsqueeze(1), len(self.words))
            yield order[part], gather(words, entry), gather(counts, entry)


def _similar(sizes: list[int], waste: int, most: int) -> Iterator[slice]:
    """Rising sizes in slices that, once padded to their largest, waste little and hold little.

    >>> list(_similar([1, 2, 2, 9, 9, 9], 2, 20))
    [slice(0, 3, None), slice(3, 5, None), slice(5, 6, None)]
    """
    begin, padding = 0, 0
    for at in range(1, len(sizes)):
        padding += (at - begin) * (sizes[at] - sizes[at - 1])
        if padding > waste or (at + 1 - begin) * sizes[at] > most:
            yield slice(begin, at)
            begin, padding = at, 0
    yield slice(begin, len(sizes))


def gather(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]``, by the faster way."""
    return table.index_select(0, index.flatten()).view(*index.shape, *table.shape[1:])


def read_counts(counts: Any, dtype: torch.dtype, n_words: int | None = None) -> Counts:
    """Sparse counts, checked.

    Args:
        counts: ``[N, V]``: anything with SciPy's ``tocsr()``, a tensor or an array; or counts
            that have been read.
        dtype: of the counts from here on.
        n_words: V, where it is known.

    Raises:
        DataError: no matrix of numbers, another vocabulary, counts that are negative, not whole
            or not finite, or a document without words.
    """
    starts, words, values, size = _compressed(counts)
    if n_words is not None and size != n_words:
        raise DataError(
            f"counts have {size} words, but the topics were fitted on a vocabulary of {n_words}: "
            "count words by that vocabulary, in its order"
        )
    owner = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    for wrong, what in (
        (~torch.isfinite(values), "not finite"),
        (values < 0, "negative"),
        (values != values.round(), "not a whole number"),
    ):
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise DataError(
                f"the count of word {int(words[first])} in document {int(owner[first])} is {what}: "
                f"{float(values[first])!r}"
            )
    empty = (sums(starts, values) == 0).nonzero().flatten()
    if len(empty):
        raise DataError(
            f"{len(empty)} documents have no words (the first is document {int(empty[0])}): leave "
            "them out, they say nothing about topics"
        )
    return Counts(starts, words, values.to(dtype), size)


def sums(starts: Tensor, values: Tensor) -> Tensor:
    """The sum of each row's entries, ``[N]``."""
    owner = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    return values.new_zeros(len(starts) - 1).index_add_(0, owner, values)


def _compressed(counts: Any) -> tuple[Tensor, Tensor, Tensor, int]:
    """Starts, words, counts and the vocabulary's size; copies of what the caller holds."""
    if isinstance(counts, Counts):
        return counts.starts, counts.words, counts.counts, counts.n_words
    if hasattr(counts, "tocsr"):
        rows = counts.tocsr()
        shape = rows.shape
        starts, words = (
            torch.from_numpy(np.array(x, np.int64)) for x in (rows.indptr, rows.indices)
        )
        values = torch.from_numpy(np.array(rows.data, np.float64))
    else:
        matrix = counts if isinstance(counts, Tensor) else _array(counts)
        shape = matrix.shape
        if len(shape) != 2 or matrix.is_complex():
            raise DataError(f"counts must be a real matrix [N, V], got shape {tuple(shape)}")
        entries = matrix.detach().cpu().to_sparse_coo().coalesce()
        owner, words = entries.indices()
        starts = torch.cat([owner.new_zeros(1), owner.bincount(minlength=shape[0]).cumsum(0)])
        values = entries.values().double()
    if not shape[0] or shape[1] < 2:
        raise DataError(f"counts need a document and two words or more, got shape {tuple(shape)}")
    return starts, words, values, int(shape[1])


def _array(counts: Any) -> Tensor:
    """A tensor of what NumPy takes for an array of numbers."""
    try:
        array = np.asarray(counts)
        if array.dtype.kind in "biufc":
            return torch.as_tensor(array)
    except ValueError:  # rows of unequal lengths
        pass
    raise DataError(
        "counts must be a real matrix [N, V] of numbers, how often each word is in each document, "
        f"got {type(counts).__name__}; of texts, sklearn's CountVectorizer makes it"
    )

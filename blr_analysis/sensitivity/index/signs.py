"""Random signs, Hadamard's matrix, and products with signs that are stored as bits."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blr_analysis.backprop.terms import slices

MIX = 256  # places that Hadamard's matrix mixes; a multiple of a word's bits
SIDE = 16  # the root of MIX
WORD = 64  # bits that are compared at once
CACHED = 2**20  # bytes or numbers that are multiplied at once, so that they stay in the cache


def random_signs(count: int, seed: int = 0) -> Tensor:
    """±1, from the raw bits of PCG64, which are the same in all versions of NumPy.

    >>> random_signs(4).tolist()
    [-1, 1, -1, 1]
    """
    words = np.random.PCG64(seed).random_raw(-(-count // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8))
    return 2 * torch.from_numpy(bits[:count].astype(np.int8)) - 1


@cache
def hadamard(n: int) -> Tensor:
    """Sylvester's orthogonal matrix of ±1/√n, for a power of two.

    >>> hadamard(2) * 2**0.5
    tensor([[ 1.,  1.],
            [ 1., -1.]])
    """
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.kron(two, matrix)
    return matrix / n**0.5


def mixed(sums: Tensor, size: int) -> Tensor:
    """``size`` mixtures of sums ``[B, sums]``, ``[B, size]``: H s, H′ D H s, H D′ H′ D H s, …

    H mixes 256 places that are far apart, H′ 256 neighbours; D are random signs.
    """
    width = sums.shape[1]
    mixture = sums
    mixtures: list[Tensor] = []
    for nth in range(size // width):
        if nth > 0:
            mixture = mixture * random_signs(width, nth).to(mixture)
        mixture = _mixed_neighbours(mixture) if nth % 2 else _mixed_apart(mixture)
        mixtures.append(mixture)
    return torch.cat(mixtures, dim=1) / len(mixtures) ** 0.5


def _mixed_neighbours(sums: Tensor) -> Tensor:
    blocks = sums.view(len(sums), -1, MIX)
    return (blocks @ hadamard(MIX).to(sums)).flatten(1)


def _mixed_apart(sums: Tensor) -> Tensor:
    """H of 256 is the Kronecker product of H of 16 with itself."""
    count, width = sums.shape
    small = hadamard(SIDE).to(sums)
    outer = small @ sums.view(count, SIDE, -1)
    inner = small @ outer.view(count * SIDE, SIDE, -1)
    return inner.view(-1, width)


def bit_sums(bit_columns: list[Tensor], z: Tensor) -> Tensor:
    """Σ_k b_ik z_jk for stored bits b of 0 or 1 and numbers z ``[M, size]``, ``[n, M]``.

    Args:
        bit_columns: bytes ``[n, ...]`` whose bits side by side are the ``size`` columns.
    """
    sums = z.new_zeros(len(bit_columns[0]), len(z))
    start = 0
    for packed in bit_columns:
        stop = start + 8 * packed.shape[1]
        for rows in slices(len(packed), CACHED // (stop - start)):
            bits = torch.from_numpy(np.unpackbits(packed[rows].numpy(), axis=1))
            sums[rows] += bits.to(z.dtype) @ z[:, start:stop].mT
        start = stop
    return sums


def unequal_bits(bit_columns: list[Tensor], words: NDArray[np.uint64]) -> Tensor:
    """How many stored bits differ from those of the words ``[M, b, size / 64]``, ``[n, M, b]``.

    Args:
        bit_columns: bytes ``[n, ...]`` whose bits side by side are the first columns.
    """
    counts = np.zeros((len(bit_columns[0]), *words.shape[:2]), dtype=np.int64)
    start = 0
    for packed in bit_columns:
        stored = packed.numpy().view(np.uint64)
        stop = start + stored.shape[1]
        for rows in slices(len(stored), CACHED // packed.shape[1]):
            stored_words = stored[rows]
            for question, plane in np.ndindex(words.shape[:2]):
                differing = np.bitwise_count(stored_words ^ words[question, plane, start:stop])
                counts[rows, question, plane] += differing.sum(1, dtype=np.uint32)
        start = stop
    return torch.from_numpy(counts).double()


def words_of(planes: Tensor) -> NDArray[np.uint64]:
    """Truth values ``[M, b, size]`` as bits of words ``[M, b, size / 64]``."""
    return np.packbits(planes.numpy(), axis=2).view(np.uint64)

"""Questions in few bits, and what stored signs tell of them bit by bit.

An estimate ``[n, 2, M]`` is a value, and the standard deviation of what the value is off, as far as
the rounding makes it.

Sources: Gao & Long, "RaBitQ", 2024; Max, "Quantizing for minimum distortion", 1960 (the steps).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blr_analysis.sensitivity.index.compressed import (
    Compressed,
    Compression,
    Records,
    sign_columns,
)
from blr_analysis.sensitivity.index.signs import WORD, unequal_bits, words_of
from blr_analysis.sensitivity.influence.results import rooted

STEPS = {2: 0.996, 4: 0.335}  # that round normal numbers to so many bits with the least error


@dataclass(frozen=True)
class Rounded:
    """Questions whose z is rounded to few bits.

    Attributes:
        questions: the questions as they were.
        words: the bits of every number of z, ``[M, b, size / 64]``.
        unit: of the rounded numbers, ``[M]``.
        error: the standard deviation of what a value is off, for ‖r_i‖ = 1, ``[M]``.
    """

    questions: Compressed
    words: NDArray[np.uint64]
    unit: Tensor
    error: Tensor


def estimates(compression: Compression, records: Records, question: Rounded) -> Tensor:
    """Estimates of the influence of stored examples, ``[n, 2, M]``."""
    if question.words.shape[1] == 1:
        products = _by_angle(records, question)
    else:
        products = _by_planes(compression, records, question)
    errors = records["length"].to(products).unsqueeze(1) * question.error
    values = compression.with_lengths(records, question.questions, products)
    return torch.stack([values, errors], dim=1)


def rounded(compression: Compression, questions: Compressed, bits: int) -> Rounded:
    """z in one bit, its sign, as far as it is looked at first; or in 2 or 4."""
    if bits == 1:
        return _signs_alone(compression, questions)
    return _odd_numbers(compression, questions, bits)


def _signs_alone(compression: Compression, questions: Compressed) -> Rounded:
    """The standard deviation is that of a cosine, π / 2√K, and of the error of all signs."""
    z = questions.z[:, : compression.first_signs or compression.size]
    length = questions.z.norm(dim=1)
    variance = (math.pi / 2) ** 2 / z.shape[1] + math.pi / 2 / compression.size
    return Rounded(questions, words_of((z > 0).unsqueeze(1)), length, length * variance**0.5)


def _odd_numbers(compression: Compression, questions: Compressed, bits: int) -> Rounded:
    """z as odd numbers q, in such a unit that z − unit · q is at right angles with z: its products
    with signs, by which a value is off, are 0 on average."""
    z = questions.z
    levels = 2**bits
    step = STEPS[bits] * z.square().mean(1, keepdim=True).sqrt()
    level = (z / rooted(step.square()) + levels / 2).floor_().clamp_(0, levels - 1).int()
    odd = (2 * level - (levels - 1)).to(z)
    along = (z * odd).sum(1)  # 0 where z is
    unit = z.square().sum(1) / torch.where(along > 0, along, 1)
    left_over = (z - unit.unsqueeze(1) * odd).norm(dim=1)
    planes = torch.stack([(level >> bit & 1).bool() for bit in range(bits)], dim=1)
    return Rounded(questions, words_of(planes), unit, left_over * compression.sign_scale)


def _by_angle(records: Records, question: Rounded) -> Tensor:
    """Products with unit vectors from the first signs of either side: the share that differs is
    the angle over π."""
    counts = unequal_bits(sign_columns(records)[:1], question.words).squeeze(2)
    shares = counts / (WORD * question.words.shape[2])
    return (math.pi * shares).cos_().to(question.unit) * question.unit


def _by_planes(compression: Compression, records: Records, question: Rounded) -> Tensor:
    """Products with unit vectors from all signs and the bits of the question's numbers."""
    counts = unequal_bits(sign_columns(records), question.words)
    bits = question.words.shape[1]
    weights = 2.0 ** torch.arange(bits, dtype=counts.dtype)
    sums = compression.size * (2**bits - 1) - 2 * (counts @ weights)
    return sums.to(question.unit) * question.unit * compression.sign_scale

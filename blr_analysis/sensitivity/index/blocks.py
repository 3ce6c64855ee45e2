"""Blocks of 64 numbers: which of a gradient are longest, and their products with a question's.

A file holds the numbers of a block as whole numbers of 4 bits, −7 to 7, in a unit of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from blr_analysis.backprop.terms import slices
from blr_analysis.sensitivity.index.signs import CACHED

BLOCK = 64  # numbers of a block
BLOCK_BYTES = BLOCK // 2 + 8  # whole numbers of 4 bits, their unit, and the block's place
STEPS_UP = 7  # whole numbers from 0 to the largest
PAIRED = 2**24  # numbers of pairs of blocks at once, if all begin at the same place
HASHED = 2**20  # entries of a table that tells most blocks apart

Integers = NDArray[np.integer]


def split_blocks(w: Tensor) -> Tensor:
    """Numbers ``[b, n]`` as blocks ``[b, ⌈n / 64⌉, 64]``, the last filled up with zeros."""
    missing = -w.shape[1] % BLOCK
    filled = pad(w, (0, missing)) if missing else w
    return filled.unflatten(1, (-1, BLOCK))


def chosen_blocks(blocks: Tensor, choice: Tensor) -> Tensor:
    """Of blocks ``[B, n, 64]`` those of these numbers ``[B, k]``, ``[B, k, 64]``."""
    return blocks.gather(1, choice.unsqueeze(2).expand(-1, -1, BLOCK))


def packed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes ``[..., 32]`` and units ``[...]`` of blocks: the first half of a block's numbers is in
    the lower bits."""
    largest = blocks.abs().amax(2)
    units = largest.clamp_min(torch.finfo(torch.float32).tiny) / STEPS_UP
    whole = (blocks / units.unsqueeze(2)).round().to(torch.int8).add_(8).view(torch.uint8)
    low, high = whole.split(BLOCK // 2, dim=2)
    return low + 16 * high, units.float()


def unpacked(blocks: Tensor) -> Tensor:
    """Whole numbers of −7 to 7 of blocks as files hold them, ``[..., 64]``.

    >>> unpacked(torch.full((1, 32), 9 + 16 * 7, dtype=torch.uint8)).unique().tolist()
    [-1, 1]
    """
    return torch.cat([blocks & 15, blocks >> 4], dim=-1).view(torch.int8) - 8


@dataclass(frozen=True)
class BlockTable:
    """The blocks of some questions, in the order of the last bits of their places.

    Attributes:
        n_questions: how many questions.
        places: of every block, where it stands in w.
        questions: of every block, whose it is.
        blocks: the numbers, ``[n, 64]``.
        first: of every run of blocks with the same last bits, the first block.
        count: of every run, how many blocks it has.
        run_of: of all last bits, the number of their run.
        occurs: of all last bits, whether there is a run.
    """

    n_questions: int
    places: Integers
    questions: Integers
    blocks: Tensor
    first: Integers
    count: Integers
    run_of: Integers
    occurs: NDArray[np.bool_]

    @classmethod
    def of(cls, blocks: Tensor, places: Tensor) -> BlockTable:
        """Of blocks ``[M, k, 64]`` at these places ``[M, k]``."""
        n_questions, per_question = places.shape
        flat_places = places.flatten().numpy().astype(np.int32)
        order = _last_bits(flat_places).argsort(kind="stable")
        sorted_places = flat_places[order]
        bits, first, count = np.unique(
            _last_bits(sorted_places), return_index=True, return_counts=True
        )
        run_of = np.zeros(HASHED, dtype=np.int32)
        run_of[bits] = np.arange(len(bits))
        occurs = np.zeros(HASHED, dtype=bool)
        occurs[bits] = True
        return cls(
            n_questions,
            places=sorted_places,
            questions=order // max(1, per_question),
            blocks=blocks.flatten(0, 1)[torch.from_numpy(order)],
            first=first,
            count=count,
            run_of=run_of,
            occurs=occurs,
        )

    def pairs_with(self, places: Integers) -> tuple[Integers, Integers]:
        """Every pair of a block at one of these places with a block of a question at the same:
        the number of either."""
        bits = _last_bits(places)
        hits = np.flatnonzero(self.occurs.take(bits))
        runs = self.run_of.take(bits.take(hits))
        count = self.count.take(runs)
        stored = hits.repeat(count)  # with every block of the run
        place_in_run = np.arange(len(stored)) - (count.cumsum() - count).repeat(count)
        asked = self.first.take(runs).repeat(count) + place_in_run
        same = np.flatnonzero(places.take(stored) == self.places.take(asked))
        return stored.take(same), asked.take(same)


def _last_bits(places: Integers) -> Integers:
    return places & (HASHED - 1)


def common_products(records: Mapping[str, Tensor], table: BlockTable) -> Tensor:
    """v_iᵀ w_j over the blocks that a stored example and a question both have, ``[n, M]``."""
    n, per_example = records["places"].shape
    m = table.n_questions
    places = records["places"].flatten().numpy()
    units = records["units"].flatten().numpy()
    blocks = records["blocks"].flatten(0, 1).numpy()
    values = torch.zeros(n * m, dtype=table.blocks.dtype)
    for examples in slices(n, PAIRED // (m * per_example * BLOCK)):
        start = per_example * examples.start
        stop = per_example * examples.stop
        stored_blocks, asked_blocks = table.pairs_with(places[start:stop])
        for pairs in slices(len(stored_blocks), CACHED // BLOCK // 4):
            stored = stored_blocks[pairs] + start
            asked = asked_blocks[pairs]
            numbers = unpacked(torch.from_numpy(blocks.take(stored, axis=0))).to(values)
            question_numbers = table.blocks.index_select(0, torch.from_numpy(asked))
            products = torch.linalg.vecdot(numbers, question_numbers)
            entries = stored // per_example * m + table.questions.take(asked)
            scaled = products * torch.from_numpy(units.take(stored))
            values.index_add_(0, torch.from_numpy(entries), scaled)
    return values.view(n, m)

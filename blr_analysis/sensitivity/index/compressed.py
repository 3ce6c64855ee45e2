"""What an index keeps of a gradient w: all of it, or its longest blocks and signs of the rest.

Where there is room, w is stored whole. Elsewhere w = v + r. v are its longest blocks of 64 numbers,
which in a table of words are the words of the text, in 4 bits each. Of the rest r, K signs:

    z = H S r,    w_iᵀ w_j ≈ v_iᵀ w_j + ‖r_i‖ √(π / 2K) Σ_k sign(z_ik) z_jk

S adds up the numbers of r, with random signs, in K places (a count sketch), and H mixes these by
Hadamard's matrix, so that every z_k is nearly normal. A question's own z keeps its numbers, and
‖r_i‖ is exact. The error of a cosine is √(π / 2K), wherever gradients point: sixteen signs have a
third of the error of one sum in half precision. Whitened gradients of language models fill their
space, so that few directions hold little of any; but where a model trains its words, a hundredth of
the numbers holds two thirds of ‖w‖². How much of the room is for blocks: ``block_count.py``. Of a
question, z is of all of w_j, and more blocks are at hand, with which v_i is multiplied; left out is
v_iᵀ w_j elsewhere.

Sources: Charikar, Chen & Farach-Colton, "Finding frequent items in data streams", 2002; Jacques et
al., "Robust 1-bit compressive sensing via binary stable embeddings", 2013.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.structures.contract import Spectral
from blr_analysis.sensitivity.index.blocks import (
    BLOCK,
    BLOCK_BYTES,
    BlockTable,
    chosen_blocks,
    common_products,
    packed,
    split_blocks,
)
from blr_analysis.sensitivity.index.signs import CACHED, MIX, WORD, bit_sums, mixed
from blr_analysis.sensitivity.index.whitened import Roots, Tile, signed_roots
from blr_analysis.sensitivity.influence.results import rooted

FIRST_PART = 8  # one sign in so many lies apart, to be looked at first …
FIRST_LEAST = 2**14  # … where these are at least so many

Records = Mapping[str, Tensor]  # of some examples, what files hold, by name


@dataclass(frozen=True)
class Compressed:
    """Some w, compressed.

    Attributes:
        z: ``[B, size]``, of w without its blocks; of a question, of all of w.
        squares: ‖w‖², ``[B]``.
        blocks: the longest blocks of w, ``[B, blocks, 64]``.
        places: of each, the number of its first number in w, over 64, ``[B, blocks]``.
    """

    z: Tensor
    squares: Tensor
    blocks: Tensor
    places: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """All four, by name."""
        return {
            "z": self.z,
            "squares": self.squares,
            "blocks": self.blocks,
            "places": self.places,
        }

    def part(self, rows: slice) -> Compressed:
        """Some of these w."""
        return Compressed(self.z[rows], self.squares[rows], self.blocks[rows], self.places[rows])

    def over(self, lengths: Tensor) -> Compressed:
        """Every w divided by its length among these ``[B]``."""
        z = self.z / lengths.to(self.z).view(-1, 1)
        blocks = self.blocks / lengths.view(-1, 1, 1)
        return Compressed(z, self.squares / lengths.square(), blocks.to(z), self.places)

    @cached_property
    def block_table(self) -> BlockTable:
        """The blocks, where stored ones look for them."""
        return BlockTable.of(self.blocks, self.places)


@dataclass(frozen=True)
class Compression:
    """How w is compressed.

    Attributes:
        size: numbers of z, whose signs are stored; or of w, which is stored whole.
        signs: whether signs are stored.
        sums: places of S. They are mixed several times where there is room for more signs.
        blocks: blocks that are stored.
    """

    size: int
    signs: bool
    sums: int
    blocks: int

    @classmethod
    def of(cls, q: Posterior, rank: int, dtype: torch.dtype, blocks: int = 0) -> Compression:
        """The one that takes the room of ``rank`` numbers at most, with so many blocks."""
        assert isinstance(q.form, Spectral)
        parameters = sum(precision.numel() for precision in q.form.values.values())
        if parameters <= rank:
            return cls(parameters, signs=False, sums=parameters, blocks=0)
        bits = 8 * (dtype.itemsize * rank - BLOCK_BYTES * blocks)
        most_mixes = max(1, bits // MIX)
        sums = min(most_mixes, -(-parameters // MIX)) * MIX
        return cls(most_mixes * MIX // sums * sums, signs=True, sums=sums, blocks=blocks)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of an example on disk."""
        if self.signs:
            return self.size // 8 + BLOCK_BYTES * self.blocks
        return self.size * dtype.itemsize

    @property
    def first_signs(self) -> int:
        """Signs that lie apart and are looked at before the others; 0 where they are few."""
        count = self.size // FIRST_PART // WORD * WORD
        return count if self.signs and count >= FIRST_LEAST else 0

    def roots(self, q: Posterior) -> Roots:
        """Σ^½ of a posterior, with random signs; where signs are stored, matrices begin with a
        block."""
        return signed_roots(q, whole_blocks=self.signs)

    def empty(self, roots: Roots, block_factor: int = 1) -> Compressed:
        """No w at all, in the right shapes."""
        _, root = next(iter(roots.values()))
        like = root.cpu()
        sketch = Sketch.empty(0, self, like, block_factor)
        return Compressed(
            like.new_zeros(0, self.size), sketch.squares, sketch.blocks, sketch.places
        )

    def compressed(self, count: int, tiles: Iterable[Tile], *, block_factor: int = 1) -> Compressed:
        """So many w from their tiles, on the CPU.

        Args:
            block_factor: times as many blocks as are stored; above 1, where w is a question's,
                none of them is left out of z.
        """
        sketch: Sketch | None = None
        for tile in tiles:
            if sketch is None:
                sketch = Sketch.empty(count, self, tile.numbers, block_factor)
            sketch.add(tile)
        assert sketch is not None
        if block_factor == 1:
            sketch.leave_blocks_out()
        z = mixed(sketch.sums, self.size) if self.signs else sketch.sums
        return Compressed(z.cpu(), sketch.squares.cpu(), sketch.blocks.cpu(), sketch.places.cpu())

    def records(self, gradients: Compressed, dtype: torch.dtype) -> dict[str, Tensor]:
        """What files hold: unit vectors and lengths; or signs as bits, ‖r‖ and blocks."""
        if not self.signs:
            length = rooted(gradients.squares)
            units = gradients.z / length.to(gradients.z).view(-1, 1)
            return {"gradients": units.to(dtype), "length": length}
        bits = np.packbits((gradients.z > 0).numpy(), axis=1)
        first = self.first_signs // 8
        in_blocks = gradients.blocks.double().square().sum((1, 2))
        blocks, units = packed(gradients.blocks)
        records: dict[str, Tensor] = {}
        if first:
            records["first"] = torch.from_numpy(bits[:, :first].copy())
        records["gradients"] = torch.from_numpy(bits[:, first:].copy())
        records["length"] = (gradients.squares - in_blocks).clamp_min(0).sqrt()
        records["blocks"] = blocks
        records["units"] = units
        records["places"] = gradients.places.to(torch.int32)
        return records

    def values(self, records: Records, questions: Compressed) -> Tensor:
        """Influence of stored examples on the questions, ``[n, M]``."""
        return self.with_lengths(records, questions, self._products(records, questions.z))

    def with_lengths(self, records: Records, questions: Compressed, products: Tensor) -> Tensor:
        """Products ``[n, M]`` of unit vectors, times ‖r_i‖, plus those of the blocks."""
        values = products.mul_(records["length"].to(products).unsqueeze(1))
        if self.blocks == 0:
            return values
        return values + common_products(records, questions.block_table).to(values)

    def _products(self, records: Records, z: Tensor) -> Tensor:
        """Stored unit vectors, or signs in their place, times z of the questions, ``[n, M]``."""
        if not self.signs:
            parts = records["gradients"].split(max(1, CACHED // self.size))
            return torch.cat([part.to(z.dtype) @ z.mT for part in parts])
        signed_sums = 2 * bit_sums(sign_columns(records), z) - z.sum(1)
        return signed_sums * self.sign_scale

    @property
    def sign_scale(self) -> float:
        """√(π / 2K)."""
        return math.sqrt(math.pi / 2 / self.size)


def sign_columns(records: Records) -> list[Tensor]:
    """The stored signs as bits: those that lie apart, then the others."""
    return [records[name] for name in ("first", "gradients") if name in records]


@dataclass
class Sketch:
    """Some w, as far as their tiles have been seen.

    Attributes:
        sums: S w, ``[B, sums]``.
        squares: ‖w‖², ``[B]``.
        lengths: of the longest blocks, ``[B, blocks]``; −1 where there is none yet.
        blocks: their numbers, ``[B, blocks, 64]``.
        places: the number of each in w, ``[B, blocks]``.
    """

    sums: Tensor
    squares: Tensor
    lengths: Tensor
    blocks: Tensor
    places: Tensor

    @classmethod
    def empty(cls, count: int, compression: Compression, like: Tensor, block_factor: int) -> Sketch:
        """Of so many w, of which nothing has been seen."""
        longest = (count, block_factor * compression.blocks)
        return cls(
            sums=like.new_zeros(count, compression.sums),
            squares=like.new_zeros(count, dtype=torch.float64),
            lengths=like.new_full(longest, -1.0),
            blocks=like.new_zeros(*longest, BLOCK),
            places=torch.zeros(longest, dtype=torch.int64, device=like.device),
        )

    def add(self, tile: Tile) -> None:
        """See one more tile."""
        blocks = split_blocks(tile.numbers)
        lengths = torch.linalg.vector_norm(blocks, dim=2)
        self.squares[tile.examples] += lengths.double().square().sum(1)
        self._choose_longest(tile, blocks, lengths)
        self._add_up(tile)

    def leave_blocks_out(self) -> None:
        """Subtract the blocks from the sums, so that these are of the rest r."""
        width = self.sums.shape[1]
        numbers = torch.arange(BLOCK, device=self.sums.device)
        in_w = BLOCK * self.places.unsqueeze(2) + numbers
        self.sums.scatter_add_(1, (in_w % width).flatten(1), -self.blocks.flatten(1))

    def _add_up(self, tile: Tile) -> None:
        """S has as many places as ``sums``: number n of w goes to place n modulo these."""
        sums = self.sums[tile.examples]
        width = sums.shape[1]
        place = tile.start % width
        begin = 0
        while begin < tile.numbers.shape[1]:
            run = tile.numbers[:, begin : begin + width - place]
            sums[:, place : place + run.shape[1]] += run
            begin += run.shape[1]
            place = 0

    def _choose_longest(self, tile: Tile, blocks: Tensor, lengths: Tensor) -> None:
        """The longest of those so far and of the tile's."""
        before = self.lengths[tile.examples]
        count = before.shape[1]
        if count == 0 or not bool((lengths.amax(1) > before.amin(1)).any()):
            return
        new = lengths.topk(min(count, lengths.shape[1]), dim=1)
        longest = torch.cat([before, new.values], 1).topk(count, dim=1)
        new_blocks = chosen_blocks(blocks, new.indices)
        new_places = tile.start // BLOCK + new.indices
        both_blocks = torch.cat([self.blocks[tile.examples], new_blocks], 1)
        both_places = torch.cat([self.places[tile.examples], new_places], 1)
        self.lengths[tile.examples] = longest.values
        self.blocks[tile.examples] = chosen_blocks(both_blocks, longest.indices)
        self.places[tile.examples] = both_places.gather(1, longest.indices)

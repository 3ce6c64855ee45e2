"""What an index keeps of a gradient w: all of it, or its longest blocks and signs of the rest.

Where there is room, w is kept; elsewhere w = v + r: v are its longest blocks of 64 numbers, which
in a table of words are the words of the text, in 4 bits each; of the rest, K signs:

    z = H S r,    w_iᵀ w_j ≈ v_iᵀ w_j + ‖r_i‖ √(π / 2K) Σ_k sign(z_ik) z_jk

S adds up the numbers of r, with random signs, in K places (a count sketch), and H mixes these by
Hadamard's matrix, so that every z_k is nearly normal. A question's own z keeps its numbers, and
‖r_i‖ is exact. The error of a cosine is √(π / 2K), wherever gradients point: sixteen signs have a
third of the error of one sum in half precision. Whitened gradients of language models fill their
space, so that few directions hold little of any; but of one that trains its words, a hundredth of
the numbers hold two thirds of ‖w‖². As much of the room is for blocks as leaves least to the signs'
error, ‖r‖² / √K, in some examples: a quarter of it, little or nothing in an adapter. Of a question,
z is of all of w_j, and more blocks are at hand, with which v_i is multiplied; left out is v_iᵀ w_j
elsewhere.

Sources: Charikar, Chen & Farach-Colton, "Finding frequent items in data streams", 2002; Jacques et
al., "Robust 1-bit compressive sensing via binary stable embeddings", 2013; Max, "Quantizing for
minimum distortion", 1960 (the steps).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from blr_analysis import ranks
from blr_analysis.backprop.matrices import MatrixShape
from blr_analysis.backprop.terms import Term, slices
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.structures.contract import Spectral
from blr_analysis.sensitivity.influence.results import rooted

MIX = 256  # places that Hadamard's matrix mixes; a multiple of a word's bits
SIDE = 16  # its root
BLOCK, SHARES = 64, (1 / 16, 1 / 8, 1 / 4)  # numbers of a block; of the room, for blocks
HELD = BLOCK // 2 + 8  # bytes of one: whole numbers of 4 bits, their unit, and which it is
STEPS_UP = 7  # of these numbers, from 0 to the largest
TILE = 2**18  # numbers of gradients that are made and used at once, so that they stay in the cache
PAIRED = 2**24  # numbers of pairs of blocks at once, if all begin at the same place
HASHED = 2**20  # entries of a table that tells most blocks apart
CACHED = 2**20  # bytes or numbers that are multiplied at once, so that they stay in the cache
WORD = 64  # bits that are compared at once
PART, FIRST = 8, 2**14  # one sign in so many is looked at first, where these are as many as that
STEPS = {2: 0.996, 4: 0.335}  # that round normal numbers to so many bits with the least error

Kept = Mapping[str, Tensor]  # of some examples, as files hold it
Roots = Mapping[str, tuple[int, Tensor]]  # of every matrix: place of its first number, ±Σ^½


@dataclass(frozen=True)
class Compressed:
    """Of some w: z ``[B, size]``, ‖w‖² ``[B]``, and blocks ``[B, blocks, 64]`` with their numbers
    (``places``), by which z is less."""

    z: Tensor
    squares: Tensor
    blocks: Tensor
    places: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.z, self.squares, self.blocks, self.places))

    def part(self, chosen: slice) -> Compressed:
        """Some of them."""
        return Compressed(*(t[chosen] for t in self))

    def over(self, lengths: Tensor) -> Compressed:
        """Of w divided by these lengths."""
        z, blocks = self.z / lengths.to(self.z).view(-1, 1), self.blocks / lengths.view(-1, 1, 1)
        return Compressed(z, self.squares / lengths.square(), blocks.to(z), self.places)

    @cached_property
    def sought(self) -> Sought:
        """The blocks, as :func:`in_common` looks for them."""
        return Sought(self)


class Sought:
    """Blocks of questions by the last bits of their places: which bits there are, the first block
    of each and how many there are."""

    def __init__(self, asked: Compressed) -> None:
        places = asked.places.flatten().numpy().astype(np.int32)
        order = (places & HASHED - 1).argsort(kind="stable")
        self.places, self.questions = places[order], order // max(1, asked.places.shape[1])
        self.blocks = asked.blocks.flatten(0, 1)[torch.from_numpy(order)]
        bits, *runs = np.unique(self.places & HASHED - 1, return_index=True, return_counts=True)
        self.first, self.count = runs
        self.runs = np.zeros(HASHED, dtype=np.int32)
        self.runs[bits] = np.arange(len(bits))
        self.there = np.zeros(HASHED, dtype=bool)
        self.there[bits] = True


@dataclass(frozen=True)
class Compression:
    """What is kept of w: ``size`` signs and some ``blocks``, or all of its ``size`` numbers;
    ``sums``: the places of S, which are mixed anew where there is room for more signs than these.
    """

    size: int
    signs: bool
    sums: int
    blocks: int

    @classmethod
    def of(cls, q: Posterior, rank: int, dtype: torch.dtype, blocks: int = 0) -> Compression:
        """What takes the room of so many numbers at most, with so many blocks."""
        assert isinstance(q.form, Spectral)
        parameters = sum(s.numel() for s in q.form.values.values())
        if parameters <= rank:
            return cls(parameters, signs=False, sums=parameters, blocks=0)
        room = max(1, 8 * (dtype.itemsize * rank - HELD * blocks) // MIX)
        sums = min(room, -(-parameters // MIX)) * MIX
        return cls(room * MIX // sums * sums, signs=True, sums=sums, blocks=blocks)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Of an example, on disk."""
        return self.size // 8 + HELD * self.blocks if self.signs else self.size * dtype.itemsize

    def roots(self, q: Posterior) -> Roots:
        """Of every matrix in the posterior's basis the place of its first number, and Σ^½ there
        times random signs; with signs, matrices begin with a block."""
        assert isinstance(q.form, Spectral)
        step = BLOCK if self.signs else 1
        starts, count = {}, 0
        for name, s in q.form.values.items():
            starts[name] = count
            count += -(-s.numel() // step) * step
        signs, roots = random_signs(count), {}
        for name, s in q.form.values.items():
            own = signs[starts[name] : starts[name] + s.numel()].to(s).view_as(s)
            roots[name] = starts[name], s.rsqrt().mul_(own)
        return roots

    def none(self, roots: Roots, more: int = 1) -> Compressed:
        """Of no w."""
        like = next(iter(roots.values()))[1].cpu()
        sums = Sums.none(0, self, like, more)
        return Compressed(like.new_zeros(0, self.size), sums.squares, sums.blocks, sums.places)

    def compressed(
        self, count: int, parts: Iterable[tuple[slice, int, Tensor]], *, more: int = 1
    ) -> Compressed:
        """From parts of so many w, with random signs: see :func:`whitened`; ``more``: times as many
        blocks, of which z, that of a question, lacks none."""
        found: Sums | None = None
        for examples, start, w in parts:
            found = found or Sums.none(count, self, w, more)
            found.add(examples, start, w)
        assert found is not None
        kept = self.blocks if more == 1 else 0
        blocks, places = found.blocks[:, :kept], found.places[:, :kept]
        within = BLOCK * places.unsqueeze(2) + torch.arange(BLOCK, device=found.z.device)
        z = found.z.scatter_add_(1, (within % self.sums).flatten(1), -blocks.flatten(1))
        rest = found.squares, found.blocks, found.places
        return Compressed(self.mixed(z).cpu(), *(t.cpu() for t in rest))

    def mixed(self, z: Tensor) -> Tensor:
        """H of the sums, where their signs will be taken; H D H … with random signs D for more."""
        if not self.signs:
            return z
        parts: list[Tensor] = []
        for k in range(self.size // self.sums):
            if k % 2:
                z = (z * random_signs(self.sums, k).to(z)).view(len(z), -1, MIX)
                z = (z @ hadamard(MIX).to(z)).flatten(1)
            else:
                z = z * random_signs(self.sums, k).to(z) if k else z
                small = hadamard(SIDE).to(z)  # H is its Kronecker product with itself
                z = (small @ z.view(len(z), SIDE, -1)).view(len(z) * SIDE, SIDE, -1)
                z = (small @ z).view(-1, self.sums)
            parts.append(z)
        return torch.cat(parts, dim=1) / len(parts) ** 0.5

    @property
    def first(self) -> int:
        """Signs that lie apart and are looked at before the others; 0: none do."""
        some = self.size // PART // WORD * WORD
        return some if self.signs and some >= FIRST else 0

    def stored(self, own: Compressed, dtype: torch.dtype) -> dict[str, Tensor]:
        """For a file: unit vectors; or bits, and blocks in steps of a 7th of their largest, the
        first half of a block's numbers in the lower bits."""
        if not self.signs:
            length = rooted(own.squares)
            return {"gradients": (own.z / length.to(own.z).view(-1, 1)).to(dtype), "length": length}
        left = own.squares - own.blocks.double().square().sum((1, 2))
        units = own.blocks.abs().amax(2).clamp_min(torch.finfo(torch.float32).tiny) / STEPS_UP
        whole = (own.blocks / units.unsqueeze(2)).round().to(torch.int8).add_(8).view(torch.uint8)
        low, high = whole.split(BLOCK // 2, dim=2)
        bits, first = np.packbits((own.z > 0).numpy(), axis=1), self.first // 8
        apart = {"first": torch.from_numpy(bits[:, :first].copy())} if first else {}
        return {
            **apart,
            "gradients": torch.from_numpy(bits[:, first:].copy()),
            "length": left.clamp_min(0).sqrt(),
            "blocks": low + 16 * high,
            "units": units.float(),
            "places": own.places.to(torch.int32),
        }

    def values(self, kept: Kept, asked: Compressed) -> Tensor:
        """Influence of what is stored on the questions, ``[n, M]``."""
        return self._scaled(kept, asked, self._products(_parts(kept), asked.z))

    def _scaled(self, kept: Kept, asked: Compressed, likeness: Tensor) -> Tensor:
        values = likeness.mul_(kept["length"].to(likeness).unsqueeze(1))
        return values + in_common(kept, asked).to(values) if self.blocks else values

    def _products(self, units: list[Tensor], asked: Tensor) -> Tensor:
        """Of what is stored ``[n, ...]`` with z of the questions ``[M, size]``, ``[n, M]``."""
        if not self.signs:
            some = units[0].split(max(1, CACHED // self.size))
            return torch.cat([part.to(asked.dtype) @ asked.mT for part in some])
        sums, start = asked.new_zeros(len(units[0]), len(asked)), 0
        for own in units:
            z = asked[:, start : start + 8 * own.shape[1]]
            for rows in slices(len(own), CACHED // z.shape[1]):
                bits = torch.from_numpy(np.unpackbits(own[rows].numpy(), axis=1))
                sums[rows] += bits.to(asked.dtype) @ z.mT
            start += z.shape[1]
        return (2 * sums - asked.sum(1)) * math.sqrt(math.pi / 2 / self.size)

    def rough(self, kept: Kept, question: Rounded) -> Tensor:
        """The same from the first signs alone, of either side, by how many are equal; and the
        standard deviation of what that is off, ``[n, 2, M]``. Of a cosine this is π / 2√K."""
        counts = unequal(_parts(kept)[:1], question.words).squeeze(2)
        shares = counts / (WORD * question.words.shape[2])
        likeness = (math.pi * shares).cos_().to(question.unit) * question.unit
        return self._with_error(kept, question, likeness)

    def near(self, kept: Kept, question: Rounded) -> Tensor:
        """The same from all signs, and numbers of a few bits of the question."""
        counts, bits = unequal(_parts(kept), question.words), question.words.shape[1]
        weights = 2.0 ** torch.arange(bits, dtype=counts.dtype)
        sums = (self.size * (2**bits - 1) - 2 * (counts @ weights)).to(question.unit)
        likeness = sums * question.unit * math.sqrt(math.pi / 2 / self.size)
        return self._with_error(kept, question, likeness)

    def _with_error(self, kept: Kept, question: Rounded, likeness: Tensor) -> Tensor:
        errors = kept["length"].to(likeness).unsqueeze(1) * question.error
        return torch.stack([self._scaled(kept, question.asked, likeness), errors], dim=1)

    def rounded(self, asked: Compressed, bits: int) -> Rounded:
        """For :meth:`rough` the signs of what of z is looked at first, of one bit. For :meth:`near`
        z as odd numbers q of so many bits, in such a unit that z − unit · q is at right angles
        with z: its products with signs, by which that is off, are 0 on average."""
        if bits == 1:
            z, lengths = asked.z[:, : self.first or self.size], asked.z.norm(dim=1)
            variance = (math.pi / 2) ** 2 / z.shape[1] + math.pi / 2 / self.size
            return Rounded(asked, _words((z > 0).unsqueeze(1)), lengths, lengths * variance**0.5)
        step, levels = STEPS[bits] * asked.z.square().mean(1, keepdim=True).sqrt(), 2**bits
        level = (asked.z / rooted(step.square()) + levels / 2).floor_().clamp_(0, levels - 1).int()
        q = (2 * level - (levels - 1)).to(asked.z)
        along = (asked.z * q).sum(1)  # 0 where z is
        unit = asked.z.square().sum(1) / torch.where(along > 0, along, 1)
        left = (asked.z - unit.unsqueeze(1) * q).norm(dim=1)
        planes = torch.stack([(level >> bit & 1).bool() for bit in range(bits)], dim=1)
        return Rounded(asked, _words(planes), unit, left * math.sqrt(math.pi / 2 / self.size))


@dataclass(frozen=True)
class Rounded:
    """Questions whose numbers are rounded: the bits of each as words ``[M, b, size / 64]``, their
    unit, and the standard deviation of what a value is then off, for a length of 1, ``[M]``."""

    asked: Compressed
    words: NDArray[np.uint64]
    unit: Tensor
    error: Tensor


def _words(planes: Tensor) -> NDArray[np.uint64]:
    return np.packbits(planes.numpy(), axis=2).view(np.uint64)


def _parts(kept: Kept) -> list[Tensor]:
    """What is stored in place of z, by its columns."""
    return [kept[name] for name in ("first", "gradients") if name in kept]


def unequal(units: list[Tensor], words: NDArray[np.uint64]) -> Tensor:
    """How many stored bits are not those of the questions' words, ``[n, M, b]``."""
    counts = np.zeros((len(units[0]), *words.shape[:2]), dtype=np.int64)
    start = 0
    for own in units:
        rows, end = own.numpy().view(np.uint64), start + own.shape[1] * 8 // WORD
        for some in slices(len(rows), CACHED // own.shape[1]):
            part = rows[some]
            for j, b in np.ndindex(words.shape[:2]):
                differ = np.bitwise_count(part ^ words[j, b, start:end])
                counts[some, j, b] += differ.sum(1, dtype=np.uint32)
        start = end
    return torch.from_numpy(counts).double()


@dataclass
class Sums:
    """S's sums ``[B, sums]`` of some w, ‖w‖² and the longest blocks, of the parts seen so far."""

    z: Tensor
    squares: Tensor
    lengths: Tensor
    blocks: Tensor
    places: Tensor

    @classmethod
    def none(cls, count: int, compression: Compression, like: Tensor, more: int) -> Sums:
        longest = count, more * compression.blocks
        return cls(
            like.new_zeros(count, compression.sums),
            like.new_zeros(count, dtype=torch.float64),
            like.new_full(longest, -1.0),
            like.new_zeros(*longest, BLOCK),
            torch.zeros(longest, dtype=torch.int64, device=like.device),
        )

    def add(self, examples: slice, start: int, w: Tensor) -> None:
        """Numbers ``[b, n]`` of these examples, whose first is at place ``start``."""
        each = _blocks_of(w)
        norms = torch.linalg.vector_norm(each, dim=2)
        self.squares[examples] += norms.double().square().sum(1)
        self._longest(examples, start, each, norms)
        z, at, place = self.z[examples], 0, start % self.z.shape[1]
        while at < w.shape[1]:
            part = w[:, at : at + z.shape[1] - place]
            z[:, place : place + part.shape[1]] += part
            at, place = at + part.shape[1], 0

    def _longest(self, examples: slice, start: int, each: Tensor, norms: Tensor) -> None:
        lengths = self.lengths[examples]
        kept = lengths.shape[1]
        if not kept or not bool((norms.amax(1) > lengths.amin(1)).any()):
            return
        top = norms.topk(min(kept, norms.shape[1]), dim=1)
        best = torch.cat([lengths, top.values], 1).topk(kept, dim=1)
        blocks = torch.cat([self.blocks[examples], _taken(each, top.indices)], 1)
        places = torch.cat([self.places[examples], start // BLOCK + top.indices], 1)
        self.lengths[examples] = best.values
        self.blocks[examples] = _taken(blocks, best.indices)
        self.places[examples] = places.gather(1, best.indices)


def whitened(terms: Iterable[Term], roots: Roots) -> Iterator[tuple[slice, int, Tensor]]:
    """w of gradients of one column in the posterior's basis, tile by tile: which examples, the
    place of the first number, and numbers ``[b, n]``."""
    for term in terms:
        layout, tiles = term.matrix, iter([slice(None)])
        if layout is not None:  # some rows at a time, of whole blocks
            tiles = slices(layout.rows, max(1, TILE // (BLOCK * layout.columns)) * BLOCK)
        for rows in tiles:
            own = {name: _of_rows(*roots[name], layout, rows) for name in term.names}
            tile = term if layout is None else term.rows(rows)
            size = sum(root.numel() for _, root in own.values())
            for some in slices(term.n_examples, TILE // size):
                for name, gradients in tile.part(some).jacobian().items():
                    start, root = own[name]
                    w = gradients[:, 0].flatten(1)  # nobody else's
                    yield some, start, w.mul_(root) if w.dtype == root.dtype else w * root


def _of_rows(
    start: int, root: Tensor, layout: MatrixShape | None, rows: slice
) -> tuple[int, Tensor]:
    """Place of the first number and the flat numbers of these rows."""
    if layout is None:
        return start, root.flatten()
    each = root.numel() // layout.rows
    return start + rows.start * each, root.view(layout.rows, each)[rows].flatten()


def in_common(kept: Kept, asked: Compressed) -> Tensor:
    """v_iᵀ w_j over the blocks that both have, ``[n, M]``."""
    sought, m = asked.sought, len(asked.places)
    n, own = kept["places"].shape
    places, units, blocks = (
        kept[name].flatten(0, 1).numpy() for name in ("places", "units", "blocks")
    )
    values = torch.zeros(n * m, dtype=asked.blocks.dtype)
    for some in slices(n, PAIRED // (m * own * BLOCK)):
        start, end = own * some.start, own * some.stop
        bits = places[start:end] & HASHED - 1
        hits = np.flatnonzero(sought.there.take(bits))
        runs = sought.runs.take(bits.take(hits))
        count = sought.count.take(runs)
        ours = hits.repeat(count) + start  # every pair whose last bits are equal
        nth = np.arange(len(ours)) - (count.cumsum() - count).repeat(count)
        theirs = sought.first.take(runs).repeat(count) + nth
        same = np.flatnonzero(places.take(ours) == sought.places.take(theirs))
        for few in slices(len(same), CACHED // BLOCK // 4):
            i, j = ours.take(same[few]), theirs.take(same[few])
            mine = unpacked(torch.from_numpy(blocks.take(i, axis=0))).to(values)
            other = sought.blocks.index_select(0, torch.from_numpy(j))
            products = torch.linalg.vecdot(mine, other)
            pairs = torch.from_numpy(i // own * m + sought.questions.take(j))
            values.index_add_(0, pairs, products * torch.from_numpy(units.take(i)))
    return values.view(n, m)


def unpacked(blocks: Tensor) -> Tensor:
    """Whole numbers of −7 to 7 of blocks as files hold them, ``[..., 64]``.

    >>> unpacked(torch.full((1, 32), 9 + 16 * 7, dtype=torch.uint8)).unique().tolist()
    [-1, 1]
    """
    return torch.cat([blocks & 15, blocks >> 4], dim=-1).view(torch.int8) - 8


def block_squares(count: int, parts: Iterable[tuple[slice, int, Tensor]]) -> Tensor:
    """The squared lengths of all blocks of so many w, ``[B, blocks]``."""
    found: list[list[Tensor]] = [[] for _ in range(count)]
    for examples, _, w in parts:
        for own, row in zip(found[examples], _blocks_of(w).square().sum(2), strict=True):
            own.append(row)
    return torch.stack([torch.cat(own) for own in found])


def block_counts(count: int, room: int) -> set[int]:
    """How many of so many blocks may be kept in so many bytes, but for none."""
    return {min(int(share * room) // HELD, count // 2) for share in SHARES} - {0}


def best_blocks(rows: Iterable[Tensor], n: int, count: int, room: int) -> int:
    """How many of ``count`` blocks in so many bytes leave least, ‖r‖⁴ / K, of n examples, whose
    blocks have the squared lengths ``rows``, each on one of the ranks."""
    if not (counts := block_counts(count, room)):
        return 0
    left = {0: 1 / room}
    held = torch.zeros(max(counts), dtype=torch.float64)
    for row in rows:
        longest = row.topk(len(held)).values.double().cumsum(0)
        held += (longest / row.double().sum().clamp_min(torch.finfo(torch.float64).tiny)).cpu()
    ranks.total([held])
    for count in counts:
        rest = float(1 - held[count - 1] / n)
        left[count] = rest**2 / (room - HELD * count)
    return min(left, key=lambda count: left[count])


def _blocks_of(w: Tensor) -> Tensor:
    short = -w.shape[1] % BLOCK
    return (pad(w, (0, short)) if short else w).unflatten(1, (-1, BLOCK))


def _taken(blocks: Tensor, chosen: Tensor) -> Tensor:
    return blocks.gather(1, chosen.unsqueeze(2).expand(-1, -1, BLOCK))


def random_signs(count: int, seed: int = 0) -> Tensor:
    """±1, from the raw bits of PCG64, which are the same in all versions of NumPy.

    >>> random_signs(4).tolist()
    [-1, 1, -1, 1]
    """
    raw = np.random.PCG64(seed).random_raw(-(-count // 64)).astype("<u8").view(np.uint8)
    return 2 * torch.from_numpy(np.unpackbits(raw)[:count].astype(np.int8)) - 1


@cache
def hadamard(n: int) -> Tensor:
    """Sylvester's orthogonal matrix of ±1/√n, for a power of two.

    >>> hadamard(2) * 2**0.5
    tensor([[ 1.,  1.],
            [ 1., -1.]])
    """
    matrix, two = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(matrix) < n:
        matrix = torch.kron(two, matrix)
    return matrix / n**0.5

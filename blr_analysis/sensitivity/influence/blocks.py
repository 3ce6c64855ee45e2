"""Influence in one pass over the training data, never more than a memory budget.

The preconditioned gradients H_j = Σ ∇q_j of all test examples are held explicitly, in memory or,
where it does not hold them, in a file that is mapped; the training data pass by once in factored
form (G_i = d_i a_iᵀ), and each layer's share ⟨H_j, G_i⟩ is computed by the cheaper of two orders of
multiplication.

The file holds some rows of one matrix of all vectors side by side: what is multiplied at once lies
together, and memory holds no more than that. Single precision is kept there as half precision of
what is divided by the largest of its numbers: each is off by one part in 2,000, and their errors
cancel in a product.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk, Chunking, chunks, default_memory
from blr_analysis.backprop.plan import plan_for
from blr_analysis.backprop.terms import Term, products, slices, total
from blr_analysis.checks import positive_int
from blr_analysis.errors import StorageError
from blr_analysis.files import check_room
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.corrections import check_finite
from blr_analysis.task import Task

DEFAULT_MEMORY = 256 * 2**20  # bytes of working memory where the user names no bound
READ = 2  # times as many examples per chunk, where what it is multiplied with is read from a file
ANSWERS = 4  # copies of a chunk's share of an answer that are held at once
TOGETHER = 2**23  # numbers of all vectors that lie together
STORED = {torch.float32: torch.float16}

Cotangent = Callable[[Task, Chunk], Tensor]  # ∂(quantity)/∂f of every example of a chunk, [B, C]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Piece:
    """Influence of the training examples ``train`` on the test examples ``test``, ``[B, M]``; the
    squares ∇ℓ_iᵀ Σ ∇ℓ_i of the former, ``[B]``, where they were asked for."""

    train: Tensor
    test: Tensor
    values: Tensor
    squares: Tensor | None = None


def matrix_of(pieces: Iterable[Piece]) -> Tensor:
    """The values of all pieces on the CPU, ``[N, M]``: the training data may pass by once for each
    block of test examples."""
    blocks: dict[int, list[Tensor]] = {}
    for piece in pieces:
        blocks.setdefault(int(piece.test[0]), []).append(piece.values.cpu())
    return torch.cat([torch.cat(parts) for parts in blocks.values()], dim=1)


@dataclass(frozen=True)
class Budget:
    """How a memory budget is shared: test gradients held, training chunk, products in flight."""

    vectors: int
    chunk: int | None  # None: nobody named a bound
    room: int

    @classmethod
    def of(cls, memory_budget: int | None, q: Posterior, n_test: int) -> Budget:
        if memory_budget is not None:
            positive_int("memory_budget", memory_budget)
        total = memory_budget or DEFAULT_MEMORY
        width = sum(m.numel() for m in q.mean.values())
        itemsize = next(iter(q.mean.values())).element_size()
        vectors = max(1, min(n_test, total // 2 // (width * itemsize)))
        chunk = None if memory_budget is None else max(1, total // 6)
        return cls(vectors, chunk, max(1, total // 6 // itemsize))


def loss_gradient(task: Task, chunk: Chunk) -> Tensor:
    """e = ∂ℓ/∂f, the cotangent of the loss."""
    return chunk.likelihood.error(chunk.outputs, chunk.targets)


def pieces(
    task: Task,
    q: Posterior,
    test_task: Task,
    *,
    cotangent: Cotangent = loss_gradient,
    train_cotangent: Cotangent = loss_gradient,
    squares: bool = False,
    indices: Tensor | None = None,
    test_indices: Tensor | None = None,
    memory_budget: int | None = None,
) -> Iterator[Piece]:
    """Influence of one training chunk after the other, on all test examples.

    Values are on the task's device; nothing is held beyond a piece. (Of another device than the
    CPU, test gradients are held there, and the training data pass by once for each block that the
    budget allows.)

    Raises:
        StorageError: the disk for temporary files does not hold them.
    """
    order = torch.arange(test_task.n_data) if test_indices is None else test_indices
    n_train = task.n_data if indices is None else len(indices)
    budget = Budget.of(memory_budget, q, len(order))
    turn = _turns(q, n_train, len(order))
    blocks = (order,) if task.device.type == "cpu" else order.split(budget.vectors)
    shown = track(blocks, total=len(blocks), label="test blocks", show=task.progress)
    for block in blocks if len(blocks) == 1 else shown:
        shapes, like = q.form.basis_shapes() if turn else q.form.shapes, next(iter(q.mean.values()))
        mapped = len(block) > budget.vectors
        with held_in(shapes, len(block), like, fits=not mapped) as held:
            precondition(test_task, q, block, cotangent, budget, held, turned=turn)
            size = chunk_size(task, q, budget, n_train, len(block), mapped=mapped)
            chunking = Chunking(size, progress=task.progress)
            for chunk in chunks(task, q.mean, chunking, indices=indices, label="influence"):
                terms = loss_terms(task, chunk, train_cotangent)
                own = q.form.gram(terms).flatten() if squares else None
                terms = q.form.into_basis(terms) if turn else terms
                values = held.products(terms, chunk.outputs.dtype, budget.room)
                check_finite(values, "influence")
                del terms
                yield Piece(chunk.indices, block, values, own)
                del values, chunk


def chunk_size(
    task: Task, q: Posterior, budget: Budget, n: int, numbers: int, *, mapped: bool = False
) -> int:
    """Examples per chunk, where each also has so many ``numbers`` in an answer; ``mapped``: what
    they are multiplied with is read from a file."""
    itemsize = next(iter(q.mean.values())).element_size()
    plan = plan_for(task, q.mean)
    held = budget.chunk
    if held is None:
        held = default_memory(q.mean, DEFAULT_MEMORY // 6, itemsize * plan.floats(1))
        held *= READ if mapped else 1
    fits = plan.chunk_size(1, held, itemsize, n)
    return max(1, min(fits, budget.room // (ANSWERS * numbers)))


def loss_terms(task: Task, chunk: Chunk, cotangent: Cotangent = loss_gradient) -> list[Term]:
    """∇ℓ_i of a chunk in factored form, one column."""
    return chunk.terms(cotangent(task, chunk).unsqueeze(1), last=True)


def preconditioned(
    task: Task, q: Posterior, indices: Tensor, cotangent: Cotangent, budget: Budget
) -> Tree:
    """Σ ∇q_j of these examples, ``[M, ...]`` by name."""
    held = InMemory(q.form.shapes, len(indices), next(iter(q.mean.values())))
    precondition(task, q, indices, cotangent, budget, held, turned=False)
    return held.vectors


def precondition(
    task: Task,
    q: Posterior,
    indices: Tensor,
    cotangent: Cotangent,
    budget: Budget,
    into: Held,
    *,
    turned: bool,
) -> None:
    """Write Σ ∇q_j of these examples: in the basis if ``turned``, else outside."""
    each = q.form.basis_precision if turned else q.form.per_weight
    width = 1 if each is not None else sum(m.numel() for m in q.mean.values())
    size = chunk_size(task, q, budget, len(indices), width)
    start = 0
    for chunk in chunks(task, q.mean, Chunking(size, progress=False), indices=indices):
        terms = loss_terms(task, chunk, cotangent)
        n = len(chunk.indices)
        del chunk
        if each is not None:  # layer by layer, of one example at a time
            for row in range(n):
                for term in q.form.into_basis([term.part(slice(row, row + 1)) for term in terms]):
                    for name, g in term.jacobian().items():
                        into.put(start + row, name, g[:, 0].div_(each[name]))
        else:
            solved = q.form.basis_solve(
                _explicit(q.form.into_basis(terms), q, n, q.form.basis_shapes())
            )
            for name, part in (solved if turned else q.form.backward(solved)).items():
                into.put(start, name, part)
        start += n


def _explicit(
    terms: list[Term], q: Posterior, n: int, shapes: Mapping[str, tuple[int, ...]]
) -> Tree:
    """The gradients ``[B, ...]`` by name, zero where the model does not reach."""
    reached = {name: g[:, 0] for term in terms for name, g in term.jacobian().items()}
    like = next(iter(q.mean.values()))
    return {
        name: reached[name] if name in reached else like.new_zeros((n, *shape))
        for name, shape in shapes.items()
    }


def _turns(q: Posterior, n_train: int, n_test: int) -> bool:
    """Whether training gradients are rotated, rather than test gradients rotated back."""
    factored, explicit = q.form.rotation_cost()
    return n_train * factored <= n_test * explicit


class Held(ABC):
    """H_j, ``[M, *shape]`` by name."""

    @abstractmethod
    def put(self, start: int, name: str, values: Tensor) -> None:
        """Write H_j for j = start …, ``[B, *shape]``; ``values`` may be overwritten."""

    @abstractmethod
    def products(self, terms: Sequence[Term], dtype: torch.dtype, room: int) -> Tensor:
        """⟨G_i, H_j⟩ of gradients with one column, ``[B, M]``."""


class InMemory(Held):
    def __init__(self, shapes: Shapes, count: int, like: Tensor) -> None:
        self.vectors = {n: like.new_zeros((count, *s)) for n, s in shapes.items()}

    def put(self, start: int, name: str, values: Tensor) -> None:
        self.vectors[name][start : start + len(values)] = values

    def products(self, terms: Sequence[Term], dtype: torch.dtype, room: int) -> Tensor:
        return products(terms, self.vectors, dtype=dtype, room=room)[:, 0]


class InFile(Held):
    """The bytes of a file, matrix by matrix; of a matrix, block by block of its rows."""

    def __init__(self, shapes: Shapes, count: int, like: Tensor, path: Path) -> None:
        self._shapes, self._count = dict(shapes), count
        self._dtype = STORED.get(like.dtype, like.dtype)
        self._units = {n: like.new_ones(count) for n in shapes}
        self._starts: dict[str, int] = {}
        size = 0
        for name, shape in shapes.items():
            self._starts[name] = size
            size += count * math.prod(shape) * self._dtype.itemsize
        check_room(path, size)
        with path.open("w+b") as file:
            try:
                os.truncate(file.fileno(), size)
                if hasattr(os, "posix_fallocate"):  # a full disk: an error, no signal
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise StorageError(f"{str(path)!r} takes {size:,} bytes: {error}.") from error
            self._map = mmap.mmap(file.fileno(), size)

    def _row(self, name: str) -> int:
        """Numbers in a row of the matrix that this parameter is read as, if it has rows."""
        shape = self._shapes[name]
        rows = next((n for n in shape if n > 1), 1)
        return math.prod(shape) // rows

    def _blocks(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Some rows of it and their numbers ``[M, …]``."""
        row, each = self._row(name), math.prod(self._shapes[name])
        start = self._starts[name]
        for rows in slices(each // row, TOGETHER // (self._count * row)):
            numbers = self._count * (rows.stop - rows.start) * row
            block = torch.frombuffer(self._map, dtype=self._dtype, count=numbers, offset=start)
            yield rows, block.view(self._count, -1)
            self._let_go(start, numbers * self._dtype.itemsize)
            start += numbers * self._dtype.itemsize

    def _let_go(self, start: int, size: int) -> None:
        """The file keeps these bytes, the memory of this process does not."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, start + size - first)

    def put(self, start: int, name: str, values: Tensor) -> None:
        flat, stop = values.reshape(len(values), -1), start + len(values)
        if self._dtype != values.dtype:
            largest = torch.maximum(flat.amax(1), -flat.amin(1))  # 20 times as fast as aminmax
            self._units[name][start:stop] = torch.where(largest > 0, largest, 1)
        units, row = self._units[name][start:stop].unsqueeze(1), self._row(name)
        for rows, block in self._blocks(name):
            block[start:stop] = flat[:, rows.start * row : rows.stop * row].div_(units)

    def products(self, terms: Sequence[Term], dtype: torch.dtype, room: int) -> Tensor:
        sums = None
        for term in terms:
            first, *others = term.names
            unit = self._units[first].to(dtype)
            beside = {  # a bias, in the unit of its weight
                n: self._whole(n).to(dtype).flatten(1) * (self._units[n].to(dtype) / unit)[:, None]
                for n in others
            }
            for part, block, rows in self._parts(term):
                stack = {first: block, **{n: v[:, rows] for n, v in beside.items()}}
                share = part.products(stack, dtype=dtype, room=room)[:, 0].mul_(unit)
                sums = share if sums is None else sums.add_(share)
        return total([]) if sums is None else sums

    def _parts(self, term: Term) -> Iterator[tuple[Term, Tensor, slice]]:
        """The term and its first parameter's vectors, row by row where both are read so."""
        name = term.names[0]
        layout = term.matrix
        if layout is None or layout.columns != self._row(name):
            yield term, self._whole(name), slice(None)
            return
        for rows, block in self._blocks(name):
            yield term.rows(rows), block.view(self._count, -1, layout.columns), rows

    def _whole(self, name: str) -> Tensor:
        """``[M, *shape]`` as they are stored."""
        blocks = [block.clone() for _, block in self._blocks(name)]
        return torch.cat(blocks, dim=1).view(self._count, *self._shapes[name])


@contextmanager
def held_in(shapes: Shapes, count: int, like: Tensor, *, fits: bool) -> Iterator[Held]:
    """Vectors for so many test examples: in memory if it ``fits``, else in a file that is gone
    afterwards.

    Raises:
        StorageError: its disk has no room.
    """
    if fits:
        yield InMemory(shapes, count, like)
        return
    with tempfile.TemporaryDirectory(prefix="influence-") as place:
        yield InFile(shapes, count, like, Path(place, "gradients"))

"""Influence within a memory budget.

The preconditioned gradients H_j = Σ ∇q_j of the test examples are held explicitly, as many as there
is room for; for each such block the training data pass by once in factored form (G_i = d_i a_iᵀ),
and each layer's share ⟨H_j, G_i⟩ is computed by the cheaper of two orders of multiplication.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk, chunks, default_memory
from blr_analysis.backprop.plan import plan_for
from blr_analysis.backprop.terms import Term, products
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.corrections import check_finite
from blr_analysis.task import Task

DEFAULT_MEMORY = 256 * 2**20  # bytes of working memory where the user names no bound
VECTORS = 8  # of the machine's memory the part that then holds test gradients
ANSWERS = 4  # copies of a chunk's share of an answer that are held at once

Cotangent = Callable[[Task, Chunk], Tensor]  # ∂(quantity)/∂f of every example of a chunk, [B, C]


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
    def of(cls, task: Task, q: Posterior, n_test: int, sharers: int = 1) -> Budget:
        """For one of so many posteriors that are asked at once."""
        bound = task.memory_budget
        itemsize = next(iter(q.mean.values())).element_size()
        total = (bound or DEFAULT_MEMORY) // sharers
        for_gradients = total // 2
        if bound is None and task.device.type == "cpu":
            for_gradients = max(for_gradients, physical_memory() // VECTORS // sharers)
        n_parameters = sum(m.numel() for m in q.mean.values())
        vectors = max(1, min(n_test, for_gradients // (n_parameters * itemsize)))
        chunk = None if bound is None else max(1, total // 6)
        return cls(vectors, chunk, max(1, total // 6 // itemsize))


def physical_memory() -> int:
    """Bytes of memory that this machine has; without a bound where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on every system
        return sys.maxsize


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
    sharers: int = 1,
) -> Iterator[Piece]:
    """Influence of one training chunk after the other on a block of test examples, block by block.

    Values are on the task's device; nothing is held beyond a piece. ``sharers``: posteriors that
    are asked at once and share the memory.
    """
    order = torch.arange(test_task.n_data) if test_indices is None else test_indices
    n_train = task.n_data if indices is None else len(indices)
    budget = Budget.of(task, q, len(order), sharers)
    turn = _turns(q, n_train, len(order))
    blocks = order.split(budget.vectors)
    shown = track(blocks, total=len(blocks), label="test blocks", show=task.progress)
    for block in blocks if len(blocks) == 1 else shown:
        vectors = preconditioned(test_task, q, block, cotangent, budget, turned=turn)
        size = chunk_size(task, q, budget, n_train, len(block))
        for chunk in chunks(task, q.mean, size=size, indices=indices, label="influence"):
            terms = loss_terms(task, chunk, train_cotangent)
            squares_of_chunk = q.form.gram(terms).flatten() if squares else None
            if turn:
                terms = q.form.into_basis(terms)
            values = products(terms, vectors, dtype=chunk.outputs.dtype, room=budget.room)[:, 0]
            check_finite(values, "influence")
            del terms
            yield Piece(chunk.indices, block, values, squares_of_chunk)
            del values, chunk


def chunk_size(task: Task, q: Posterior, budget: Budget, n: int, numbers: int) -> int:
    """Examples per chunk, where each also has so many ``numbers`` in an answer."""
    itemsize = next(iter(q.mean.values())).element_size()
    plan = plan_for(task, q.mean)
    memory = budget.chunk
    if memory is None:
        memory = default_memory(q.mean, DEFAULT_MEMORY // 6, itemsize * plan.floats(1))
    most = plan.chunk_size(1, memory, itemsize, n)
    return max(1, min(most, budget.room // (ANSWERS * numbers)))


def loss_terms(task: Task, chunk: Chunk, cotangent: Cotangent = loss_gradient) -> list[Term]:
    """∇ℓ_i of a chunk in factored form, one column."""
    return chunk.terms(cotangent(task, chunk).unsqueeze(1), last=True)


def preconditioned(
    task: Task,
    q: Posterior,
    indices: Tensor,
    cotangent: Cotangent,
    budget: Budget,
    *,
    turned: bool = False,
) -> Tree:
    """Σ ∇q_j of these examples, ``[M, ...]`` by name: in the basis if ``turned``, else outside."""
    shapes = q.form.basis_shapes() if turned else q.form.shapes
    like = next(iter(q.mean.values()))
    solved = {name: like.new_zeros((len(indices), *shape)) for name, shape in shapes.items()}
    precision = q.form.basis_precision if turned else q.form.per_weight
    is_diagonal = precision is not None
    n_parameters = sum(m.numel() for m in q.mean.values())
    size = chunk_size(task, q, budget, len(indices), 1 if is_diagonal else n_parameters)
    start = 0
    for chunk in chunks(task.quiet, q.mean, size=size, indices=indices):
        terms = loss_terms(task, chunk, cotangent)
        end = start + len(chunk.indices)
        del chunk
        rows = {name: block[start:end] for name, block in solved.items()}
        if precision is not None:
            _divide(terms, q, precision, rows)
        else:
            _solve(terms, q, rows, turned=turned)
        start = end
    return solved


def _divide(terms: list[Term], q: Posterior, precision: Tree, rows: Tree) -> None:
    """Gradients over a diagonal precision, into ``rows``: one example and layer at a time."""
    for row in range(len(next(iter(rows.values())))):
        of_example = [term.part(slice(row, row + 1)) for term in terms]
        for term in q.form.into_basis(of_example):
            for name, gradient in term.jacobian().items():
                rows[name][row] = gradient[0, 0].div_(precision[name])


def _solve(terms: list[Term], q: Posterior, rows: Tree, *, turned: bool) -> None:
    """Σ times the gradients, into ``rows``: all examples of a chunk together."""
    n = len(next(iter(rows.values())))
    gradients = _explicit(q.form.into_basis(terms), q, n, q.form.basis_shapes())
    solved = q.form.basis_solve(gradients)
    if not turned:
        solved = q.form.backward(solved)
    for name, part in solved.items():
        rows[name][:] = part


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

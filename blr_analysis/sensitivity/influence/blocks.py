"""Influence in blocks: never more than a memory budget, never a gradient formed twice.

For a block of test examples the preconditioned gradients H_j = Σ ∇q_j are held explicitly, as
many as fit; the training data pass by once per block in factored form (G_i = d_i a_iᵀ), and each
layer's share ⟨H_j, G_i⟩ is computed by the cheaper of two orders of multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk, Chunking, chunks
from blr_analysis.backprop.plan import plan_for
from blr_analysis.backprop.terms import Term, products
from blr_analysis.checks import positive_int
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.corrections import check_finite
from blr_analysis.task import Task

DEFAULT_MEMORY = 256 * 2**20  # bytes of working memory where the user names no bound
ANSWERS = 4  # copies of a chunk's share of an answer that are held at once

Cotangent = Callable[[Task, Chunk], Tensor]  # ∂(quantity)/∂f of every example of a chunk, [B, C]


@dataclass(frozen=True)
class Piece:
    """Influence of the training examples ``train`` on the test examples ``test``, ``[B, M]``."""

    train: Tensor
    test: Tensor
    values: Tensor


@dataclass(frozen=True)
class Budget:
    """How a memory budget is shared: test gradients held, training chunk, products in flight."""

    vectors: int
    chunk: int
    room: int

    @classmethod
    def of(cls, memory_budget: int | None, q: Posterior, n_test: int) -> Budget:
        if memory_budget is not None:
            positive_int("memory_budget", memory_budget)
        total = memory_budget or DEFAULT_MEMORY
        width = sum(m.numel() for m in q.mean.values())
        itemsize = next(iter(q.mean.values())).element_size()
        vectors = max(1, min(n_test, total // 2 // (width * itemsize)))
        return cls(vectors, max(1, total // 6), max(1, total // 6 // itemsize))


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
    indices: Tensor | None = None,
    test_indices: Tensor | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Iterator[Piece]:
    """Influence block by block: for each block of test examples, all training chunks in order.

    Values are on the task's device; nothing is held beyond a piece.
    """
    order = torch.arange(test_task.n_data) if test_indices is None else test_indices
    n_train = task.n_data if indices is None else len(indices)
    budget = Budget.of(memory_budget, q, len(order))
    turn = _turns(q, n_train, len(order))
    blocks = order.split(budget.vectors)
    shown = track(blocks, total=len(blocks), label="test blocks", show=progress)
    for block in blocks if len(blocks) == 1 else shown:
        held = preconditioned(test_task, q, block, cotangent, budget, turned=turn)
        for chunk in chunks(
            task,
            q.mean,
            Chunking(chunk_size(task, q, budget, n_train, len(block)), progress=progress),
            indices=indices,
            label="influence",
        ):
            terms = loss_terms(task, chunk, train_cotangent)
            terms = q.form.into_basis(terms) if turn else terms
            values = products(terms, held, dtype=chunk.outputs.dtype, room=budget.room)[:, 0]
            check_finite(values, "influence")
            del terms
            yield Piece(chunk.indices, block, values)
            del values, chunk
        del held  # before the next block is made


def chunk_size(task: Task, q: Posterior, budget: Budget, n: int, numbers: int) -> int:
    """Examples per chunk, where each also has so many ``numbers`` in an answer."""
    itemsize = next(iter(q.mean.values())).element_size()
    fits = plan_for(task, q.mean).chunk_size(1, budget.chunk, itemsize, n)
    return max(1, min(fits, budget.room // (ANSWERS * numbers)))


def loss_terms(task: Task, chunk: Chunk, cotangent: Cotangent = loss_gradient) -> list[Term]:
    """∇ℓ_i of a chunk in factored form, one column."""
    return chunk.terms(cotangent(task, chunk).unsqueeze(1))


def preconditioned(
    task: Task, q: Posterior, indices: Tensor, cotangent: Cotangent, budget: Budget, *, turned: bool
) -> Tree:
    """Σ ∇q_j of these examples, ``[M, ...]`` by name: in the basis if ``turned``, else outside."""
    shapes = q.form.basis_shapes() if turned else q.form.shapes
    first = next(iter(q.mean.values()))
    held = {n: first.new_zeros((len(indices), *s)) for n, s in shapes.items()}
    width = sum(m.numel() for m in q.mean.values())
    size = chunk_size(task, q, budget, len(indices), width)
    start = 0
    for chunk in chunks(task, q.mean, Chunking(size, progress=False), indices=indices):
        terms = q.form.into_basis(chunk.terms(cotangent(task, chunk).unsqueeze(1)))
        stop = start + len(chunk.indices)
        solved = q.form.basis_solve(_explicit(terms, q, len(chunk.indices)))
        if not turned:
            solved = q.form.backward(solved)
        for name, part in solved.items():
            held[name][start:stop] = part
        start = stop
    return held


def _explicit(terms: list[Term], q: Posterior, n: int) -> Tree:
    """The gradients ``[B, ...]`` by name in the basis, zero where the model does not reach."""
    reached = {name: g[:, 0] for term in terms for name, g in term.jacobian().items()}
    like = next(iter(q.mean.values()))
    return {
        name: reached[name] if name in reached else like.new_zeros((n, *shape))
        for name, shape in q.form.basis_shapes().items()
    }


def _turns(q: Posterior, n_train: int, n_test: int) -> bool:
    """Whether training gradients are rotated, rather than test gradients rotated back."""
    factored, explicit = q.form.rotation_cost()
    return n_train * factored <= n_test * explicit

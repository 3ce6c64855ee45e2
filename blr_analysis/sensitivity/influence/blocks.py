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
        bound, like = task.memory_budget, next(iter(q.mean.values()))
        total = (bound or DEFAULT_MEMORY) // sharers
        held = total // 2
        if bound is None and task.device.type == "cpu":
            held = max(held, physical_memory() // VECTORS // sharers)
        width = sum(m.numel() for m in q.mean.values())
        vectors = max(1, min(n_test, held // (width * like.element_size())))
        chunk = None if bound is None else max(1, total // 6)
        return cls(vectors, chunk, max(1, total // 6 // like.element_size()))


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
        held = preconditioned(test_task, q, block, cotangent, budget, turned=turn)
        size = chunk_size(task, q, budget, n_train, len(block))
        for chunk in chunks(task, q.mean, size=size, indices=indices, label="influence"):
            terms = loss_terms(task, chunk, train_cotangent)
            own = q.form.gram(terms).flatten() if squares else None
            terms = q.form.into_basis(terms) if turn else terms
            values = products(terms, held, dtype=chunk.outputs.dtype, room=budget.room)[:, 0]
            check_finite(values, "influence")
            del terms
            yield Piece(chunk.indices, block, values, own)
            del values, chunk


def chunk_size(task: Task, q: Posterior, budget: Budget, n: int, numbers: int) -> int:
    """Examples per chunk, where each also has so many ``numbers`` in an answer."""
    itemsize = next(iter(q.mean.values())).element_size()
    plan = plan_for(task, q.mean)
    held = budget.chunk
    if held is None:
        held = default_memory(q.mean, DEFAULT_MEMORY // 6, itemsize * plan.floats(1))
    fits = plan.chunk_size(1, held, itemsize, n)
    return max(1, min(fits, budget.room // (ANSWERS * numbers)))


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
    shapes, like = q.form.basis_shapes() if turned else q.form.shapes, next(iter(q.mean.values()))
    into = {name: like.new_zeros((len(indices), *shape)) for name, shape in shapes.items()}
    each = q.form.basis_precision if turned else q.form.per_weight
    width = 1 if each is not None else sum(m.numel() for m in q.mean.values())
    size = chunk_size(task, q, budget, len(indices), width)
    start = 0
    for chunk in chunks(task.quiet, q.mean, size=size, indices=indices):
        terms = loss_terms(task, chunk, cotangent)
        n = len(chunk.indices)
        del chunk
        if each is not None:  # layer by layer, of one example at a time
            for row in range(n):
                for term in q.form.into_basis([term.part(slice(row, row + 1)) for term in terms]):
                    for name, g in term.jacobian().items():
                        into[name][start + row] = g[0, 0].div_(each[name])
        else:
            solved = q.form.basis_solve(
                _explicit(q.form.into_basis(terms), q, n, q.form.basis_shapes())
            )
            for name, part in (solved if turned else q.form.backward(solved)).items():
                into[name][start : start + n] = part
        start += n
    return into


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

"""Influence in one pass over the training data, never more than a memory budget.

The preconditioned gradients H_j = Σ ∇q_j of all test examples are held explicitly, in memory or,
where it does not hold them, in a file that is mapped; the training data pass by once in factored
form (G_i = d_i a_iᵀ), and each layer's share ⟨H_j, G_i⟩ is computed by the cheaper of two orders of
multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blr_analysis.backprop.engine import QUIET, Chunk, Chunking, chunks, default_memory
from blr_analysis.backprop.plan import plan_for
from blr_analysis.backprop.terms import Term, slices
from blr_analysis.checks import positive_int
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.corrections import check_finite
from blr_analysis.sensitivity.influence.held import Held, InMemory, held_in
from blr_analysis.task import Task

DEFAULT_MEMORY = 256 * 2**20  # bytes of working memory where the user names no bound
READ = 2  # times as many examples per chunk, where what it is multiplied with is read from a file
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
    folder: Path | None = None,
    solve: Callable[[Tree], Tree] | None = None,
    progress: bool | None = None,
) -> Iterator[Piece]:
    """Influence of one training chunk after the other, on all test examples.

    Values are on the task's device; nothing is held beyond a piece. ``folder``: where the test
    gradients are put that memory does not hold. ``solve``: g ↦ S⁻¹ g for stacked gradients, in
    place of the posterior's own. (Of another device than the CPU, they are held
    there, and the training data pass by once for each block that the budget allows.)

    Raises:
        StorageError: the folder's disk does not hold them.
    """
    order = torch.arange(test_task.n_data) if test_indices is None else test_indices
    n_train = task.n_data if indices is None else len(indices)
    budget = Budget.of(memory_budget, q, len(order))
    turn = solve is None and _turns(q, n_train, len(order))
    blocks = (order,) if task.device.type == "cpu" else order.split(budget.vectors)
    shown = track(blocks, total=len(blocks), label="test blocks", show=progress)
    for block in blocks if len(blocks) == 1 else shown:
        shapes, like = q.form.basis_shapes() if turn else q.form.shapes, next(iter(q.mean.values()))
        mapped = len(block) > budget.vectors
        with held_in(folder, shapes, len(block), like, fits=not mapped) as held:
            if solve is None:
                precondition(test_task, q, block, cotangent, budget, held, turned=turn)
            else:
                for rows in slices(len(block), budget.vectors):
                    solved = solve(gradients(test_task, q, block[rows], cotangent))
                    for name, part in solved.items():
                        held.put(rows.start, name, part)
            size = chunk_size(task, q, budget, n_train, len(block), mapped=mapped)
            chunking = Chunking(size, progress=progress)
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


def gradients(task: Task, q: Posterior, indices: Tensor, cotangent: Cotangent) -> Tree:
    """∇q_j of these examples, ``[M, ...]`` by name."""
    each: dict[str, list[Tensor]] = {n: [] for n in q.mean}
    for chunk in chunks(task, q.mean, QUIET, columns=1, indices=indices):
        terms = loss_terms(task, chunk, cotangent)
        for name, part in _explicit(terms, q, len(chunk.indices), q.form.shapes).items():
            each[name].append(part)
    return {n: torch.cat(parts) for n, parts in each.items()}


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
                        into.put(start + row, name, g[:, 0] / each[name])
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

"""Influence within a memory budget.

The test examples come in blocks. For a block, the preconditioned gradients H_j = Σ ∇q_j are stored
explicitly, as many as memory permits. Then there is one sweep over the training data, whose
gradients have a factored form (G_i = d_i a_iᵀ for each layer). Each layer's term ⟨H_j, G_i⟩ is
computed in the cheaper of two orders of multiplication.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk, chunks, default_memory, examples_in_memory
from blr_analysis.backprop.plan import plan_for
from blr_analysis.backprop.terms import Term, products
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.corrections import check_finite
from blr_analysis.task import Task

DEFAULT_MEMORY = 256 * 2**20  # bytes of working memory, if the user gives no bound
MEMORY_PARTS = 8  # without a bound, one of so many parts of the machine's memory is for H_j
ANSWER_COPIES = 4  # copies of a chunk's influences that are in memory at once
BUDGET_PARTS = 6  # of the budget one part is for a chunk, and one for products

Cotangent = Callable[[Task, Chunk], Tensor]  # ∂(quantity)/∂f of every example of a chunk, [B, C]
Watch = Callable[[Tensor, list[Term]], None]  # indices of some examples, and their gradients


@dataclass(frozen=True)
class Piece:
    """A block of the influence matrix.

    Attributes:
        train: indices of training examples ``[B]``.
        test: indices of test examples ``[M]``.
        values: the influence of the former on the latter ``[B, M]``.
        squares: ∇ℓ_iᵀ Σ ∇ℓ_i of the training examples ``[B]``; None where not computed.
    """

    train: Tensor
    test: Tensor
    values: Tensor
    squares: Tensor | None = None


def matrix_of(pieces: Iterable[Piece]) -> Tensor:
    """The values of all pieces on the CPU, ``[N, M]``.

    The pieces of a block of test examples follow one another in the order of the training data.
    """
    blocks: dict[int, list[Tensor]] = {}
    for piece in pieces:
        first_test = int(piece.test[0])
        blocks.setdefault(first_test, []).append(piece.values.cpu())
    return torch.cat([torch.cat(parts) for parts in blocks.values()], dim=1)


@dataclass(frozen=True)
class Budget:
    """The parts of a memory budget.

    Attributes:
        vectors: the number of test gradients H_j in a block.
        chunk: bytes of a training chunk; None: the user gave no bound.
        room: numbers in the products of a chunk with a block.
    """

    vectors: int
    chunk: int | None
    room: int

    @classmethod
    def of(cls, task: Task, q: Posterior, n_test: int, sharers: int = 1) -> Budget:
        """The budget of one of ``sharers`` posteriors whose influences are computed together."""
        bound = task.memory_budget
        itemsize = next(iter(q.mean.values())).element_size()
        total = (bound or DEFAULT_MEMORY) // sharers
        for_gradients = total // 2
        if bound is None and task.device.type == "cpu":
            for_gradients = max(for_gradients, physical_memory() // MEMORY_PARTS // sharers)
        n_parameters = sum(m.numel() for m in q.mean.values())
        affordable = for_gradients // (n_parameters * itemsize)
        part = total // BUDGET_PARTS
        return cls(
            vectors=max(1, min(n_test, affordable)),
            chunk=None if bound is None else max(1, part),
            room=max(1, part // itemsize),
        )


def physical_memory() -> int:
    """This machine's memory in bytes; the largest integer where the system does not tell."""
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
    watch: Watch | None = None,
    watch_test: Watch | None = None,
) -> Iterator[Piece]:
    """The influence, in pieces of a chunk of training examples and a block of test examples.

    The pieces come block by block, on the task's device. After it was yielded, a piece is not
    stored here.

    Args:
        cotangent: ∂q_j/∂f of the test examples.
        train_cotangent: ∂ℓ_i/∂f of the training examples.
        squares: whether to compute ∇ℓ_iᵀ Σ ∇ℓ_i of the training examples too.
        indices, test_indices: the examples; None: all of them.
        sharers: the number of posteriors that are computed together and share the memory.
        watch, watch_test: are shown the gradients of training examples and of test examples: those
            of a training example once for each block.
    """
    test_order = torch.arange(test_task.n_data) if test_indices is None else test_indices
    n_test = len(test_order)
    n_train = task.n_data if indices is None else len(indices)
    budget = Budget.of(task, q, n_test, sharers)
    in_basis = _rotates_training_gradients(q, n_train, n_test)
    blocks = test_order.split(budget.vectors)
    has_many_blocks = len(blocks) > 1
    with_bar = track(blocks, total=len(blocks), label="test blocks", show=task.progress)
    for block in with_bar if has_many_blocks else blocks:
        vectors = preconditioned(
            test_task, q, block, cotangent, budget, in_basis=in_basis, watch=watch_test
        )
        size = chunk_size(task, q, budget, n_train, len(block))
        for chunk in chunks(task, q.mean, size=size, indices=indices, label="influence"):
            terms = loss_terms(task, chunk, train_cotangent)
            if watch is not None:
                watch(chunk.indices, terms)
            squares_of_chunk = q.form.gram(terms).flatten() if squares else None
            if in_basis:
                terms = q.form.into_basis(terms)
            values = products(terms, vectors, dtype=chunk.outputs.dtype, room=budget.room)[:, 0]
            check_finite(values, "influence")
            del terms
            yield Piece(chunk.indices, block, values, squares_of_chunk)
            del values, chunk


def chunk_size(task: Task, q: Posterior, budget: Budget, n_data: int, answer_size: int) -> int:
    """Examples per chunk, if the answer has ``answer_size`` numbers for each example."""
    itemsize = next(iter(q.mean.values())).element_size()
    plan = plan_for(task, q.mean)
    memory = budget.chunk
    if memory is None:
        wanted = itemsize * plan.floats(1) * examples_in_memory(task, plan)
        memory = default_memory(task, DEFAULT_MEMORY // BUDGET_PARTS, wanted)
    by_gradients = plan.chunk_size(1, memory, itemsize, n_data)
    by_answer = budget.room // (ANSWER_COPIES * answer_size)
    return max(1, min(by_gradients, by_answer))


def loss_terms(task: Task, chunk: Chunk, cotangent: Cotangent = loss_gradient) -> list[Term]:
    """∇ℓ_i of a chunk in factored form, one gradient per example."""
    return chunk.terms(cotangent(task, chunk).unsqueeze(1), last=True)


def preconditioned(
    task: Task,
    q: Posterior,
    indices: Tensor,
    cotangent: Cotangent,
    budget: Budget,
    *,
    in_basis: bool = False,
    watch: Watch | None = None,
) -> Tree:
    """H_j = Σ ∇q_j of these examples, ``[M, …]`` by name.

    ``in_basis`` gives their coordinates in the basis of the posterior's structure, without it they
    are by the model's own weights. ``watch`` is shown the gradients ∇q_j.
    """
    shapes = q.form.basis_shapes() if in_basis else q.form.shapes
    some_weight = next(iter(q.mean.values()))
    solved = {name: some_weight.new_zeros((len(indices), *shape)) for name, shape in shapes.items()}
    precision = q.form.basis_precision if in_basis else q.form.per_weight
    is_diagonal = precision is not None
    n_parameters = sum(m.numel() for m in q.mean.values())
    answer_size = 1 if is_diagonal else n_parameters
    size = chunk_size(task, q, budget, len(indices), answer_size)
    start = 0
    for chunk in chunks(task.quiet, q.mean, size=size, indices=indices):
        terms = loss_terms(task, chunk, cotangent)
        if watch is not None:
            watch(chunk.indices, terms)
        end = start + len(chunk.indices)
        del chunk
        rows = {name: block[start:end] for name, block in solved.items()}
        if precision is not None:
            _divide(terms, q, precision, rows)
        else:
            _solve(terms, q, rows, in_basis=in_basis)
        start = end
    return solved


def _divide(terms: list[Term], q: Posterior, precision: Tree, rows: Tree) -> None:
    """Write the gradients over a diagonal precision into ``rows``, one example at a time."""
    n_examples = len(next(iter(rows.values())))
    for row in range(n_examples):
        terms_of_example = [term.part(slice(row, row + 1)) for term in terms]
        for term in q.form.into_basis(terms_of_example):
            for name, gradient in term.jacobian().items():
                rows[name][row] = gradient[0, 0].div_(precision[name])


def _solve(terms: list[Term], q: Posterior, rows: Tree, *, in_basis: bool) -> None:
    """Write Σ times the gradients into ``rows``, all examples of a chunk together."""
    n_examples = len(next(iter(rows.values())))
    gradients = _explicit(q.form.into_basis(terms), q, n_examples, q.form.basis_shapes())
    solved = q.form.basis_solve(gradients)
    if not in_basis:
        solved = q.form.backward(solved)
    for name, values in solved.items():
        rows[name][:] = values


def _explicit(
    terms: list[Term], q: Posterior, n_examples: int, shapes: Mapping[str, tuple[int, ...]]
) -> Tree:
    """The gradients ``[B, …]`` by name; zeros for weights that the outputs do not depend on."""
    gradients = {name: g[:, 0] for term in terms for name, g in term.jacobian().items()}
    some_weight = next(iter(q.mean.values()))
    for name, shape in shapes.items():
        if name not in gradients:
            gradients[name] = some_weight.new_zeros((n_examples, *shape))
    return {name: gradients[name] for name in shapes}


def _rotates_training_gradients(q: Posterior, n_train: int, n_test: int) -> bool:
    """Whether it is cheaper to rotate training gradients into the basis than to rotate H_j back."""
    cost_of_factored, cost_of_explicit = q.form.rotation_cost()
    return n_train * cost_of_factored <= n_test * cost_of_explicit

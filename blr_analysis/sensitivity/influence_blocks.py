"""Influence in blocks: never more than a memory budget, never a gradient formed twice.

For a block of test examples the preconditioned gradients H_j = Σ ∇q_j are held explicitly, as
many as fit; the training data pass by once per block in factored form (G_i = d_i a_iᵀ), and each
layer's share ⟨H_j, G_i⟩ is computed by the cheaper of two orders of multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk, chunks
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.plan import plan_for
from blr_analysis.backprop.terms import Rows, Term
from blr_analysis.checks import positive_int
from blr_analysis.errors import ModelError
from blr_analysis.posterior.basis import basis_shapes, basis_solve, in_basis, rotation_cost
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Spectral, Tree
from blr_analysis.progress import track
from blr_analysis.task import Task

DEFAULT_MEMORY = 256 * 2**20  # bytes of working memory where the user names no bound
CACHED = 2**18  # numbers made and used at once
ANSWERS = 4  # copies of a chunk's share of an answer that are held at once
SKINNY = 3  # a product of few rows with very long ones takes this many times its multiplications

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
    return task.likelihood.error(chunk.outputs, chunk.targets)


def pieces(
    task: Task,
    q: Posterior,
    test_task: Task,
    *,
    cotangent: Cotangent = loss_gradient,
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
            indices=indices,
            chunk_size=chunk_size(task, q, budget, n_train, len(block)),
            label="influence",
            progress=progress,
        ):
            terms = loss_terms(task, chunk)
            terms = in_basis(q.form, terms) if turn else terms
            values = contracted(terms, held, len(block), budget.room)
            check_finite(values)
            del terms
            yield Piece(chunk.indices, block, values)
            del values, chunk
        del held  # before the next block is made


def chunk_size(task: Task, q: Posterior, budget: Budget, n: int, numbers: int) -> int:
    """Examples per chunk, where each also has so many ``numbers`` in an answer."""
    itemsize = next(iter(q.mean.values())).element_size()
    fits = plan_for(task, q.mean).chunk_size(1, budget.chunk, itemsize, n)
    return max(1, min(fits, budget.room // (ANSWERS * numbers)))


def loss_terms(task: Task, chunk: Chunk) -> list[Term]:
    """∇ℓ_i of a chunk in factored form, one column."""
    return chunk.terms(loss_gradient(task, chunk).unsqueeze(1))


def preconditioned(
    task: Task, q: Posterior, indices: Tensor, cotangent: Cotangent, budget: Budget, *, turned: bool
) -> Tree:
    """Σ ∇q_j of these examples, ``[M, ...]`` by name: in the basis if ``turned``, else outside."""
    shapes = basis_shapes(q.form) if turned else q.form.shapes
    first = next(iter(q.mean.values()))
    held = {n: first.new_zeros((len(indices), *s)) for n, s in shapes.items()}
    width = sum(m.numel() for m in q.mean.values())
    size = chunk_size(task, q, budget, len(indices), width)
    start = 0
    for chunk in chunks(task, q.mean, indices=indices, chunk_size=size, progress=False):
        terms = in_basis(q.form, chunk.terms(cotangent(task, chunk).unsqueeze(1)))
        stop = start + len(chunk.indices)
        solved = basis_solve(q.form, _explicit(terms, q, len(chunk.indices)))
        if not turned and isinstance(q.form, Spectral):
            solved = q.form.backward(solved)
        for name, part in solved.items():
            held[name][start:stop] = part
        start = stop
    return held


def _explicit(terms: list[Term], q: Posterior, n: int) -> Tree:
    """The gradients ``[B, ...]`` by name in the basis, zero where the model does not reach."""
    found = {name: g[:, 0] for term in terms for name, g in term.jacobian().items()}
    like = next(iter(q.mean.values()))
    return {
        name: found[name] if name in found else like.new_zeros((n, *shape))
        for name, shape in basis_shapes(q.form).items()
    }


def _turns(q: Posterior, n_train: int, n_test: int) -> bool:
    """Whether training gradients are rotated, rather than test gradients rotated back."""
    factored, explicit = rotation_cost(q.form)
    return n_train * factored <= n_test * explicit


def contracted(terms: list[Term], held: Mapping[str, Tensor], n_test: int, room: int) -> Tensor:
    """Σ_layers ⟨G_i, H_j⟩ of a training chunk and a block of test examples, ``[B, M]``."""
    total: Tensor | None = None
    for term in terms:
        part = _share(term, held, n_test, room)
        total = part if total is None else total.add_(part)
    if total is None:
        raise ModelError("no parameter of the posterior takes part in the model")
    return total


def _share(term: Term, held: Mapping[str, Tensor], m: int, room: int) -> Tensor:
    if isinstance(term, Rows):
        return _rows_share(term, held[term.name], room)
    if isinstance(term, Outer) and _keeps_factors(term, m):
        return _factored_share(term, held, min(CACHED, room))
    if isinstance(term, Outer):
        b = len(term.inputs)
        size = max(1, room // (2 * sum(held[n][0].numel() for n in term.names)))
        parts = [_part(term, slice(s, s + size)).jacobian() for s in range(0, b, size)]
        return torch.cat([_explicit_share(part, held) for part in parts])
    return _explicit_share(term.jacobian(), held)


def _part(term: Outer, rows: slice) -> Outer:
    grads = [d[rows] for d in term.grads]
    return Outer(term.weight, term.bias, term.layout, term.inputs[rows], grads)


def _keeps_factors(term: Outer, m: int) -> bool:
    """Whether Σ_t d_tᵀ H a_t takes less than forming G and multiplying it with H."""
    t, o, i = term.positions, term.layout.rows, term.layout.columns
    if term.layout.groups > 1 or term.weight is None:
        return False
    return t * m * (o * i + min(o, i)) <= t * o * i + SKINNY * m * o * i


def _factored_share(term: Outer, held: Mapping[str, Tensor], cached: int) -> Tensor:
    assert term.weight is not None
    a, d = term.inputs[:, 0], term.grads[0][:, 0]  # [B, T, I], [B, T, O]
    matrices = term.layout.matrix(held[term.weight])[:, 0]  # [M, O, I]
    if d.shape[-1] > a.shape[-1]:  # the longer side is summed over first
        a, d, matrices = d, a, matrices.mT
    b, t, o = d.shape
    found = d.new_empty(b, len(matrices))
    size = max(1, cached // (b * t * o))
    for start in range(0, len(matrices), size):
        some = matrices[start : start + size]
        product = a.reshape(b * t, -1) @ some.reshape(-1, some.shape[-1]).mT
        product = product.view(b, t, len(some), o)
        if t == 1:
            part = torch.bmm(product[:, 0], d.mT).squeeze(-1)
        else:
            part = torch.einsum("btmo,bto->bm", product, d)
        found[:, start : start + size] = part
    if term.bias is not None:
        found.addmm_(d_sum(term), held[term.bias].flatten(1).mT)
    return found


def d_sum(term: Outer) -> Tensor:
    """The gradient of a term's bias, ``[B, g·O]``."""
    return term.grads[0].sum(2).flatten(1)


def _explicit_share(gradients: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Tensor:
    parts = [
        g.reshape(len(g), -1) @ held[n].reshape(len(held[n]), -1).mT for n, g in gradients.items()
    ]
    return torch.stack(parts).sum(0)


def _rows_share(term: Rows, held: Tensor, room: int) -> Tensor:
    d = term.grads[0]  # [B, T, O]
    size = max(1, room // (2 * d.numel()))
    parts = [torch.einsum("mbto,bto->bm", some[:, term.ids], d) for some in held.split(size)]
    return torch.cat(parts, dim=1)


def check_finite(values: Tensor) -> None:
    """Raise :class:`ModelError` where an influence overflowed."""
    if not bool(torch.isfinite(values).all()):
        raise ModelError(
            "the influence overflows: the posterior's variances or the model's gradients are too "
            f"large for {str(values.dtype).removeprefix('torch.')}; raise prior_precision or use "
            "float64"
        )

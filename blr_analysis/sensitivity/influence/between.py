"""Influence between the training examples of a network and test examples, piece by piece.

    influence[i, j] = τ · mean_t ∇ℓ_j(t)ᵀ Σ(t) ∇ℓ_i(t)

The mean is over the checkpoints t of the posterior's run, and over several runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunk, chunks
from blr_analysis.backprop.record import indices_of_rank
from blr_analysis.errors import InputError
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.corrections import self_influence
from blr_analysis.sensitivity.door import check_test
from blr_analysis.sensitivity.influence.blocks import (
    Cotangent,
    Piece,
    loss_gradient,
    physical_memory,
    pieces,
)
from blr_analysis.sensitivity.influence.results import (
    Best,
    Influence,
    Normalize,
    Pairs,
    TopInfluence,
    check_k,
    joined,
    quantity_of,
    rooted,
)
from blr_analysis.sensitivity.other_units import unlike_training
from blr_analysis.sensitivity.training_errors import mean_errors
from blr_analysis.task import Task

Measure = str | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """One posterior of a run.

    Attributes:
        task, test_task: the training and test examples under the model with its buffers.
        posterior: the posterior at this checkpoint.
        train_cotangent: ∂ℓ_i/∂f of the training examples.
        weight: the factor of its influence in the sum over checkpoints.
    """

    task: Task
    test_task: Task
    posterior: Posterior
    train_cotangent: Cotangent
    weight: float


def influence_between(
    subject: Any, test_task: Any, *, measure: Measure, normalize: Normalize, k: int | None
) -> Influence | TopInfluence:
    """The matrix ``[N_train, N_test]`` of a network, or its k largest entries of either sign."""
    quantity = quantity_of(normalize)
    cotangent = cotangent_of(measure)
    checkpoints = checkpoints_of(subject, test_task, normalize)
    n_checkpoints = len(checkpoints)
    sweeps = [_pieces_of(c, cotangent, normalize, n_checkpoints) for c in checkpoints]
    test_under_model = checkpoints[-1].test_task
    pairs = Pairs(
        subject=subject,
        test=test_under_model,
        measure=measure if isinstance(measure, str) else measure.__name__,
        quantity=quantity,
        checkpoints=n_checkpoints,
        unlike=unlike_training(subject.task, test_under_model, subject.posterior.mean),
    )
    if k is not None:
        check_k(k, subject.n)
        return _largest(_summed(sweeps), k, subject.n, pairs)
    n_test = test_under_model.n_data
    itemsize = next(iter(subject.posterior.mean.values())).element_size()
    _check_room(subject.n, n_test, itemsize)
    matrix = _matrix(_summed(sweeps), subject.n, n_test)
    return Influence.of(matrix, pairs)


def checkpoints_of(subject: Any, test_task: Any, normalize: Normalize) -> list[Checkpoint]:
    """Every posterior of every run, each with its weight in the mean."""
    checkpoints: list[Checkpoint] = []
    for task, posterior in subject.runs:
        temperature = 1.0 if normalize else posterior.temperature
        weight = temperature / (len(posterior.run) * len(subject.runs))
        for q in posterior.run:
            at_buffers = task.holding(q.buffers)
            if checkpoints:  # one progress bar is enough
                at_buffers = at_buffers.quiet
            train_cotangent = loss_gradient if posterior.earlier else mean_errors(at_buffers, q)
            test_at_buffers = check_test(test_task, at_buffers, "test_task")
            checkpoints.append(Checkpoint(at_buffers, test_at_buffers, q, train_cotangent, weight))
    return checkpoints


def _matrix(summed: Iterator[Piece], n_train: int, n_test: int) -> Tensor:
    """The whole influence ``[N_train, N_test]`` on the CPU."""
    matrix: Tensor | None = None
    for piece in summed:
        if matrix is None:
            matrix = piece.values.new_zeros((n_train, n_test), device="cpu")
        columns = slice(int(piece.test[0]), int(piece.test[-1]) + 1)
        matrix[ranks.rows(piece.train), columns] = piece.values.cpu()
    assert matrix is not None
    ranks.total([matrix])
    return matrix


def _largest(summed: Iterator[Piece], k: int, n_train: int, pairs: Pairs) -> TopInfluence:
    """The k largest and k smallest influences on every test example."""
    blocks: dict[int, Best] = {}
    for piece in summed:
        first_test = int(piece.test[0])
        blocks.setdefault(first_test, Best(k)).add(piece.train, piece.values)
    for best in blocks.values():
        best.gather_from_ranks(n_train)
    return joined(list(blocks.values()), pairs)


def _summed(sweeps: Sequence[Iterator[Piece]]) -> Iterator[Piece]:
    """The sum over the checkpoints, piece by piece; all of them have the same pieces."""
    for total, *further in zip(*sweeps, strict=True):
        for piece in further:
            total.values.add_(piece.values)
        yield total


def _pieces_of(
    checkpoint: Checkpoint, cotangent: Cotangent, normalize: Normalize, sharers: int
) -> Iterator[Piece]:
    """One checkpoint's term of the sum, piece by piece.

    ``sharers`` is the number of checkpoints, which share the memory.
    """
    task = checkpoint.task
    test_task = checkpoint.test_task
    q = checkpoint.posterior
    test_roots: Tensor | None = None
    if normalize == "cosine":
        sweep = chunks(test_task.quiet, q.mean, columns=1)
        squares = [self_influence(q, chunk, cotangent(test_task, chunk)).cpu() for chunk in sweep]
        test_roots = rooted(torch.cat(squares))
    for piece in pieces(
        task,
        q,
        test_task,
        cotangent=cotangent,
        train_cotangent=checkpoint.train_cotangent,
        sharers=sharers,
        squares=bool(normalize),
        indices=indices_of_rank(task, q.mean),
    ):
        piece.values.mul_(checkpoint.weight)
        if normalize:
            piece.values.div_(rooted(piece.squares).unsqueeze(1).to(piece.values))
        if test_roots is not None:
            piece.values.div_(test_roots[piece.test].to(piece.values))
        yield piece


def _check_room(n_train: int, n_test: int, itemsize: int) -> None:
    """Raise if the influence would take more than this machine's memory."""
    size = n_train * n_test * itemsize
    memory = physical_memory()
    if size > memory:
        raise InputError(
            f"influence [{n_train:,}, {n_test:,}] takes {size / 2**30:,.0f} of "
            f"{memory / 2**30:,.0f} GiB; use k="
        )


def cotangent_of(measure: Measure) -> Cotangent:
    """The function (task, chunk) → ∂(measure)/∂f of every example of a chunk ``[B, C]``.

    Raises:
        InputError: the measure is neither "loss" nor a function. The function that is returned
            raises it where the measure is not one number per example, or has no gradient.
    """
    if isinstance(measure, str) and measure == "loss":
        return loss_gradient
    if not callable(measure):
        raise InputError(f'measure must be "loss" or (outputs, targets) -> [B], got {measure!r}')

    def gradient(task: Task, chunk: Chunk) -> Tensor:
        with torch.enable_grad():
            outputs = chunk.outputs.detach().clone().requires_grad_()
            values: Any = measure(outputs, chunk.targets)
            _check_measure(values, outputs)
            (gradient_of_sum,) = torch.autograd.grad(values.sum(), outputs)
        return gradient_of_sum.detach()

    return gradient


def _check_measure(values: Any, outputs: Tensor) -> None:
    """Refuse values of a user's measure that are not one number per example, with a gradient."""
    if not isinstance(values, Tensor) or values.shape != outputs.shape[:1]:
        result = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"measure must give one number per example; got {result}")
    if not values.requires_grad:
        raise InputError(
            "measure has no gradient in the outputs (a count, or detached): use a smooth one, as "
            "the loss or a probability"
        )

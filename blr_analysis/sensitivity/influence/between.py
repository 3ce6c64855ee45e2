"""Influence between the training examples of a network and test examples, piece by piece.

    influence[i, j] = τ · mean_t ∇ℓ_j(t)ᵀ Σ(t) ∇ℓ_i(t)

over the checkpoints t of the posterior's run, and the mean over several runs.
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
    """One posterior of a run, and the tasks under the model with its buffers.

    Attributes:
        train_cotangent: ∂ℓ_i/∂f of the training examples.
        weight: of its influence in the sum.
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
    sweeps = [_pieces_of(c, cotangent, normalize, len(checkpoints)) for c in checkpoints]
    test_under_model = checkpoints[-1].test_task
    measure_name = measure if isinstance(measure, str) else measure.__name__
    unlike = unlike_training(subject.task, test_under_model, subject.posterior.mean)
    pairs = Pairs(subject, test_under_model, measure_name, quantity, len(checkpoints), unlike)
    if k is not None:
        check_k(k, subject.n)
        return _largest(_summed(sweeps), k, subject.n, pairs)
    itemsize = next(iter(subject.posterior.mean.values())).element_size()
    _check_room(subject.n, test_under_model.n_data, itemsize)
    matrix = _matrix(_summed(sweeps), subject.n, test_under_model.n_data)
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
    blocks: dict[int, Best] = {}
    for piece in summed:
        first_test = int(piece.test[0])
        blocks.setdefault(first_test, Best(k)).add(piece.train, piece.values)
    for best in blocks.values():
        best.shared(n_train)
    return joined(list(blocks.values()), pairs)


def _summed(sweeps: Sequence[Iterator[Piece]]) -> Iterator[Piece]:
    """Piece by piece the sum over the checkpoints: all cut the matrix at the same places."""
    for first, *others in zip(*sweeps, strict=True):
        for other in others:
            first.values.add_(other.values)
        yield first


def _pieces_of(
    checkpoint: Checkpoint, cotangent: Cotangent, normalize: Normalize, sharers: int
) -> Iterator[Piece]:
    """The share of one checkpoint in the answer, piece by piece."""
    task, q, test_task = checkpoint.task, checkpoint.posterior, checkpoint.test_task
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
    """Raise unless this machine's memory could hold the answer."""
    size, memory = n_train * n_test * itemsize, physical_memory()
    if size > memory:
        raise InputError(
            f"influence [{n_train:,}, {n_test:,}] takes {size / 2**30:,.0f} of "
            f"{memory / 2**30:,.0f} GiB; use k="
        )


def cotangent_of(measure: Measure) -> Cotangent:
    """∂(measure)/∂f of every example of a chunk.

    Raises:
        InputError: an unknown word, or a function that does not give one number per example, or
            none that has a gradient.
    """
    if isinstance(measure, str) and measure == "loss":
        return loss_gradient
    if not callable(measure):
        raise InputError(f'measure must be "loss" or (outputs, targets) -> [B], got {measure!r}')

    def gradient(task: Task, chunk: Chunk) -> Tensor:
        with torch.enable_grad():
            outputs = chunk.outputs.detach().clone().requires_grad_()
            values: Any = measure(outputs, chunk.targets)
            if not isinstance(values, Tensor) or values.shape != outputs.shape[:1]:
                got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise InputError(f"measure must give one number per example; got {got}")
            if not values.requires_grad:
                raise InputError(
                    "measure has no gradient in the outputs (a count, or detached): use a smooth "
                    "one, as the loss or a probability"
                )
            (slope,) = torch.autograd.grad(values.sum(), outputs)
        return slope.detach()

    return gradient

"""The loss of a task at given weights: its sum and gradient, and how well the model does.

L(θ) = Σ_i ℓ_i(θ),    ∇L(θ) = Σ_i J_iᵀ e_i
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from blr_analysis import ranks
from blr_analysis.backprop.record import examples_per_pass, indices_of_rank, leaves_of
from blr_analysis.backprop.tree import Tree
from blr_analysis.backprop.truth import no_backward_inside, not_differentiable
from blr_analysis.errors import ModelError
from blr_analysis.likelihoods import Likelihood, TokenCategorical
from blr_analysis.task import Task

Watch = Callable[[Tensor, Tensor, Tensor], None]  # outputs, targets and indices of a batch


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Losses ``[M]`` in nats and hits ``[M]`` on a set of examples.

    Hits are None for regression, and NaN for examples that do not count (``ignore_index``).
    """

    losses: Tensor
    correct: Tensor | None

    def __repr__(self) -> str:
        facts = [f"{len(self.losses):,}", f"nll={self.nll:.4g}"]
        if self.accuracy is not None:
            facts.append(f"accuracy={self.accuracy:.4g}")
        return f"{type(self).__name__}({', '.join(facts)})"

    @property
    def loss(self) -> float:
        """Σ_i ℓ_i."""
        return float(self.losses.double().sum())

    @property
    def counted(self) -> Tensor:
        """The losses of the examples that count."""
        return self.losses if self.correct is None else self.losses[~self.correct.isnan()]

    @property
    def nll(self) -> float:
        return float(self.counted.double().mean())

    @property
    def weights(self) -> Tensor:
        """How much each example counts in the accuracy."""
        assert self.correct is not None
        return (~self.correct.isnan()).to(self.losses)

    @property
    def accuracy(self) -> float | None:
        return None if self.correct is None else float(self.correct.double().nanmean())

    def row(self, name: str) -> dict[str, float]:
        """Columns ``{name}_nll`` and ``{name}_accuracy``, NaN for None, of a table."""
        accuracy = math.nan if self.accuracy is None else self.accuracy
        return {f"{name}_nll": self.nll, f"{name}_accuracy": accuracy}


class PerToken:
    """Figures per token, from losses that are summed over the tokens of each sequence.

    >>> evaluation = SequenceEvaluation(torch.tensor([0.0, 4.0]), None, torch.tensor([1, 3]))
    >>> evaluation.nll_per_token
    1.0
    >>> losses = torch.tensor([0.0, math.log(9.0)])
    >>> SequenceEvaluation(losses, None, torch.tensor([1, 1])).perplexity
    3.0
    """

    losses: Tensor
    tokens: Tensor

    @property
    def nll_per_token(self) -> float:
        """Σ losses / Σ tokens, in nats."""
        return float(self.losses.double().sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp(Σ losses / Σ tokens); inf where that is beyond float64."""
        return float((self.losses.double().sum() / self.tokens.sum()).exp())


@dataclass(frozen=True, repr=False)
class SequenceEvaluation(PerToken, Evaluation):
    """Losses of sequences, summed over their tokens, and the fraction of tokens that are right.

    Attributes:
        nll: the mean of ``losses``, in nats per SEQUENCE.
        nll_per_token, perplexity: Σ losses / Σ tokens in nats per token, and exp of it.
        accuracy: the fraction of tokens that the model predicts right, of all that count.
        tokens: how many tokens of each sequence count, ``[M]``.
    """

    tokens: Tensor

    @property
    def counted(self) -> Tensor:
        return self.losses

    @property
    def weights(self) -> Tensor:
        return self.tokens.to(self.losses)

    @property
    def accuracy(self) -> float | None:
        if self.correct is None:
            return None
        right = (self.correct.double() * self.tokens).sum()
        return float(right / self.tokens.sum())


class Tally:
    """Collects losses, hits and targets batch by batch, on the CPU."""

    def __init__(self, likelihood: Likelihood) -> None:
        self._likelihood = likelihood
        self._rows: list[tuple[Tensor, ...]] = []
        self._targets: list[Tensor] = []

    def add(self, outputs: Tensor, targets: Tensor, indices: Tensor) -> None:
        likelihood = self._likelihood.at(indices)
        losses = likelihood.nll(outputs, targets)
        hits = likelihood.correct(outputs, targets)
        is_counted = likelihood.counted(targets)
        tokens = None if is_counted is None else is_counted.sum(-1)
        rows = (losses, hits, tokens)
        self._rows.append(tuple(row.cpu() for row in rows if row is not None))
        self._targets.append(targets.cpu())

    @property
    def evaluation(self) -> Evaluation:
        losses, *hits_and_tokens = map(torch.cat, zip(*self._rows, strict=True))
        if self._likelihood.is_sequence:
            return SequenceEvaluation(losses, *hits_and_tokens)
        hits = hits_and_tokens[0] if hits_and_tokens else None
        return Evaluation(losses, hits)

    @property
    def targets(self) -> Tensor:
        """All targets; those of sequences as one padded table ``[M, T]``."""
        likelihood = self._likelihood.plain
        if not isinstance(likelihood, TokenCategorical):
            return torch.cat(self._targets)
        longest = max(targets.shape[1] for targets in self._targets)
        padded = [
            pad(targets, (0, longest - targets.shape[1]), value=likelihood.ignore_index)
            for targets in self._targets
        ]
        return torch.cat(padded)


@torch.no_grad()
def evaluated(task: Task, params: Mapping[str, Tensor]) -> tuple[Evaluation, Tensor]:
    """Losses and hits of the whole task at these parameters, and its targets, on the CPU.

    Raises:
        ModelError, DataError: as :meth:`Task.run`.
    """
    tally = Tally(task.likelihood)
    with task.evaluation():
        for indices, batch in task.batches():
            outputs, targets = task.run(batch, params, indices)
            tally.add(outputs, targets, indices)
    return tally.evaluation, tally.targets


def batch_gradient(
    task: Task, leaves: Mapping[str, Tensor], indices: Tensor, errors: Tensor | None = None
) -> tuple[Tensor, Tensor, Tree | None]:
    """Outputs, targets, and Σ_i J_iᵀ e_i by leaf (None where the outputs depend on no leaf).

    Args:
        errors: ``[B, C]``, in place of the e_i = ∂ℓ_i/∂f.

    Raises:
        ModelError: autograd cannot differentiate the model, or would leave out what its backward
            pass differentiates itself.
    """
    with torch.enable_grad():
        outputs, targets = task.at(leaves).run(indices)
    if not outputs.requires_grad:
        return outputs, targets, None
    if errors is None:
        errors = task.likelihood.at(indices).error(outputs.detach(), targets)
    try:
        with no_backward_inside(task, leaves):
            gradients = torch.autograd.grad(
                outputs, list(leaves.values()), errors, allow_unused=True, materialize_grads=True
            )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise not_differentiable(error) from error
    return outputs.detach(), targets, dict(zip(leaves, gradients, strict=True))


def loss_and_gradient(
    task: Task,
    params: Mapping[str, Tensor],
    indices: Tensor | None = None,
    errors: Tensor | None = None,
    *,
    watch: Watch | None = None,
) -> tuple[Tree, float]:
    """Σ_i ∇ℓ_i and Σ_i ℓ_i in nats, from one forward and one backward pass over the examples.

    Args:
        indices: the examples to sum over; None: all.
        errors: ``[M, C]``, in place of the e_i = ∂ℓ_i/∂f.
        watch: is shown the outputs, targets and indices of every batch, on every rank.

    Raises:
        ModelError, DataError: as :meth:`Task.run`; outputs that autograd cannot differentiate.
    """
    leaves = leaves_of(params)
    gradient = {name: torch.zeros_like(p) for name, p in params.items()}
    loss = 0.0
    order = torch.arange(task.n_data) if indices is None else indices
    positions = torch.arange(len(order))
    if watch is None:
        positions = indices_of_rank(task, params, positions)
    for batch in _passes(task, params, order, positions):
        batch_errors = None if errors is None else errors[batch]
        outputs, targets, share = batch_gradient(task, leaves, order[batch], batch_errors)
        losses = task.likelihood.at(order[batch]).nll(outputs, targets)
        loss += float(losses.double().sum())
        if watch is not None:
            watch(outputs, targets, order[batch])
        if share is not None:
            for name, part in share.items():
                gradient[name] += part
    if watch is None:
        sums = torch.tensor([loss], dtype=torch.float64)
        ranks.total([*gradient.values(), sums])
        loss = float(sums)
    return gradient, loss


def _passes(
    task: Task, params: Mapping[str, Tensor], order: Tensor, positions: Tensor
) -> Sequence[Tensor]:
    """Positions in ``order``, as many at a time as one pass takes."""
    if not len(positions):
        return ()
    return positions.split(examples_per_pass(task, params, order[positions]))


def evaluated_gradient(task: Task, params: Mapping[str, Tensor]) -> tuple[Evaluation, Tree]:
    """:func:`evaluated` and Σ_i ∇ℓ_i from the same passes.

    Raises:
        ModelError: also where the outputs do not depend on the parameters.
    """
    tally = Tally(task.likelihood)
    gradient, _ = loss_and_gradient(task, params, watch=tally.add)
    check_connected(task, params, gradient)
    return tally.evaluation, gradient


def check_connected(
    task: Task, params: Mapping[str, Tensor], gradient: Mapping[str, Tensor]
) -> None:
    """Raise :class:`ModelError` where a gradient is 0 as no parameter reaches the outputs."""
    is_zero = not any(bool(g.any()) for g in gradient.values())
    if is_zero and not depends(task, params):
        raise disconnected()


def disconnected() -> ModelError:
    return ModelError(
        "the outputs do not depend on the trainable parameters; is there a torch.no_grad or "
        "a detach in forward?"
    )


def depends(task: Task, params: Mapping[str, Tensor]) -> bool:
    """Whether the first example's outputs are connected to any of the parameters."""
    *_, gradient = batch_gradient(task, leaves_of(params), torch.tensor([0]))
    return gradient is not None

"""The loss of a task at given weights: its sum and gradient, and how well the model does.

L(θ) = Σ_i ℓ_i(θ),    ∇L(θ) = Σ_i J_iᵀ e_i
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from blr_analysis import ranks
from blr_analysis.backprop.record import fetched, shared, together
from blr_analysis.backprop.truth import no_backward_inside, not_differentiable
from blr_analysis.errors import ModelError
from blr_analysis.likelihoods import Likelihood, TokenCategorical
from blr_analysis.task import Task

Watch = Callable[[Tensor, Tensor, Tensor], None]  # outputs, targets and indices of a batch


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Losses ``[M]`` in nats and hits ``[M]`` on a set of examples: None for regression, NaN of
    examples that do not count (``ignore_index``)."""

    losses: Tensor
    correct: Tensor | None

    def __repr__(self) -> str:
        hits = "" if self.accuracy is None else f", accuracy={self.accuracy:.4g}"
        return f"{type(self).__name__}({len(self.losses):,}, nll={self.nll:.4g}{hits})"

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
    """Of losses that are summed over the tokens of each sequence.

    >>> one = SequenceEvaluation(torch.tensor([0.0, math.log(9.0)]), None, torch.tensor([1, 1]))
    >>> one.perplexity
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
    """Of sequences: losses summed over their tokens, the fraction of tokens that are right.

    Attributes:
        nll: the mean of ``losses``, in nats per SEQUENCE.
        nll_per_token, perplexity: Σ losses / Σ tokens in nats per token, and exp of it.
        accuracy: of all tokens that count.
        tokens: how many count, ``[M]``.
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
        return float((self.correct.double() * self.tokens).sum() / self.tokens.sum())


class Tally:
    """Losses, hits and targets of the batches that were seen, on the CPU."""

    def __init__(self, likelihood: Likelihood) -> None:
        self._likelihood = likelihood
        self._seen: list[tuple[Tensor, ...]] = []
        self._targets: list[Tensor] = []

    def add(self, f: Tensor, y: Tensor, indices: Tensor) -> None:
        likelihood = self._likelihood.at(indices)
        hits, counted = likelihood.correct(f, y), likelihood.counted(y)
        tokens = None if counted is None else counted.sum(-1)
        rows = (likelihood.nll(f, y), hits, tokens)
        self._seen.append(tuple(t.cpu() for t in rows if t is not None))
        self._targets.append(y.cpu())

    @property
    def evaluation(self) -> Evaluation:
        losses, *rest = (torch.cat(part) for part in zip(*self._seen, strict=True))
        if self._likelihood.is_sequence:
            return SequenceEvaluation(losses, *rest)
        return Evaluation(losses, rest[0] if rest else None)

    @property
    def targets(self) -> Tensor:
        """Of sequences one padded table ``[M, T]``."""
        rows = self._targets
        if isinstance(likelihood := self._likelihood.plain, TokenCategorical):
            longest, empty = max(y.shape[1] for y in rows), likelihood.ignore_index
            rows = [pad(y, (0, longest - y.shape[1]), value=empty) for y in rows]
        return torch.cat(rows)


def evaluated(task: Task, params: Mapping[str, Tensor]) -> tuple[Evaluation, Tensor]:
    """Losses and hits of the whole task at these parameters, and its targets, on the CPU.

    Raises:
        ModelError, DataError: as :meth:`Task.run`.
    """
    tally = Tally(task.likelihood)
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches():
            tally.add(*task.run(batch, params, indices), indices)
    return tally.evaluation, tally.targets


def batch_gradient(
    task: Task, leaves: Mapping[str, Tensor], indices: Tensor, errors: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor] | None]:
    """Outputs, targets, and Σ_i J_iᵀ e_i by leaf (None where the outputs depend on no leaf), of a
    model in eval mode.

    Raises:
        ModelError: autograd cannot differentiate the model, or would leave out what its backward
            pass differentiates itself.
    """
    with torch.enable_grad():
        f, y = task.run(fetched(task, indices), leaves, indices)
        if not f.requires_grad:
            return f, y, None
        e = task.likelihood.at(indices).error(f.detach(), y) if errors is None else errors
        try:
            with no_backward_inside(task, leaves):
                grads = torch.autograd.grad(
                    f, list(leaves.values()), e, allow_unused=True, materialize_grads=True
                )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise not_differentiable(error) from error
    return f.detach(), y, list(grads)


def loss_and_gradient(
    task: Task,
    params: Mapping[str, Tensor],
    indices: Tensor | None = None,
    errors: Tensor | None = None,
    *,
    watch: Watch | None = None,
) -> tuple[dict[str, Tensor], float]:
    """Σ_i ∇ℓ_i and Σ_i ℓ_i in nats, from one forward and one backward pass over the examples.

    Args:
        indices: the examples to sum over; None: all.
        errors: ``[M, C]``, in place of the e_i = ∂ℓ_i/∂f.
        watch: is shown the outputs, targets and indices of every batch, on every rank.

    Raises:
        ModelError, DataError: as :meth:`Task.run`; outputs that autograd cannot differentiate.
    """
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    total = {n: torch.zeros_like(p) for n, p in params.items()}
    loss = 0.0
    order = torch.arange(task.n_data) if indices is None else indices
    mine = torch.arange(len(order)) if watch else shared(task, params, torch.arange(len(order)))
    pieces = mine.split(together(task, params, order[mine])) if len(mine) else ()
    with task.evaluation():
        for piece in pieces:
            chosen, e = order[piece], None if errors is None else errors[piece]
            f, y, grads = batch_gradient(task, leaves, chosen, e)
            loss += float(task.likelihood.at(chosen).nll(f, y).double().sum())
            if watch is not None:
                watch(f, y, chosen)
            for whole, grad in zip(total.values(), grads or (), strict=grads is not None):
                whole += grad
    if watch is None:
        sums = torch.tensor([loss], dtype=torch.float64)
        ranks.total([*total.values(), sums])
        loss = float(sums)
    return total, loss


def evaluated_gradient(
    task: Task, params: Mapping[str, Tensor]
) -> tuple[Evaluation, dict[str, Tensor]]:
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
    if not any(bool(g.any()) for g in gradient.values()) and not depends(task, params):
        raise disconnected()


def disconnected() -> ModelError:
    return ModelError(
        "the outputs do not depend on the trainable parameters; is there a torch.no_grad or "
        "a detach in forward?"
    )


def depends(task: Task, params: Mapping[str, Tensor]) -> bool:
    """Whether the first example's outputs are connected to any of the parameters."""
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    with task.evaluation():
        return batch_gradient(task, leaves, torch.tensor([0]))[2] is not None

"""What leaving out a sequence does to each of its own tokens.

With g_t = ∇ℓ_it the gradient of one token's loss and g_i = Σ_t g_t that of the sequence,

    ℓ_it^{\\i} − ℓ_it ≈ g_tᵀ Σ g_i,        Σ_t g_tᵀ Σ g_i = g_iᵀ Σ g_i

All tokens of a sequence at once: g_i(w) = Σ_t w_t g_t is linear in the weights w of the tokens, so
that g_tᵀ u = ∂/∂w_t ⟨g_i(w), u⟩ with u = Σ g_i held fixed. One forward pass, one backward pass, and
one backward pass through that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from blr_analysis.checks import instance
from blr_analysis.errors import InputError, ModelError
from blr_analysis.likelihoods import TokenCategorical
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.corrections import check_finite
from blr_analysis.sensitivity.door import checked_posterior
from blr_analysis.sensitivity.influence.blocks import Budget, loss_gradient, preconditioned
from blr_analysis.sensitivity.results import PerExample
from blr_analysis.sensitivity.selection import Selection
from blr_analysis.sensitivity.subjects import subject_of
from blr_analysis.sensitivity.training_errors import PART, stands_alone
from blr_analysis.task import Task


@dataclass(frozen=True, kw_only=True)
class TokenScores(PerExample):
    """What :func:`token_sensitivity` gives: one entry per token that counts; tensors on the CPU.

    Attributes:
        sequence: which example the token is in, ``[M]``.
        position: its place in the row of labels that the likelihood scores, ``[M]``, from 0; for a
            causal language model that of the output which predicts it.
        target: its class (token id), ``[M]``.
        losses: −log p of it, in nats, ``[M]``.
        change: τ g_tᵀ Σ g_i, the first-order rise of its loss without its sequence, ``[M]``; larger
            is more memorised. Negative: the rest of the sequence pulls the other way.
        losses_without: ``losses + change``.
        table: one row per token, with the metadata of its sequence.
    """

    sequence: Tensor
    position: Tensor
    target: Tensor
    change: Tensor

    @property
    def losses_without(self) -> Tensor:
        return self.losses + self.change

    def table_columns(self) -> dict[str, Any]:
        """Columns of the table in order."""
        return {
            "sequence": self.sequence,
            "position": self.position,
            "target": self.target,
            "loss": self.losses,
            "change": self.change,
            "loss_without": self.losses_without,
        }

    def __repr__(self) -> str:
        sequences = len(self.sequence.unique())
        return f"TokenScores({len(self)} tokens of {sequences} sequences; see .table)"


@torch.inference_mode(False)  # also where the caller switched it on
def token_sensitivity(
    task: Task,
    posterior: Posterior,
    *,
    sequences: Selection | None = None,
) -> TokenScores:
    """How much the loss of each token would rise without the sequence that it is in.

    Sequences are taken one by one, because each has its own direction Σ g_i: about four forward
    passes' time each, and three times the model's parameters beside its graph in memory. For
    whole sequences :func:`blr_analysis.sensitivity` is much faster.

    Args:
        task: the model and the sequences it was trained on, with a likelihood of tokens.
        posterior: learned on those data.
        sequences: mask, indices, or a function of the scores' rows; None: all.

    Raises:
        InputError: a likelihood of one target per example.
        ModelError: the model cannot be differentiated twice (a fused kernel, say).
        PosteriorError, DataError: as :func:`blr_analysis.sensitivity`.

    Source: Nickl et al., NeurIPS 2023, Eq. 12, for the loss of each token.

    Example:
        >>> import torch, blr_analysis as blr
        >>> ids = torch.randint(5, (8, 6))
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5))
        >>> task = blr.Task(model, (ids, ids), likelihood="causal_lm")
        >>> fit = dict(structure="diag", curvature="empirical_fisher", prior_precision=1.0)
        >>> q = blr.fit_laplace(task, **fit)
        >>> tokens = token_sensitivity(task, q, sequences=[2])
        >>> whole = blr.sensitivity(task, q)
        >>> len(tokens), torch.allclose(tokens.change.sum(), whole.self_influence[2])
        (5, True)
    """
    instance("task", task, Task, "a blr_analysis.Task")
    if not isinstance(task.likelihood, TokenCategorical):
        raise InputError(f'{task.likelihood} has no target per token: "tokens" or "causal_lm"')
    q = checked_posterior(task, posterior)
    indices = torch.arange(task.n_data)
    if sequences is not None:
        indices = subject_of(task, q).select(sequences, "sequences")
    parts = [
        _tokens(task, q, task.likelihood, index.view(1), q.form.solve)
        for index in track(indices, total=len(indices), label="tokens", show=task.progress)
    ]
    tokens = Tokens.joined(parts)
    check_finite(tokens.change)
    rows = tokens.sequence.tolist()
    return TokenScores(
        sequence=tokens.sequence,
        position=tokens.position,
        target=tokens.target,
        losses=tokens.losses,
        change=tokens.change,
        metadata={name: [values[i] for i in rows] for name, values in task.metadata.items()},
    )


def token_influence(
    task: Task,
    posterior: Posterior,
    test_task: Task,
    sources: Tensor,
) -> dict[str, Any]:
    """g_tᵀ Σ g_j of every token of the training sequences ``sources`` ``[M, k]`` on the M test
    sequences: what each token of a source makes up of its influence, which is their sum.

    Returns:
        Columns: question, example, position, target (token id), influence (nats).
    """
    q = checked_posterior(task, posterior)
    assert isinstance(task.likelihood, TokenCategorical)
    parts: list[Tokens] = []
    questions: list[Tensor] = []
    for question, row in enumerate(sources):
        budget = Budget.of(task, q, 1)
        solved = preconditioned(test_task, q, torch.tensor([question]), loss_gradient, budget)
        direction = {name: rows[0] for name, rows in solved.items()}
        for index in row:
            tokens = _tokens(
                task, q, task.likelihood, index.view(1), lambda _, fixed=direction: fixed
            )
            parts.append(tokens)
            questions.append(torch.full_like(tokens.position, question))
    tokens = Tokens.joined(parts)
    return {
        "question": torch.cat(questions).cpu().numpy(),
        "example": tokens.sequence.numpy(),
        "position": tokens.position.numpy(),
        "target": tokens.target.numpy(),
        "influence": tokens.change.numpy(),
    }


class Tokens(NamedTuple):
    """Tokens that count, of one sequence or of several.

    Attributes:
        sequence: which sequence each is in.
        position: its place there.
        target: its class.
        losses: in nats.
        change: τ g_tᵀ u.
    """

    sequence: Tensor
    position: Tensor
    target: Tensor
    losses: Tensor
    change: Tensor

    @classmethod
    def joined(cls, parts: list[Tokens]) -> Tokens:
        """The tokens of all parts, on the CPU."""
        columns = zip(*parts, strict=True)
        return cls(*(torch.cat([tensor.cpu() for tensor in column]) for column in columns))


def _tokens(
    task: Task,
    q: Posterior,
    likelihood: TokenCategorical,
    index: Tensor,
    direction_of: Callable[[Tree], Tree],
) -> Tokens:
    """One sequence's tokens that count, with u made of g_i by ``direction_of``.

    Where only the end of a training is known, its errors are those at .7 of the logits.
    """
    part = PART if stands_alone(task, q) else 1.0
    # The fused attention kernels cannot be differentiated twice.
    with torch.enable_grad(), task.evaluation(), sdpa_kernel(SDPBackend.MATH):
        leaves = {n: p.detach().requires_grad_() for n, p in q.mean.items()}
        outputs, targets = task.run(task.fetch(index), leaves, index)
        losses = likelihood.token_nll(outputs, targets)
        weights = torch.ones_like(losses).requires_grad_()
        slopes = losses
        if part != 1:
            slopes = (likelihood.error(part * outputs.detach(), targets) * outputs).sum(-1)
        try:
            grads = torch.autograd.grad(
                slopes,
                list(leaves.values()),
                weights,
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            named = dict(zip(leaves, grads, strict=True))
            direction = direction_of({n: g.detach() for n, g in named.items()})
            along = torch.stack([(g * direction[n]).sum() for n, g in named.items()]).sum()
            (change,) = torch.autograd.grad(along, weights)
            _check_linear(change, along)
        except RuntimeError as error:
            raise ModelError(
                f"the model cannot be differentiated twice: {error}; no gradient checkpointing, "
                'and attn_implementation="eager"'
            ) from error
    positions = (targets[0] != likelihood.ignore_index).nonzero().flatten()
    change = q.temperature * change.detach()
    return Tokens(
        sequence=index.expand(len(positions)),
        position=positions,
        target=targets[0][positions],
        losses=losses.detach()[0][positions],
        change=change[0][positions],
    )


def _check_linear(change: Tensor, along: Tensor) -> None:
    """Raise where an operation lost its second derivative without an error.

    ⟨g_i(w), u⟩ is linear in w, and so the sum of its derivatives at w = 1. Norms of Hugging Face's
    models are taken in float32, whatever the model's dtype.
    """
    bound = torch.finfo(torch.float32).eps ** 0.6 * float(change.abs().sum())
    if abs(float(change.sum() - along.detach())) > bound:
        raise RuntimeError("an operation hands back a gradient that is cut off from its own input")

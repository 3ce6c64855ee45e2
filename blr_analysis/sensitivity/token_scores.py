"""How much the loss of each token would rise without the sequence that it is in.

With g_t = ∇ℓ_it the gradient of one token's loss and g_i = Σ_t g_t that of the sequence,

    ℓ_it^{\\i} − ℓ_it ≈ g_tᵀ Σ g_i,        Σ_t g_tᵀ Σ g_i = g_iᵀ Σ g_i

All tokens of a sequence are computed together. g_i(w) = Σ_t w_t g_t is linear in weights w of the
tokens, so that g_tᵀ u = ∂/∂w_t ⟨g_i(w), u⟩ for the fixed direction u = Σ g_i. This takes one
forward pass, one backward pass, and one backward pass through the backward pass.
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
from blr_analysis.sensitivity.training_errors import LOGIT_FACTOR, knows_only_the_end
from blr_analysis.task import Task


@dataclass(frozen=True, kw_only=True)
class TokenScores(PerExample):
    """The result of :func:`token_sensitivity`: M tokens that count; tensors on the CPU.

    Attributes:
        sequence: the index of the token's example, ``[M]``.
        position: the token's place among the labels that the likelihood scores, from 0 ``[M]``; in
            a causal language model it is the place of the output which predicts the token.
        target: the token's class (token id), ``[M]``.
        losses: −log p of the token, in nats ``[M]``.
        change: τ g_tᵀ Σ g_i, the first-order rise of the token's loss without its sequence, in
            nats ``[M]``. A large change says that the token is memorised; a negative one says that
            the other tokens of the sequence make it less likely.
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

    Sequences are computed one by one, because each has another direction Σ g_i. A sequence takes
    the time of about four forward passes, and memory for its graph and three copies of the
    parameters. For numbers of whole sequences :func:`blr_analysis.sensitivity` is much faster.

    Args:
        task: the model and the sequences it was trained on, with a likelihood of tokens.
        posterior: learned on those data.
        sequences: which of them: a mask, indices, or a function of the scores' rows; None: all.

    Raises:
        InputError: the likelihood has one target per example.
        ModelError: the model cannot be differentiated twice, for example for a fused kernel.
        PosteriorError, DataError: the errors of :func:`blr_analysis.sensitivity`.

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
    """The influence τ g_tᵀ Σ g_j of single training tokens on test sequences.

    The influences of a sequence's tokens add up to the influence of the sequence.

    Args:
        sources: the k training sequences of each of M test sequences, ``[M, k]``.

    Returns:
        Columns with one row per token: question (index of the test sequence), example (index of
        the training sequence), position, target (token id), influence (nats).
    """
    q = checked_posterior(task, posterior)
    assert isinstance(task.likelihood, TokenCategorical)
    parts: list[Tokens] = []
    questions: list[Tensor] = []
    for question, row in enumerate(sources):
        budget = Budget.of(task, q, 1)
        solved = preconditioned(test_task, q, torch.tensor([question]), loss_gradient, budget)
        direction = {name: rows[0] for name, rows in solved.items()}

        def direction_of(_gradient: Tree, direction: Tree = direction) -> Tree:
            return direction

        for index in row:
            tokens = _tokens(task, q, task.likelihood, index.view(1), direction_of)
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
    """The tokens that count in one sequence or in several.

    Attributes:
        sequence: the index of each token's sequence.
        position: the token's place in the sequence.
        target: the token's class.
        losses: the token's loss, in nats.
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
    """The tokens that count in one sequence, and their changes τ g_tᵀ u.

    Where only the end of a training is known, the gradients g are those of errors at 0.7 times the
    logits (:func:`~blr_analysis.sensitivity.training_errors.mean_errors`).

    Args:
        index: of the sequence, ``[1]``.
        direction_of: the sequence's gradient g_i → the direction u.
    """
    factor = LOGIT_FACTOR if knows_only_the_end(task, q) else 1.0
    # The fused attention kernels cannot be differentiated twice.
    with torch.enable_grad(), task.evaluation(), sdpa_kernel(SDPBackend.MATH):
        leaves = {name: mean.detach().requires_grad_() for name, mean in q.mean.items()}
        outputs, targets = task.run(task.fetch(index), leaves, index)
        losses = likelihood.token_nll(outputs, targets)
        pulls = losses  # its gradient by the weights of the model is g_t
        if factor != 1:
            errors = likelihood.error(factor * outputs.detach(), targets)
            pulls = (errors * outputs).sum(-1)
        try:
            change = _products_with(pulls, leaves, direction_of)
        except RuntimeError as error:
            raise ModelError(
                f"the model cannot be differentiated twice: {error}; no gradient checkpointing, "
                'and attn_implementation="eager"'
            ) from error
    positions = (targets[0] != likelihood.ignore_index).nonzero().flatten()
    change = q.temperature * change
    return Tokens(
        sequence=index.expand(len(positions)),
        position=positions,
        target=targets[0][positions],
        losses=losses.detach()[0][positions],
        change=change[0][positions],
    )


def _products_with(
    pulls: Tensor, leaves: dict[str, Tensor], direction_of: Callable[[Tree], Tree]
) -> Tensor:
    """g_tᵀ u of every token ``[1, T]``, with g_t the gradient of ``pulls`` ``[1, T]``."""
    token_weights = torch.ones_like(pulls).requires_grad_()
    gradients = torch.autograd.grad(
        pulls,
        list(leaves.values()),
        token_weights,
        create_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    gradient = dict(zip(leaves, gradients, strict=True))
    direction = direction_of({name: g.detach() for name, g in gradient.items()})
    product = torch.stack([(g * direction[name]).sum() for name, g in gradient.items()]).sum()
    (products,) = torch.autograd.grad(product, token_weights)
    _check_linear(products, product)
    return products.detach()


def _check_linear(products: Tensor, product: Tensor) -> None:
    """Raise RuntimeError where an operation lost its second derivative without an error.

    ⟨g_i(w), u⟩ is linear in w, so at w = 1 it is the sum of its derivatives. The bound is that of
    float32, because Hugging Face's models compute their norms in it whatever their dtype is.
    """
    bound = torch.finfo(torch.float32).eps ** 0.6 * float(products.abs().sum())
    if abs(float(products.sum() - product.detach())) > bound:
        raise RuntimeError("an operation hands back a gradient that is cut off from its own input")

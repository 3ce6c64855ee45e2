"""Which inputs to label next: those whose labels would teach the posterior most.

    information    ½ log det(I + Lᵢᵀ Vᵢ Lᵢ),    Λᵢ = Lᵢ Lᵢᵀ,  Vᵢ = Jᵢ Σ Jᵢᵀ
    variance       tr Mᵢ Vᵢ Mᵢᵀ,                 Mᵢ = ∂E[y]/∂f

A new label adds a site of precision Jᵢᵀ Λᵢ Jᵢ to the posterior; it is leave-one-out with the other
sign. Each input is chosen after the sites of the inputs before it were added, so that the chosen
inputs do not repeat each other. Σ is estimated from S draws θ_s ~ q: Vᵢ is computed from the moves
Jᵢ (θ_s − m) of the outputs, and a site changes how the S draws are combined.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blr_analysis.checks import at_least, instance, one_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import Likelihood
from blr_analysis.posterior.networks import near_mean
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.predictive import scored_by
from blr_analysis.progress import track
from blr_analysis.task import Task

WAYS = ("information", "variance")
MOST_NUMBERS = 2**27  # inputs · outputs · draws; three tensors of this size are in memory


@torch.inference_mode(False)  # also where the caller switched it on
def acquire(
    task: Task,
    posterior: Posterior,
    k: int,
    *,
    by: str = "information",
    draws: int = 128,
    seed: int = 0,
) -> Tensor:
    """The ``k`` inputs to label next, ``[k]`` indices, the first one first.

    It takes ``draws`` forward passes over the inputs.

    Args:
        task: the model, with inputs without labels (``Task(model, X)``); labels are ignored.
        posterior: learned on the examples that have labels.
        k: the number of inputs to choose.
        by: "information", the nats that a label would tell about the weights; or "variance", that
            of the mean prediction. For sequences and images these are the numbers of
            :meth:`blr_analysis.Posterior.predict`, summed over tokens or pixels, and every input is
            scored by itself.
        draws: the number of networks that are drawn from the posterior, two or more.
        seed: of the draws.

    Raises:
        InputError: ``k`` is above the number of inputs, ``by`` is unknown, there is a single draw,
            or the moves take too much memory.
        PosteriorError, ModelError, DataError: the errors of
            :meth:`blr_analysis.Posterior.predict`.

    Source: MacKay, "Information-based objective functions for active data selection", 1992;
    batches: Kirsch et al., "BatchBALD", NeurIPS 2019. ``python -m benchmarks.acquire`` compares
    it with labels chosen at random.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(40, 2), torch.arange(40) % 2
        >>> model = torch.nn.Linear(2, 2)
        >>> posterior = blr.fit_laplace(blr.Task(model, (X, y)), prior_precision=1.0)
        >>> pool = blr.Task(model, 3.0 * torch.randn(100, 2))
        >>> acquire(pool, posterior, 5).shape
        torch.Size([5])
    """
    instance("task", task, Task, "a blr_analysis.Task with the inputs to choose from")
    instance("posterior", posterior, Posterior, "a blr_analysis.Posterior")
    one_of("by", by, WAYS)
    if positive_int("k", k) > task.n_data:
        raise InputError(f"k={k}, but there are {task.n_data} inputs to choose from")
    if positive_int("draws", draws) < 2:
        raise InputError("draws=1 cannot measure disagreement; take draws=128")
    at_least(0, "seed", seed)
    q = posterior.on(task, same_data=False).as_drawn
    generator = torch.Generator().manual_seed(seed)
    if task.likelihood.is_sequence:
        return _best_sequences(task, posterior, k, by, draws, generator)
    return _greedy_choice(_moves(task, q, draws, generator), k, by)


def _best_sequences(
    task: Task, q: Posterior, k: int, by: str, draws: int, generator: torch.Generator
) -> Tensor:
    """The k sequences with the largest sums over their tokens."""
    prediction = q.predict(task, draws, generator=generator)
    information = prediction.information
    variance = prediction.variance
    if prediction.example is None or information is None or variance is None:
        raise InputError(f"acquire: {prediction.note}; give fewer inputs")
    token_scores = information if by == "information" else variance.sum(-1)
    totals = torch.zeros(task.n_data, dtype=token_scores.dtype)
    totals = totals.index_add(0, prediction.example, token_scores)
    return totals.argsort(descending=True, stable=True)[:k]


class Moves(NamedTuple):
    """How each input's prediction moves with S draws of the weights; divided by √S.

    Sums over draws of squares are then variances under the posterior.

    Attributes:
        information: Lᵢᵀ Jᵢ (θ_s − m) ``[N, K, S]``, the outputs in units of a label's noise.
        prediction: Mᵢ Jᵢ (θ_s − m) ``[N, C, S]``, the mean prediction.
    """

    information: Tensor
    prediction: Tensor


def _moves(task: Task, q: Posterior, draws: int, generator: torch.Generator) -> Moves:
    """The moves of all inputs, by difference quotients at points near the mean."""
    likelihood = scored_by(task.likelihood)
    outputs = _outputs(task, {**q.mean, **q.buffers})
    if outputs.numel() * draws > MOST_NUMBERS:
        raise InputError(
            f"{len(outputs):,} inputs of {outputs.shape[1]} outputs and {draws} draws are too many "
            "to hold; give some of the inputs, or fewer draws"
        )
    mean = likelihood.mean(outputs)
    output_moves: list[Tensor] = []
    prediction_moves: list[Tensor] = []
    for _ in track(range(draws), total=draws, label="acquire", show=task.progress):
        draw = q.sample(generator=generator)
        near, step = near_mean(q.mean, draw)
        outputs_near = _outputs(task, {**near, **q.buffers})
        output_moves.append((outputs_near - outputs) / step)
        prediction_moves.append((likelihood.mean(outputs_near) - mean) / step)
    scale = (q.temperature / draws) ** 0.5
    root = _root(likelihood, outputs)
    return Moves(
        information=root.mT @ (scale * torch.stack(output_moves, -1)),
        prediction=scale * torch.stack(prediction_moves, -1),
    )


def _outputs(task: Task, params: dict[str, Tensor]) -> Tensor:
    """The outputs of all inputs ``[N, C]``, with or without labels."""
    outputs = []
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches():
            outputs_of_batch, _ = task.predicted(batch, params, indices)
            outputs.append(outputs_of_batch.cpu())
    return torch.cat(outputs)


def _root(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """L ``[N, C, K]`` with Λ = L Lᵀ, for labels that the model itself predicts."""
    labels = likelihood.sample(outputs, torch.Generator().manual_seed(0))
    return likelihood.hessian_root(outputs, labels)


def _greedy_choice(moves: Moves, k: int, by: str) -> Tensor:
    """k inputs: each is the best one given labels for the inputs before it."""
    information, prediction = moves
    chosen: list[int] = []
    for _ in range(k):
        if by == "information":
            scores = _log_det(information)
        else:
            scores = prediction.square().sum((1, 2))
        scores[chosen] = -torch.inf
        best = int(scores.argmax())
        chosen.append(best)
        site = information[best]
        information = _with_label(site, information)
        prediction = _with_label(site, prediction)
    return torch.tensor(chosen)


def _log_det(a: Tensor) -> Tensor:
    """log det(I + A Aᵀ) of every input ``[N]``, by the smaller of A Aᵀ and Aᵀ A."""
    gram = a @ a.mT if a.shape[1] <= a.shape[2] else a.mT @ a
    return torch.linalg.slogdet(torch.eye(gram.shape[-1]).to(gram) + gram).logabsdet


def _with_label(site: Tensor, moves: Tensor) -> Tensor:
    """The moves under the posterior with one more label, M (I + Aᵀ A)^(−½).

    A is ``site`` ``[K, S]``, the moves of the labelled input. The root is computed from A's
    singular values.
    """
    _, singular_values, directions = torch.linalg.svd(site, full_matrices=False)
    shrinkage = 1 - (1 + singular_values.square()).rsqrt()
    return moves - (moves @ directions.mT * shrinkage) @ directions

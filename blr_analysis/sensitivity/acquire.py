"""Which inputs to label next: those whose labels would tell the posterior most.

    information    ½ log det(I + Lᵢᵀ Vᵢ Lᵢ),    Λᵢ = Lᵢ Lᵢᵀ,  Vᵢ = Jᵢ Σ Jᵢᵀ
    variance       tr Mᵢ Vᵢ Mᵢᵀ,                 Mᵢ = ∂E[y]/∂f

A label that came would be a site of the posterior, with precision Jᵢᵀ Λᵢ Jᵢ: leaving out with the
sign turned. So each input is chosen after the sites of those before it were added, and inputs that
would tell the same are not chosen twice. Σ is that of draws θ_s ~ q, so that Vᵢ is made of the
moves Jᵢ (θ_s − m) of the outputs; what the labels add, S × S, is kept among the draws.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blr_analysis.checks import at_least, instance, one_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import Likelihood
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.predictive import scored_by
from blr_analysis.progress import track
from blr_analysis.task import Task

WAYS = ("information", "variance")
STEP = 0.05  # of a draw's distance: moves of the outputs by a difference, close to linear
MOST_NUMBERS = 2**27  # inputs times outputs times draws that are held, three times


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

    Costs ``draws`` forward passes over the inputs.

    Args:
        task: the model with inputs that have no labels (``Task(model, X)``), or whose labels are
            not looked at.
        posterior: learned on what is labelled so far.
        k: how many.
        by: "information", in nats, what a label would tell of the weights; or "variance" of the
            mean prediction. Of sequences and images, as :meth:`blr_analysis.Posterior.predict`
            gives it, summed over tokens or pixels, each input by itself.
        draws: networks drawn from the posterior, two or more.
        seed: of those.

    Raises:
        InputError: more than there are, an unknown word, a single draw, more numbers than memory
            should hold.
        PosteriorError, ModelError, DataError: as :meth:`blr_analysis.Posterior.predict`.

    Source: MacKay, "Information-based objective functions for active data selection", 1992; in
    batches as Kirsch et al., "BatchBALD", NeurIPS 2019. ``python -m benchmarks.acquire`` compares
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
        raise InputError("a single draw has nothing to disagree with; take draws=128")
    at_least(0, "seed", seed)
    q = posterior.on(task, same_data=False).as_drawn
    generator = torch.Generator().manual_seed(seed)
    if task.likelihood.is_sequence:
        return _by_themselves(task, posterior, k, by, draws, generator)
    return _one_after_the_other(_moves(task, q, draws, generator), k, by)


def _by_themselves(
    task: Task, q: Posterior, k: int, by: str, draws: int, generator: torch.Generator
) -> Tensor:
    """The first by the sum over their tokens."""
    found = q.predict(task, draws, generator=generator)
    if found.example is None or found.information is None or found.variance is None:
        raise InputError(f"acquire: {found.note}; give fewer inputs")
    of_tokens = found.information if by == "information" else found.variance.sum(-1)
    totals = torch.zeros(task.n_data, dtype=of_tokens.dtype)
    totals = totals.index_add(0, found.example, of_tokens)
    return totals.argsort(descending=True, stable=True)[:k]


class Moves(NamedTuple):
    """How each input's prediction moves with the weights, ``[N, C, S]`` each, over √S.

    Attributes:
        information: Lᵢᵀ Jᵢ (θ_s − m): of the outputs, in units of what a label tells of them.
        prediction: Mᵢ Jᵢ (θ_s − m): of the mean prediction.
    """

    information: Tensor
    prediction: Tensor


def _moves(task: Task, q: Posterior, draws: int, generator: torch.Generator) -> Moves:
    likelihood = scored_by(task.likelihood)
    outputs = _outputs(task, {**q.mean, **q.buffers})
    if outputs.numel() * draws > MOST_NUMBERS:
        raise InputError(
            f"{len(outputs):,} inputs of {outputs.shape[1]} outputs and {draws} draws are too many "
            "to hold; give some of the inputs, or fewer draws"
        )
    mean = likelihood.mean(outputs)
    of_outputs: list[Tensor] = []
    of_predictions: list[Tensor] = []
    for _ in track(range(draws), total=draws, label="acquire", show=task.progress):
        draw = q.sample(generator=generator)
        near = {name: m + STEP * (draw[name] - m) for name, m in q.mean.items()}
        moved = _outputs(task, {**near, **q.buffers})
        of_outputs.append((moved - outputs) / STEP)
        of_predictions.append((likelihood.mean(moved) - mean) / STEP)
    scale = (q.temperature / draws) ** 0.5
    root = _root(likelihood, outputs)
    return Moves(
        root.mT @ (scale * torch.stack(of_outputs, -1)),
        scale * torch.stack(of_predictions, -1),
    )


def _outputs(task: Task, params: dict[str, Tensor]) -> Tensor:
    """``[N, C]``, labels or none."""
    with torch.no_grad(), task.evaluation():
        parts = [task.predicted(batch, params, i)[0].cpu() for i, batch in task.batches()]
    return torch.cat(parts)


def _root(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """L, ``[N, C, K]``, of labels that the model itself would give."""
    labels = likelihood.sample(outputs, torch.Generator().manual_seed(0))
    return likelihood.hessian_root(outputs, labels)


def _one_after_the_other(moves: Moves, k: int, by: str) -> Tensor:
    """Each the best once the labels of those before it are there."""
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
        information, prediction = _with_label(information[best], information, prediction)
    return torch.tensor(chosen)


def _log_det(a: Tensor) -> Tensor:
    """log det(I + A Aᵀ) of every input, ``[N]``, from the smaller of both sides."""
    gram = a @ a.mT if a.shape[1] <= a.shape[2] else a.mT @ a
    return torch.linalg.slogdet(torch.eye(gram.shape[-1]).to(gram) + gram).logabsdet


def _with_label(site: Tensor, *moves: Tensor) -> list[Tensor]:
    """The moves once an input has its label, whose own are ``site`` ``[C, S]``: times the root of
    (I + aᵀ a)⁻¹, by the singular values of a."""
    _, values, directions = torch.linalg.svd(site, full_matrices=False)
    shrinkage = 1 - (1 + values.square()).rsqrt()
    return [move - (move @ directions.mT * shrinkage) @ directions for move in moves]

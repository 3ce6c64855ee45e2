"""Posteriors of other networks that the same data might have made, to average over.

One network's influence is its own as much as its data's: another seed, other minibatches, and a
good part of it is gone. What the mean over a few networks says is nearer to what retraining does,
because retraining draws a network anew as well. Networks trained for a few epochs from fresh
weights serve as those of the whole training would: what an example does is decided early.

Linear datamodeling scores of small networks trained in minibatches for a fixed number of epochs (32
halves, truth the mean of three seeds; each the mean of two networks): under a Kronecker posterior,
averaged over its errors (``expected=``), and over that with four replays

    digits, AdamW .58 .64 .72    SGD .48 .59 .59
    Fashion-MNIST, AdamW .59 .65 .69    IVON .33 .38 .48
"""

from __future__ import annotations

import torch

from blr_analysis.backprop.engine import Chunking
from blr_analysis.checks import positive_int, positive_number, whole
from blr_analysis.errors import InputError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import fit_laplace
from blr_analysis.sensitivity.groups.first_weights import first_weights
from blr_analysis.sensitivity.groups.replay import PROBES, RATES, prepare
from blr_analysis.sensitivity.groups.solving import FAMILIES, GIVE, GroupSolver, checked_plan
from blr_analysis.sensitivity.minimise import on_a_copy, write
from blr_analysis.sensitivity.scores import fitted
from blr_analysis.task import Task


@torch.inference_mode(False)  # also where the caller switched it on
def replays(
    task: Task,
    posterior: Posterior,
    count: int = 4,
    *,
    epochs: float = 4.0,
    seed: int = 0,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> list[Posterior]:
    """Posteriors of ``count`` short trainings from fresh weights, and the given one last.

    A list that :func:`blr_analysis.influence`, ``top_influence``, ``sensitivity``, ``suspicious``
    and ``what_if`` average over. Each network is trained on all data, without decay, by the kind
    and size of steps that the weights tell (:mod:`blr_analysis.sensitivity.groups.replay`), and has
    a Kronecker posterior of its own under the given one's δ. The trainings cost count · ``epochs``
    · (1 + 0.4) passes over the data, more where a step size is halved, as much again for the first
    where the kind of steps must be told, and a Kronecker fit each; influence over the list costs
    count + 1 times as much.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data; ``fit_laplace(task, expected=fit_laplace(task))`` is best.
        count: how many networks.
        epochs: how long each is trained.
        seed: of the first weights and the minibatches.

    Raises:
        InputError: a model whose training cannot be replayed, fewer than one network.
        PosteriorError: a posterior of another model or number of examples.
        ModelError: a training that diverges.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
        >>> q = blr.fit_laplace(task, prior_precision=1.0, progress=False)
        >>> qs = replays(task, q, 2, progress=False)
        >>> matrix = blr.influence(task, qs, task, progress=False)
        >>> len(qs), qs[-1] is q, matrix.shape
        (3, True, torch.Size([60, 60]))
    """
    q = fitted(task, posterior)
    positive_int("count", count)
    positive_number("epochs", epochs)
    if (number := whole(seed)) is None:
        raise InputError(f"seed must be a whole number, got {seed!r}")
    chunking = Chunking(memory_budget=memory_budget, progress=progress)
    if reason := GroupSolver(task, q, checked_plan("replay", None, None), chunking).no_replay:
        raise InputError(f"replays: {reason}")
    family = FAMILIES.get(str(q.record.get("kind")))
    networks = []
    for k in range(number, number + count):
        start = dict(q.initial or {}) or first_weights(task, seed=k)
        if start is None:
            raise InputError(f"replays: some of its weights cannot be drawn anew; {GIVE}")
        parts = 2 + (1 + PROBES) * (1 if family else len(RATES))  # see prepare()
        passes = epochs * parts
        replay = prepare(
            task, q.mean, start, passes=passes, family=family, seed=k, progress=progress
        )
        family = replay.recipe.family
        under = on_a_copy(task)
        write(under, replay.reference)
        network = fit_laplace(
            under,
            prior_precision=q.prior,
            curvature="empirical_fisher" if task.likelihood.is_sequence else "ggn",
            memory_budget=memory_budget,
            progress=progress,
        )
        networks.append(network)
    return [*networks, posterior]

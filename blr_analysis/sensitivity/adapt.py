"""New data after old ones: the old posterior is the prior, and a few old examples stay as they are.

    F(θ) = Σ_{i new} ℓ_i(θ) + Σ_{i∈M} ℓ_i(θ) + ½ (θ − m^{\\M})ᵀ S^{\\M} (θ − m^{\\M})

    S^{\\M} = S − Σ_{i∈M} J_iᵀ Λ_i J_i,     m^{\\M} = m + (S^{\\M})⁻¹ Σ_{i∈M} J_iᵀ e_i

The posterior is its prior and one site for each old example. Those of the memory M leave it, as
they do when they are removed (:mod:`blr_analysis.sensitivity.what_if`), and their losses take the
place of their sites. So an old example counts once: by its loss, where it can still be read, and
else by its share of the quadratic. Without a memory this is the weight prior of Khan & Rue's
Section 5. With all old examples in the memory it is the objective of old and new data together,
where m is the minimum of the old objective; elsewhere the result's note says that it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from blr_analysis.backprop.loss import evaluated
from blr_analysis.backprop.tree import scaled
from blr_analysis.checks import instance, positive_int
from blr_analysis.errors import InputError
from blr_analysis.posterior.laplace import posterior_as_prior
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.sensitivity.door import check_test, checked_addition
from blr_analysis.sensitivity.minimise import Descent
from blr_analysis.sensitivity.objective import Objective, posterior_after, share
from blr_analysis.sensitivity.results import WhatIf
from blr_analysis.task import Task

PASSES = 200  # over the new data and the memory
MOVES = 20  # that one preconditioner serves
NEGLIGIBLE = 1e-3  # nats that F is expected to fall by in the next move
NO_MEMORY_NOTE = (
    "the old data are only approximated around the old weights: memory= keeps some of them"
)
OFF_MINIMUM_NOTE = "the old model is off its minimum, so that subtracting the memory is inexact"
NOT_DONE_NOTE = "the descent did not end: give more passes="


@torch.inference_mode(False)  # also where the caller switched it on
def adapt(
    task: Task,
    posterior: Posterior,
    memory: Task | None = None,
    *,
    evaluate: Task | None = None,
    passes: int = PASSES,
) -> WhatIf:
    """The model after new data, with the posterior in place of the old data.

        F(θ) = Σ_{i new} ℓ_i(θ) + Σ_{i∈M} ℓ_i(θ) + ½ (θ − m^{\\M})ᵀ S^{\\M} (θ − m^{\\M})

    with the posterior N(m, S⁻¹) of the old data, without the share of the memory M (the module's
    docstring has both formulas). The minimum is found by quasi-Newton moves from m, preconditioned
    by the precision of all data at the present weights. The model is not changed: ``.apply(model)``
    writes the result into it, and ``.posterior`` is the prior of the next call.

    Args:
        task: the NEW data; its model names the parameters, its weights are not read.
        posterior: learned on the old data, of structure "full", "kron" or "diag".
        memory: a task with the old examples that you still have; None: none. The posterior must
            have seen them. They are counted once, and the weight of other old examples does not
            change.
        evaluate: where to measure; default: the new data.
        passes: over new data and memory, at most.

    Returns:
        :class:`~blr_analysis.sensitivity.WhatIf`: ``before`` is the model at the posterior's mean,
        ``after`` the adapted one; ``added`` new examples, ``converged``, ``parameters``,
        ``apply(model)``, ``posterior``.

    Raises:
        InputError: something else than tasks, data of another likelihood, a memory larger than the
            old data, a posterior whose structure is no prior.
        PosteriorError: a posterior of another model.
        ModelError, DataError: as :func:`blr_analysis.what_if`.

    Source: Khan & Rue, "The Bayesian learning rule", JMLR 2023, Section 5 (the posterior as the
    next prior); Khan & Swaroop, "Knowledge-adaptation priors", NeurIPS 2021 (a memory in function
    space); both together: Daxberger et al., "Improving continual learning by accurate gradient
    reconstructions of the past", TMLR 2023.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 3), torch.randint(2, (60,))
        >>> model = torch.nn.Linear(3, 2)
        >>> posterior = blr.fit_laplace(blr.Task(model, (X[:30], y[:30])), prior_precision=1.0)
        >>> new, memory = blr.Task(model, (X[30:], y[30:])), blr.Task(model, (X[:5], y[:5]))
        >>> result = adapt(new, posterior, memory)
        >>> result.added, result.posterior.n_data
        (30, 60)
    """
    instance("task", task, Task, "a blr_analysis.Task with the new data")
    instance("posterior", posterior, Posterior, "a blr_analysis.Posterior of the old data")
    positive_int("passes", passes)
    posterior_as_prior(posterior)
    old = posterior.on(task, same_data=False)
    task = task.holding(old.buffers)
    remembered = () if memory is None else (_checked_memory(memory, task, old),)
    where = task if evaluate is None else check_test(evaluate, task, "evaluate")
    forgotten = _without(old, remembered)
    parts = (task, *remembered)
    objective = Objective(
        tuple((part, torch.arange(part.n_data)) for part in parts), posterior_as_prior(forgotten)
    )
    ending = _descended(objective, old, forgotten, parts, passes)
    weights = ending.weights
    before, targets = evaluated(where, old.mean)
    after, _ = evaluated(where, weights)

    def adapted_posterior() -> Posterior:
        return _with(forgotten.changed(mean=weights), parts)

    notes = []
    if memory is None:
        notes.append(NO_MEMORY_NOTE)
    elif old.at_minimum is False:
        notes.append(OFF_MINIMUM_NOTE)
    if not ending.converged:
        notes.append(NOT_DONE_NOTE)
    return WhatIf(
        before=before,
        after=after,
        solver="adapt",
        posterior_after=adapted_posterior,
        removed=0,
        added=task.n_data,
        parameters={name: tensor.cpu() for name, tensor in weights.items()},
        buffers={name: tensor.cpu() for name, tensor in old.buffers.items()},
        applied_nll=after.nll,
        passes=ending.passes,
        converged=ending.converged,
        targets=targets,
        note="; ".join(notes),
    )


def _checked_memory(memory: Task, task: Task, old: Posterior) -> Task:
    """The old examples under the new task's model.

    Raises:
        InputError: no task, one of another likelihood, or with more examples than the posterior
            has seen.
    """
    instance("memory", memory, Task, "a blr_analysis.Task with some of the old examples")
    if memory.n_data > old.n_data:
        raise InputError(
            f"memory has {memory.n_data} examples, but the posterior was learned from "
            f"{old.n_data}: the memory is a part of the old data"
        )
    return checked_addition(memory, task)


def _without(old: Posterior, remembered: Sequence[Task]) -> Posterior:
    """N(m^{\\M}, (S^{\\M})⁻¹): the posterior without the sites of the memory."""
    return posterior_after(old, [(-1, share(part, old)) for part in remembered])


def _with(posterior: Posterior, parts: Sequence[Task]) -> Posterior:
    """The posterior with the curvature of these data at its mean, which stays."""
    still = scaled(posterior.mean, 0.0)
    shares = [(1, replace(share(part, posterior), gradient=still)) for part in parts]
    return posterior_after(posterior, shares)


class Ending(NamedTuple):
    """Where the descent ended; ``converged``: the next move would gain less than NEGLIGIBLE."""

    weights: Tree
    passes: float
    converged: bool


def _descended(
    objective: Objective, old: Posterior, forgotten: Posterior, parts: Sequence[Task], passes: int
) -> Ending:
    """The end of a descent from the old weights, under a new preconditioner every few moves."""
    point = objective.at(dict(old.mean))
    spent = 1.0
    while True:
        precision = _with(forgotten.changed(mean=point.params), parts).form
        descent = Descent(objective, precision, point, passes=0.0)
        descent.run(min(MOVES, passes - spent))
        spent += descent.passes
        point = descent.point
        is_negligible = descent.decrements[-1] <= NEGLIGIBLE
        has_not_moved = len(descent.decrements) == 1
        if is_negligible or has_not_moved or spent >= passes:
            return Ending(point.params, spent, is_negligible or descent.converged)

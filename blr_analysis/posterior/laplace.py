"""A posterior fitted after training, for models that were trained without one.

Laplace's method at the trained weights m (Khan & Rue, section 4.4; MacKay, 1992), by curvature:

    "ggn"                S = diag(δ) + Σ_i J_iᵀ Λ_i J_i, exact over the C outputs
    "empirical_fisher"   S = diag(δ) + Σ_i g_i g_iᵀ,  g_i = J_iᵀ e_i
    "mc_fisher"          S = diag(δ) + Σ_i E_{ŷ~p(y|f_i)} ĝ_i ĝ_iᵀ
    "exact"              S = diag(δ) + Σ_i ∇²ℓ_i, the GGN plus Σ_i Σ_c (∂ℓ_i/∂f_c) ∇²f_ic

The sum is stored in one of these structures:

    "full"      a dense matrix
    "diag"      its diagonal
    "kron"      projected on the eigenbasis of each layer's Kronecker factors
                (eigenvalue-corrected K-FAC, George et al., 2018)
    "lowrank"   its leading directions, and the rest of its diagonal
    "gram"      the second moments of the layers' inputs, S = diag(δ) + Σ a aᵀ ⊗ 1, which are no
                curvature; merging uses them

Off a minimum the same is done at each of the task's checkpoints. Those posteriors become
``earlier``. One fit is in :mod:`blr_analysis.posterior.one_fit`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from blr_analysis.checks import instance, one_of, path_of
from blr_analysis.errors import InputError
from blr_analysis.half import widened
from blr_analysis.posterior.one_fit import STRUCTURES, fit_at_weights
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.prior import FormPrior, Given, Prior
from blr_analysis.posterior.resume import ResumableFit
from blr_analysis.task import Task

STRUCTURES_OF_PRIORS = ("diag", "kron", "full")


def fit_laplace(
    task: Task,
    *,
    structure: str = "kron",
    prior_precision: Given | Prior | Mapping[str, Tensor] | None = None,
    initial: Mapping[str, Tensor] | None = None,
    curvature: str | None = None,
    samples: int = 1,
    rank: int | None = None,
    prior: Posterior | None = None,
    sampled: bool = False,
    unfinished: str | os.PathLike[str] | None = None,
) -> Posterior:
    """The Gaussian posterior at the model's present weights, S as in the module's equations.

    The objective is the SUM of losses, so with a loss averaged over N examples and an L2 penalty
    ``weight_decay`` (torch's SGD and Adam), δ = N · weight_decay. The decoupled decay of AdamW is
    no L2 term: leave ``prior_precision`` out, and δ is found.

    Args:
        task: model, training data, likelihood. The model is left as it is.
        structure: "diag", "kron", "lowrank" (r·P numbers), "full" (P up to 20,000), or, for
            merging, "gram" (forward passes alone; δ is 1e-6 of its mean unless given).
        prior_precision: δ > 0: a number, one number per parameter name, or, for "diag" and "full"
            alone, a tensor per parameter name with a number for each weight. None: the δ of the
            scikit-learn estimator that the task was made from. For other tasks δ is estimated from
            the weights and the data (:mod:`blr_analysis.posterior.prior_choice`), and
            ``record["prior_choice"]`` says how. For structures other than "kron" this takes one
            more fit, a Kronecker one.
        initial: θ₀, the prior's mean: the state dict of the first weights, or of the base model of
            a fine-tune; None: those of the task's recipe, else 0.
        curvature: "ggn" (exact over the outputs; not for sequences), "empirical_fisher",
            "mc_fisher", or "exact", the Hessian of the loss, by products with all P unit vectors
            ("diag" and "full", P up to 20,000). Where the Hessian is negative, S is raised to δ
            with a warning; ``record["floored"]`` is the share of S that was raised. None: "ggn", or
            "mc_fisher" for sequences. For more than 256 outputs "ggn" then draws 16 labels of each
            example for the layers below the last one, which stays exact ("full" stays exact all
            over). The posterior's ``note`` says where labels were drawn.
        samples: labels drawn per example for "mc_fisher".
        rank: r of "lowrank"; None: as many as explain 95 % of Σ_i tr(Λ_i V_i), up to 4,000. The
            record holds ``rank`` and ``explained``, the least share that is explained.
        prior: an earlier posterior N(m₀, S₀⁻¹) in place of the prior, also that of a
            :class:`~blr_analysis.sensitivity.WhatIf`. Its model must have the same parameters; its
            data may be any. The objective is then Σ_i ℓ_i + ½ (θ − m₀)ᵀ S₀ (θ − m₀), and S = S₀ +
            Σ_i ∇²ℓ_i (K&R, section 5). For a linear model this is the posterior of both data sets.
            The structure must be the prior's own, which is "diag", "kron" (new data are projected
            on the prior's basis) or "full", or it is "full".
        sampled: for sequences with "kron" or "diag": fit to at most 256 random ones, and scale
            their sum up. The distance from the minimum is then an upper bound.
        unfinished: a folder in which the fit stores its progress. If the process is killed, make
            the same call again: it continues, and ends with the same bits. Remove the folder
            yourself.

    Returns:
        The posterior. ``.at_minimum`` says whether the weights minimise the task's loss. If they do
        not, ``.earlier`` holds the posteriors at the task's checkpoints.

    Raises:
        PosteriorError: ``initial`` is of another model, or no δ can be found.
        InputError: unknown structure or curvature, δ ≤ 0, a model too large for "full" or
            "exact", "ggn" for sequences, "exact" for "kron" or "lowrank".
        ModelError: no trainable parameters, weights with NaN, or BatchNorm in training mode.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(20, 3), torch.randn(20)
        >>> task = blr.Task(torch.nn.Linear(3, 1), (X, y), likelihood="gaussian")
        >>> q = fit_laplace(task, structure="full", prior_precision=1.0)
        >>> Z = torch.cat([X, torch.ones(20, 1)], 1)
        >>> torch.allclose(q.form.matrix, Z.T @ Z + torch.eye(4), atol=1e-4)
        True
    """
    parts_of_prior = _parts_of_prior(prior)
    settings = (prior_precision, initial, curvature, samples, rank, sampled, parts_of_prior)
    resumable = _resumable(unfinished, structure, settings)
    if prior is not None:
        if prior_precision is not None or initial is not None:
            raise InputError("prior= has its own precision and mean: leave the others out")
        prior_precision = posterior_as_prior(prior.on(task, same_data=False))
        structure = _structure_beside(prior, structure)

    def fit_at(task: Task, weights: dict[str, Tensor]) -> Posterior:
        fit = partial(
            fit_at_weights,
            task,
            structure=structure,
            prior_precision=prior_precision,
            initial=initial,
            curvature=curvature,
            samples=samples,
            rank=rank,
            params=weights,
            sampled=sampled,
        )
        return fit() if resumable is None else resumable.fitted(task, weights, fit)

    instance("task", task, Task, "a blr_analysis.Task")
    last = fit_at(task, task.parameters())
    if last.at_minimum or last.structure == "gram":
        return last
    earlier = []
    for number, state in enumerate(task.checkpoints or (), 1):
        buffers = {n: state[n] for n in last.buffers if n in state}
        weights = widened({n: state[n] for n in last.mean})
        q = fit_at(task.holding(buffers), weights)
        earlier.append(q.changed(record={**q.record, "checkpoint": number}))
    return last.changed(earlier=tuple(earlier))


def _parts_of_prior(prior: Posterior | None) -> tuple[Any, ...] | None:
    """The mean and the tensors of an earlier posterior, on which a resumed fit depends."""
    if prior is None:
        return None
    instance("prior", prior, Posterior, "a blr_analysis.Posterior; a number is prior_precision")
    return prior.mean, prior.form.tensors()


def _resumable(
    folder: str | os.PathLike[str] | None, structure: str, settings: tuple[Any, ...]
) -> ResumableFit | None:
    if folder is None:
        return None
    return ResumableFit(Path(path_of(folder)).expanduser(), structure, settings)


def _structure_beside(prior: Posterior, structure: str) -> str:
    """The structure of a fit whose prior is an earlier posterior.

    ``structure`` is what the user passed. "kron" is the default, so that it means the prior's own.

    Raises:
        InputError: the prior cannot be added to this structure.
    """
    one_of("structure", structure, STRUCTURES)
    if structure in ("kron", prior.structure):
        return prior.structure
    if structure == "full":
        return structure
    raise InputError(
        f"structure={structure!r} has no room for a prior of {prior.structure!r}: leave structure "
        "out, or take 'full'"
    )


def posterior_as_prior(posterior: Posterior) -> FormPrior:
    """N(m₀, S₀⁻¹) as a prior.

    Raises:
        InputError: its structure has no room for the curvature of further data.
    """
    if posterior.structure not in STRUCTURES_OF_PRIORS:
        raise InputError(
            f"a posterior of structure {posterior.structure!r} is no prior: fit it as 'diag', "
            "'kron' or 'full'"
        )
    return FormPrior(posterior.prior.entries, dict(posterior.mean), posterior.form)

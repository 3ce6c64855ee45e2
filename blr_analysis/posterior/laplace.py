"""A posterior fitted after training, for models that were trained without one.

Laplace's method at the trained weights m (Khan & Rue, section 4.4; MacKay, 1992):

    S = diag(δ) + Σ_i J_iᵀ Λ_i J_i            curvature="ggn", exact over the C outputs
    S = diag(δ) + Σ_i g_i g_iᵀ,  g_i = J_iᵀ e_i    curvature="empirical_fisher"
    S = diag(δ) + Σ_i E_{ŷ~p(y|f_i)} ĝ_i ĝ_iᵀ      curvature="mc_fisher"
    S = diag(δ) + Σ_i ∇²ℓ_i                    curvature="exact": GGN + Σ_i Σ_c (∂ℓ_i/∂f_c) ∇²f_ic

kept dense ("full"), projected on its diagonal ("diag"), on the eigenbasis of each layer's
Kronecker factors ("kron": eigenvalue-corrected K-FAC, George et al., 2018), or on its leading
directions, with what is left of its diagonal beside them ("lowrank"). "gram" is no curvature: the
second moments of the layers' inputs, S = diag(δ) + Σ a aᵀ ⊗ 1, which merging takes.

Off a minimum the same is done at each of the task's checkpoints, which become ``earlier``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import n_outputs
from blr_analysis.backprop.hessian import Hessian
from blr_analysis.backprop.loss import check_connected, loss_and_gradient
from blr_analysis.checks import instance, one_of, path_of, positive_int
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.files import Unfinished
from blr_analysis.half import narrow, widened
from blr_analysis.posterior.capture import tied_names
from blr_analysis.posterior.fit import Fit, has_many_outputs
from blr_analysis.posterior.flat import refuse_flat
from blr_analysis.posterior.input_ranges import input_ranges
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.prior import (
    FormPrior,
    Given,
    Prior,
    Shapes,
    differences,
    real_tensors,
)
from blr_analysis.posterior.prior_choice import chosen_prior
from blr_analysis.posterior.recognition import fingerprint, frozen_numbers
from blr_analysis.posterior.resume import ResumableFit
from blr_analysis.posterior.stationarity import measured
from blr_analysis.posterior.structures import KINDS, Diagonal, Kronecker, Structure
from blr_analysis.posterior.structures.contract import unit_rows
from blr_analysis.snapshots import buffers_of
from blr_analysis.task import Task

STRUCTURES = tuple(KINDS)
AS_PRIORS = ("diag", "kron", "full")
CURVATURES = {  # as records call them, and what is summed
    "ggn": ("ggn", "sum_i J_i^T Lambda_i J_i"),
    "empirical_fisher": ("fisher_emp", "sum_i g_i g_i^T"),
    "mc_fisher": ("fisher_mc", "sum_i mean over {samples} sampled labels of g_i g_i^T"),
    "exact": ("hessian", "sum_i Hessian of loss_i"),
}
PRIOR_AND = "S = diag(prior_precision) +"
DRAWN = 16  # labels of an example, where its outputs are many
TINY = 1e-6  # δ of input moments, where none is given: only that S is positive
EXACT_LIMIT = 20_000  # parameters: the Hessian is multiplied with as many vectors


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
        prior_precision: δ > 0, a number, one per parameter name, or a tensor per parameter name
            with one for each weight ("diag" and "full" alone). None: the
            task's own, where an estimator named it, else found from the weights and the data, see
            :mod:`blr_analysis.posterior.prior_choice`, with the Kronecker eigenvalues (one
            Kronecker fit more for other structures); ``record["prior_choice"]`` says how.
        initial: θ₀, the prior's mean: the state dict of the first weights, or of the base model of
            a fine-tune; None: those of the task's recipe, else 0.
        curvature: "ggn" (exact over the outputs; not for sequences), "empirical_fisher",
            "mc_fisher", or "exact", the Hessian of the loss, by products with all P unit vectors
            ("diag" and "full", P up to 20,000). Where the Hessian is negative S is raised to δ,
            with a warning; ``record["floored"]`` is the share of S that was. None: "ggn"; of more
            than 256 outputs 16 labels are drawn of each example for the layers below the last one,
            which stays exact ("full" stays exact all over); of sequences "mc_fisher". The
            posterior's ``note`` says where labels were drawn.
        samples: labels drawn per example for "mc_fisher".
        rank: r of "lowrank"; None: as many as explain 95 % of Σ_i tr(Λ_i V_i), up to 4,000. The
            record holds ``rank`` and ``explained``, the share that is explained at least.
        prior: an earlier posterior N(m₀, S₀⁻¹) in the prior's place, of a model with the same
            parameters and any data (that of a :class:`~blr_analysis.sensitivity.WhatIf`, too). The
            objective is then Σ_i ℓ_i + ½ (θ − m₀)ᵀ S₀ (θ − m₀), and S = S₀ + Σ_i ∇²ℓ_i (K&R,
            section 5): of a linear model the posterior of both data sets. The structure is the
            prior's own ("diag", "kron", where the new data are seen in the prior's basis, or
            "full"), or "full".
        unfinished: a folder that keeps what the fit has done, so that the same call, made again
            after it was ended, goes on there and comes to the same bits; yours to remove.

    Returns:
        The posterior. ``.at_minimum`` says whether the weights minimise the task's loss; where they
        do not, ``.earlier`` holds the posteriors at the task's checkpoints.

    Raises:
        PosteriorError: an ``initial`` of another model, or no δ to be found.
        InputError: unknown structure or curvature, δ ≤ 0, a model too large for "full" or
            "exact", "ggn" for sequences, "exact" for "kron" or "lowrank".
        ModelError: nothing to train, NaN, BatchNorm in training mode.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(20, 3), torch.randn(20)
        >>> task = blr.Task(torch.nn.Linear(3, 1), (X, y), likelihood="gaussian")
        >>> q = fit_laplace(task, structure="full", prior_precision=1.0)
        >>> Z = torch.cat([X, torch.ones(20, 1)], 1)
        >>> torch.allclose(q.form.matrix, Z.T @ Z + torch.eye(4), atol=1e-4)
        True
    """

    def fit_at(task: Task, weights: dict[str, Tensor] | None = None) -> Posterior:
        def fit(sums: Mapping[str, Unfinished] | None) -> Posterior:
            return fit_kept(
                task,
                structure=structure,
                prior_precision=prior_precision,
                initial=initial,
                curvature=curvature,
                samples=samples,
                rank=rank,
                params=weights,
                kept=sums,
            )

        if resumable is None:
            return fit(None)
        return resumable.fitted(task, weights or task.parameters(), fit)

    if prior is not None:
        instance("prior", prior, Posterior, "a blr_analysis.Posterior; a number is prior_precision")
    resumable = None
    if unfinished is not None:
        earlier_data = None if prior is None else (prior.mean, prior.form.tensors())
        settings = (prior_precision, initial, curvature, samples, rank, earlier_data)
        folder = Path(path_of(unfinished)).expanduser()
        resumable = ResumableFit(folder, structure, settings)
    if prior is not None:
        if prior_precision is not None or initial is not None:
            raise InputError("prior= has its own precision and mean: leave the others out")
        prior_precision = posterior_as_prior(prior.on(task, same_data=False))
        structure = _structure_beside(prior, structure)
    last = fit_at(task)
    if last.at_minimum or last.structure == "gram":
        return last
    earlier = []
    for number, state in enumerate(task.checkpoints or (), 1):
        with_buffers = task.holding({n: state[n] for n in last.buffers if n in state})
        q = fit_at(with_buffers, widened({n: state[n] for n in last.mean}))
        earlier.append(q.changed(record={**q.record, "checkpoint": number}))
    return last.changed(earlier=tuple(earlier))


def _structure_beside(prior: Posterior, structure: str) -> str:
    """The prior's own where nothing else was asked for; all others but "full" are refused."""
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
    if posterior.structure not in AS_PRIORS:
        raise InputError(
            f"a posterior of structure {posterior.structure!r} is no prior: fit it as 'diag', "
            "'kron' or 'full'"
        )
    return FormPrior(posterior.prior.entries, dict(posterior.mean), posterior.form)


def _prior_of(given: Any, shapes: Shapes) -> Prior:
    """What a user gave for δ: a number, one per parameter, or one per weight."""
    is_by_weight = isinstance(given, Mapping) and any(
        isinstance(value, Tensor) and value.ndim > 0 for value in given.values()
    )
    if not is_by_weight:
        return Prior.read(given, shapes, positive=True)
    tensors = real_tensors("prior_precision", given)
    if mismatch := differences(tensors, shapes, ("prior_precision", "model")):
        raise PosteriorError(f"prior_precision does not fit the model: {mismatch}")
    form = Diagonal(tensors)
    form.check()
    return FormPrior({n: float(t.min()) for n, t in tensors.items()}, None, form)


@torch.inference_mode(False)  # also where the caller switched it on
def fit_kept(
    task: Task,
    *,
    structure: str,
    prior_precision: Given | Prior | Mapping[str, Tensor] | None = None,
    initial: Mapping[str, Tensor] | None = None,
    curvature: str | None = None,
    samples: int = 1,
    seed: int = 0,
    rank: int | None = None,
    params: dict[str, Tensor] | None = None,
    kept: Mapping[str, Unfinished] | None = None,
) -> Posterior:
    """:func:`fit_laplace` at these weights alone, without earlier posteriors.

    Args:
        seed: by which labels are drawn.
        params: the weights; None: the model's.
        kept: where the sums of a sweep are kept meanwhile, so that a fit that was cut off goes on:
            "inputs" of "gram", "factors" and "values" of "kron"; where δ is found by a Kronecker
            fit, "kron values" and "diag values" apart.
    """
    instance("task", task, Task, "a blr_analysis.Task")
    if params is None:
        params = task.parameters()
    if prior_precision is None:
        prior_precision = task.prior_precision
    if initial is None and task.recipe is not None:
        initial = task.recipe.initial
    kind = KINDS[one_of("structure", structure, STRUCTURES)]
    prior_is_known = prior_precision is not None
    shapes = {n: tuple(p.shape) for n, p in params.items()}
    prior = _prior_of(prior_precision if prior_is_known else 1.0, shapes)
    if isinstance(prior, FormPrior):
        prior = prior.placed(params)
    is_chosen_here = curvature is None and not kind.of_inputs
    if is_chosen_here and task.likelihood.is_sequence:
        curvature = "mc_fisher"
    fit = Fit(task, params, prior, curvature or "ggn", samples, seed, rank, kept or {})
    _check(fit, kind)
    if curvature is None and kind.draws_labels and has_many_outputs(task, params):
        fit.drawn = DRAWN
    fit.prior = prior.around(initial, params)
    fit.measures = _needs_gradient(fit, kind, prior_is_known=prior_is_known)
    form, details = _fitted(fit, kind, prior_is_known=prior_is_known)
    if is_chosen_here and task.likelihood.is_sequence:
        details["drawn"] = {"labels": samples, "of": "token"}
    q = _posterior(fit, form, {**_record(fit, kind), **details})
    return _with_stationarity(fit, q) if fit.measures else q


def _needs_gradient(fit: Fit, kind: type[Structure], *, prior_is_known: bool) -> bool:
    """Whether Σ_i ∇ℓ_i is summed, for δ and for the distance from the minimum.

    Sequences, and sweeps whose sums are kept, are spared it where δ is known.
    """
    is_long = fit.task.likelihood.is_sequence or bool(fit.kept)
    return not (kind.of_inputs or (prior_is_known and is_long))


def _posterior(fit: Fit, form: Structure, record: dict[str, Any]) -> Posterior:
    task = fit.task
    q = Posterior(
        widened({n: p.clone() for n, p in narrow(fit.params).items()}),
        form,
        prior_precision=fit.prior,
        n_data=task.n_data,
        record=record,
        buffers=buffers_of(task.model),
    )
    return q.changed(
        source="laplace",
        is_classifier=task.likelihood.is_classification,
        fingerprint=fingerprint(task, fit.params),
        frozen_values=frozen_numbers(task, fit.params),
        input_ranges=input_ranges(task),
    )


def _with_stationarity(fit: Fit, q: Posterior) -> Posterior:
    gradient = fit.gradient or loss_and_gradient(fit.task, fit.params)[0]
    check_connected(fit.task, fit.params, gradient)
    measurement = measured(fit.task, q, gradient)
    return q.changed(stationarity=measurement.stationarity, saturated=measurement.saturated)


def _fitted(
    fit: Fit, kind: type[Structure], *, prior_is_known: bool
) -> tuple[Structure, dict[str, Any]]:
    """S, and what the record says of it; a prior that is not known is found, and is the fit's."""
    details: dict[str, Any] = {}
    form: Structure | None = None
    if not prior_is_known and not kind.of_inputs:
        form = _with_found_prior(fit, details)
    if fit.curvature == "exact":
        form, details["floored"] = _exact(fit, kind)
        return form, details
    own_basis = _basis_of_prior(fit, kind)
    if own_basis is not None:
        return own_basis.summed(fit).plus_prior(fit.prior), details
    if form is None or kind is not Kronecker:
        form, details_of_kind = kind.fitted(fit)
        details |= details_of_kind
    if not prior_is_known and kind.of_inputs:
        fit.prior = Prior({None: TINY * _mean_diagonal(form)}, fit.prior.mean)
    return form.plus_prior(fit.prior), details


def _basis_of_prior(fit: Fit, kind: type[Structure]) -> Structure | None:
    """0 in the basis of a Kronecker prior, in which the data are seen too; None elsewhere."""
    if kind is not Kronecker or not isinstance(fit.prior, FormPrior):
        return None
    if not isinstance(fit.prior.form, Kronecker):
        return None
    return fit.prior.form.zeros()


def _with_found_prior(fit: Fit, details: dict[str, Any]) -> Kronecker:
    """The Kronecker curvature, by which the fit's prior is found."""
    curvature, _ = Kronecker.fitted(fit)
    if not any(bool(values.any()) for values in curvature.values.values()):
        refuse_flat(fit.task, fit.params, fit.curvature)
    delta, choice = chosen_prior(curvature, fit.prior.gap(fit.params), fit.gradient)
    fit.prior = Prior({None: delta}, fit.prior.mean)
    details["prior_choice"] = {"delta": delta, **choice}
    return curvature


def _mean_diagonal(form: Structure) -> float:
    diagonals = form.diagonal().values()
    total = sum(float(d.double().sum()) for d in diagonals)
    return total / sum(d.numel() for d in diagonals)


def _record(fit: Fit, kind: type[Structure]) -> dict[str, Any]:
    """Where the posterior comes from, in words and names."""
    task = fit.task
    parameters = list(task.model.named_parameters())
    record = {
        **_definition(fit, kind),
        "likelihood": task.likelihood.recorded,
        "fixed": [n for n, _ in parameters if n not in fit.params],
        "frozen": [n for n, p in parameters if not p.requires_grad],
        "tied": tied_names(task.model),
    }
    if task.recipe is not None:
        record["recipe"] = task.recipe.record
    if task.likelihood.estimated:
        record["estimated"] = task.likelihood.settings
    return record


def _definition(fit: Fit, kind: type[Structure]) -> dict[str, Any]:
    """What S is: its kind, its formula, and how many labels were drawn in place of all outputs."""
    if kind.of_inputs:
        return {
            "kind": kind.kind,
            "definition": f"{PRIOR_AND} sum of a a^T x 1, a the inputs of each layer",
        }
    if fit.drawn:
        name, formula = CURVATURES["mc_fisher"]
        sampled = formula.format(samples=fit.drawn)
        head = "the last layer's exact where its outputs are the model's"
        return {
            "kind": name,
            "definition": f"{PRIOR_AND} {sampled}, {head}",
            "drawn": {"labels": fit.drawn, "outputs": n_outputs(fit.task, fit.params)},
        }
    name, formula = CURVATURES[fit.curvature]
    return {"kind": name, "definition": f"{PRIOR_AND} {formula.format(samples=fit.samples)}"}


def _exact(fit: Fit, kind: type[Structure]) -> tuple[Structure, float]:
    """δ + Σ_i ∇²ℓ_i, nowhere below δ, and the share that was."""
    hessian = Hessian(fit.task, fit.params)
    hessian.check_symmetric()
    rows = unit_rows(fit.params, hessian.product)
    form, floored = kind.of_rows(fit.params, rows).plus_prior(fit.prior).floored(fit.prior)
    if floored:
        warnings.warn(
            f"{floored:.1%} of the exact Hessian is negative, and raised to the prior; train on",
            stacklevel=7,  # who calls fit_laplace
        )
    return form, floored


def _check(fit: Fit, kind: type[Structure]) -> None:
    likelihood = fit.task.likelihood
    one_of("curvature", fit.curvature, tuple(CURVATURES))
    positive_int("samples", fit.samples)
    if kind.of_inputs and fit.curvature != "ggn":
        raise InputError(f"structure={kind.kind!r} has no curvature: leave curvature out")
    if likelihood.is_sequence and fit.curvature == "ggn" and not kind.of_inputs:
        raise InputError(
            f'curvature="ggn" is too much for sequences ({likelihood.name}); use '
            '"empirical_fisher" or "mc_fisher"'
        )
    if not fit.params:
        raise ModelError("the model has no trainable parameters; set requires_grad")
    fit.task.check_parameters(fit.params)
    for name, weights in fit.params.items():
        if not bool(torch.isfinite(weights).all()):
            raise ModelError(f"the weights of {name!r} hold NaN or inf; was training stable?")
    size = sum(p.numel() for p in fit.params.values())
    kind.check_fit(size, fit.rank)
    if fit.curvature == "exact" and size > EXACT_LIMIT:
        raise InputError(
            f"curvature='exact' takes {size:,} Hessian products; use 'ggn' above "
            f"{EXACT_LIMIT:,} parameters"
        )

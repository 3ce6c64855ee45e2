"""One fit of a posterior, at one set of weights: what :func:`blr_analysis.fit_laplace` repeats.

The steps are: read the prior, sweep over the data for S, find δ where nobody gave it, and describe
the fit in the posterior's record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import n_outputs
from blr_analysis.backprop.hessian import Hessian
from blr_analysis.backprop.loss import check_connected, loss_and_gradient
from blr_analysis.checks import instance, one_of, positive_int
from blr_analysis.errors import InputError, ModelError, PosteriorError, warn_user
from blr_analysis.files import Unfinished
from blr_analysis.half import narrow, widened
from blr_analysis.models import n_parameters
from blr_analysis.posterior.capture import tied_names
from blr_analysis.posterior.fit import Fit, has_many_outputs, random_sequences
from blr_analysis.posterior.flat import refuse_flat
from blr_analysis.posterior.input_ranges import input_ranges
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.prior import (
    FormPrior,
    Given,
    Prior,
    Shapes,
    differences,
    has_one_for_each_weight,
    real_tensors,
)
from blr_analysis.posterior.prior_choice import chosen_prior
from blr_analysis.posterior.reach import unreached
from blr_analysis.posterior.recognition import fingerprint, frozen_numbers
from blr_analysis.posterior.stationarity import measured
from blr_analysis.posterior.structures import KINDS, Diagonal, Kronecker, Structure
from blr_analysis.posterior.structures.contract import unit_rows
from blr_analysis.snapshots import buffers_of
from blr_analysis.task import Task

STRUCTURES = tuple(KINDS)
CURVATURES = {  # what records call each, and the formula of its sum
    "ggn": ("ggn", "sum_i J_i^T Lambda_i J_i"),
    "empirical_fisher": ("fisher_emp", "sum_i g_i g_i^T"),
    "mc_fisher": ("fisher_mc", "sum_i mean over {samples} sampled labels of g_i g_i^T"),
    "exact": ("hessian", "sum_i Hessian of loss_i"),
}
PRIOR_AND = "S = diag(prior_precision) +"
LABELS_DRAWN = 16  # of an example, where its outputs are many
GRAM_PRIOR = 1e-6  # δ of input moments over their mean diagonal: enough to make S positive
EXACT_LIMIT = 20_000  # parameters: the Hessian is multiplied with as many vectors


@torch.inference_mode(False)  # also where the caller switched it on
def fit_at_weights(
    task: Task,
    unfinished: Mapping[str, Unfinished] | None = None,
    *,
    structure: str,
    prior_precision: Given | Prior | Mapping[str, Tensor] | None = None,
    initial: Mapping[str, Tensor] | None = None,
    curvature: str | None = None,
    samples: int = 1,
    seed: int = 0,
    rank: int | None = None,
    params: dict[str, Tensor] | None = None,
    sampled: bool = False,
) -> Posterior:
    """:func:`blr_analysis.fit_laplace` at these weights alone, without earlier posteriors.

    Args:
        unfinished: files that store the sums of a sweep every minute, so that a fit that was cut
            off goes on from there. Their names are "inputs" for "gram", and "factors" and "values"
            for "kron". Where a Kronecker fit finds δ, its values are "kron values", and those of
            the structure itself "diag values".
        seed: of the labels that are drawn.
        params: the weights; None: the model's.
        sampled: whether sequences are sampled.
    """
    instance("task", task, Task, "a blr_analysis.Task")
    kind = KINDS[one_of("structure", structure, STRUCTURES)]
    if params is None:
        params = task.parameters()
    if prior_precision is None:
        prior_precision = task.prior_precision
    prior_is_known = prior_precision is not None
    prior = _prior_of(prior_precision if prior_is_known else 1.0, params)
    draws_for_tokens = curvature is None and task.likelihood.is_sequence and not kind.of_inputs
    if draws_for_tokens:
        curvature = "mc_fisher"
    fit = Fit(
        task=task,
        params=params,
        prior=prior,
        curvature=curvature or "ggn",
        samples=samples,
        seed=seed,
        rank=rank,
        unfinished=unfinished or {},
    )
    _check(fit, kind)
    if sampled and kind in (Kronecker, Diagonal):
        fit.sample = random_sequences(task)
    if curvature is None and kind.draws_labels and has_many_outputs(task, params):
        fit.labels_drawn = LABELS_DRAWN
    fit.prior = prior.around(_initial_of(task, initial), params)
    fit.measures_gradient = _needs_gradient(fit, kind, prior_is_known=prior_is_known)
    form, details = _precision(fit, kind, prior_is_known=prior_is_known)
    if draws_for_tokens:
        details["drawn"] = {"labels": samples, "of": "token"}
    q = _posterior(fit, form, {**_record(fit, kind), **details})
    return _with_stationarity(fit, q) if fit.measures_gradient else q


def _prior_of(given: Any, params: Mapping[str, Tensor]) -> Prior:
    """The prior from δ as a user gave it: a number, one per parameter, or one per weight."""
    shapes: Shapes = {n: tuple(p.shape) for n, p in params.items()}
    is_by_weight = isinstance(given, Mapping) and any(map(has_one_for_each_weight, given.values()))
    if not is_by_weight:
        prior = Prior.read(given, shapes, positive=True)
        return prior.placed(params) if isinstance(prior, FormPrior) else prior
    tensors = real_tensors("prior_precision", given)
    if mismatch := differences(tensors, shapes, ("prior_precision", "model")):
        raise PosteriorError(f"prior_precision does not fit the model: {mismatch}")
    form = Diagonal(tensors)
    form.check()
    smallest: dict[str | None, float] = {n: float(t.min()) for n, t in tensors.items()}
    return FormPrior(smallest, None, form).placed(params)


def _initial_of(task: Task, initial: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
    """θ₀ that the caller gave, else that of the task's recipe, if it has one."""
    if initial is None and task.recipe is not None:
        return task.recipe.initial
    return initial


def _needs_gradient(fit: Fit, kind: type[Structure], *, prior_is_known: bool) -> bool:
    """Whether the fit computes Σ_i ∇ℓ_i, for δ and for the distance from the minimum.

    Where δ is known, sequences and resumable sweeps are spared the work.
    """
    is_long = fit.task.likelihood.is_sequence or bool(fit.unfinished)
    return not (kind.of_inputs or (prior_is_known and is_long))


def _precision(
    fit: Fit, kind: type[Structure], *, prior_is_known: bool
) -> tuple[Structure, dict[str, Any]]:
    """S with the prior in it, and what the record says of it.

    A prior that is not known is found here, and becomes the fit's.
    """
    details: dict[str, Any] = {}
    kronecker: Kronecker | None = None
    if not prior_is_known and not kind.of_inputs:
        kronecker, details["prior_choice"] = _find_prior(fit)
    if fit.curvature == "exact":
        form, details["floored"] = _exact(fit, kind)
        return form, details
    basis_of_prior = _basis_of_prior(fit, kind)
    if basis_of_prior is not None:
        return basis_of_prior.summed(fit).plus_prior(fit.prior), details
    curvature: Structure | None = kronecker if kind is Kronecker else None
    if curvature is None:
        curvature, details_of_kind = kind.fitted(fit)
        details |= details_of_kind
    if names := unreached(curvature):
        details["unreached"] = names
    if not prior_is_known and kind.of_inputs:
        fit.prior = Prior({None: GRAM_PRIOR * _mean_diagonal(curvature)}, fit.prior.mean)
    return curvature.plus_prior(fit.prior), details


def _find_prior(fit: Fit) -> tuple[Kronecker, dict[str, Any]]:
    """The Kronecker curvature of the data, and the record of the δ that it led to.

    That δ becomes the fit's prior.
    """
    curvature, _ = Kronecker.fitted(fit)
    if not any(bool(values.any()) for values in curvature.values.values()):
        refuse_flat(fit.task, fit.params, fit.curvature)
    delta, choice = chosen_prior(curvature, fit.prior.gap(fit.params), fit.gradient)
    fit.prior = Prior({None: delta}, fit.prior.mean)
    return curvature, {"delta": delta, **choice}


def _basis_of_prior(fit: Fit, kind: type[Structure]) -> Structure | None:
    """A matrix of zeros in the basis of a Kronecker prior, to which the data are added; None
    unless prior and fit are both "kron"."""
    if kind is not Kronecker or not isinstance(fit.prior, FormPrior):
        return None
    if not isinstance(fit.prior.form, Kronecker):
        return None
    return fit.prior.form.zeros()


def _exact(fit: Fit, kind: type[Structure]) -> tuple[Structure, float]:
    """δ + Σ_i ∇²ℓ_i, raised to δ where it is below, and the share of it that was."""
    hessian = Hessian(fit.task, fit.params)
    hessian.check_symmetric()
    rows = unit_rows(fit.params, hessian.product)
    form = kind.of_rows(fit.params, rows).plus_prior(fit.prior)
    floored_form, share = form.floored(fit.prior)
    if share:
        warn_user(
            f"{share:.1%} of the exact Hessian is negative, and raised to the prior; train on"
        )
    return floored_form, share


def _mean_diagonal(form: Structure) -> float:
    diagonals = form.diagonal().values()
    trace = sum(float(d.double().sum()) for d in diagonals)
    return trace / sum(d.numel() for d in diagonals)


def _posterior(fit: Fit, form: Structure, record: dict[str, Any]) -> Posterior:
    """The posterior of a fit, with the numbers by which its model and data are recognised."""
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
    """The posterior with its distance from the minimum."""
    gradient = fit.gradient or loss_and_gradient(fit.task, fit.params)[0]
    check_connected(fit.task, fit.params, gradient)
    measurement = measured(fit.task, q, gradient)
    return q.changed(stationarity=measurement.stationarity, saturated=measurement.saturated)


def _record(fit: Fit, kind: type[Structure]) -> dict[str, Any]:
    """The entries of the record that say where a posterior comes from."""
    task = fit.task
    parameters = list(task.model.named_parameters())
    record = {
        **_definition(fit, kind),
        "likelihood": task.likelihood.recorded,
        "fixed": [n for n, _ in parameters if n not in fit.params],
        "frozen": [n for n, p in parameters if not p.requires_grad],
        "tied": tied_names(task.model),
        "model_parameters": n_parameters(task.model),
    }
    if task.recipe is not None:
        record["recipe"] = task.recipe.record
    if task.likelihood.estimated:
        record["estimated"] = task.likelihood.settings
    return record


def _definition(fit: Fit, kind: type[Structure]) -> dict[str, Any]:
    """The entries of the record that say what S is: its kind, its formula, and, where labels were
    drawn in place of exact columns, how many."""
    if kind.of_inputs:
        return {
            "kind": kind.kind,
            "definition": f"{PRIOR_AND} sum of a a^T x 1, a the inputs of each layer",
        }
    if fit.labels_drawn:
        name, formula = CURVATURES["mc_fisher"]
        sum_over_labels = formula.format(samples=fit.labels_drawn)
        exact_part = "the last layer's exact where its outputs are the model's"
        return {
            "kind": name,
            "definition": f"{PRIOR_AND} {sum_over_labels}, {exact_part}",
            "drawn": {"labels": fit.labels_drawn, "outputs": n_outputs(fit.task, fit.params)},
        }
    name, formula = CURVATURES[fit.curvature]
    return {"kind": name, "definition": f"{PRIOR_AND} {formula.format(samples=fit.samples)}"}


def _check(fit: Fit, kind: type[Structure]) -> None:
    """Raise unless these settings, this model and this structure go together."""
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
        raise ModelError(
            "the model has no trainable parameters; set requires_grad, or load an adapter with "
            "is_trainable=True"
        )
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

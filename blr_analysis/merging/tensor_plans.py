"""What becomes of every tensor in a merge: merged, averaged, copied, or refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from blr_analysis.backprop.matrices import Joint
from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.files import Spec, same_bytes
from blr_analysis.files.names import TOKEN_TABLES, module_word
from blr_analysis.merging.job import Weight
from blr_analysis.merging.merge_plan import (
    AVERAGED,
    BASE,
    COPIED,
    MERGED,
    OWN,
    ZERO,
    MergePlan,
    OpenModel,
    TensorPlan,
)
from blr_analysis.merging.methods import MATRICES
from blr_analysis.merging.sources import MERGEABLE

COUNTER = "num_batches_tracked"  # of BatchNorm; only averages without momentum use it
# BatchNorm's statistics are averaged: a method could make a variance negative.
STATISTICS = ("running_mean", "running_var")
DELLA_EPSILON = 0.15  # unless the user sets epsilon
SMALLEST_TOTAL = 1e-12  # a smaller sum of weights divides nothing
MISSING = ""  # a precision that a model lacks
ALIKE = "the same in all models"  # a note


def plan_tensors(plan: MergePlan) -> tuple[TensorPlan, ...]:
    """What becomes of every tensor of the plan's reference.

    Raises:
        InputError: a weight is not finite, or the weights sum to 0 where their sum divides.
        ModelError: the models differ in a tensor of integers.
        PosteriorError: a precision is missing and ``missing_precision`` is "error", or precisions
            have different structures in one layer.
    """
    tensors = [_plan_tensor(plan, name) for name in plan.reference.specs]
    if not plan.method.uses_precisions:
        return tuple(tensors)
    if plan.job.missing_precision == "error":
        _refuse_missing(plan, tensors)
    takes_base = plan.job.missing_precision == "base" and plan.method.uses_base_precision
    stand_in = BASE if takes_base else ZERO
    return _in_layers(plan, [_with_stand_in(tensor, stand_in) for tensor in tensors])


def _plan_tensor(plan: MergePlan, name: str) -> TensorPlan:
    """What becomes of one tensor; its missing precisions are not replaced yet."""
    spec = plan.reference.specs[name]
    weights = _weights(plan, name)
    origins = [_origin(model, name) for model in plan.models]
    names = tuple(model.names[name] for model in plan.models)
    tensor = TensorPlan(name, COPIED, spec, names, tuple(weights), note=_joined(*origins))
    if spec.dtype not in MERGEABLE or spec.numel == 0:
        return _with_note(tensor, _reason_to_copy(plan, name))
    written = Spec(spec.shape, plan.job.out_dtype or spec.dtype)
    precisions = _precisions(plan, name)
    all_have_precisions = all(model.precision is not None for model in plan.models)
    no_precision_covers_it = all_have_precisions and not any(precisions)
    if no_precision_covers_it and written == spec and not _models_that_differ(plan, name):
        return _with_note(tensor, ALIKE)
    is_statistic = name.rpartition(".")[2] in STATISTICS
    is_buffer = no_precision_covers_it and any(name in model.buffers for model in plan.models)
    if is_statistic or is_buffer:
        mean = replace(tensor, fate=AVERAGED, spec=written, weights=_shares(weights))
        mean = replace(mean, precisions=(ZERO,) * len(plan.models))
        return _with_note(mean, "a running statistic" if is_statistic else "a buffer")
    merged = replace(tensor, fate=MERGED, spec=written, precisions=precisions)
    return _plan_of_method(plan, merged)


def _plan_of_method(plan: MergePlan, merged: TensorPlan) -> TensorPlan:
    """A tensor that is merged, with the settings of the method for it."""
    name = merged.name
    weights = merged.weights
    scale = number(plan.job.scale, name, "scale") if plan.method.takes("scale") else 1.0
    if plan.method.positive and min(weights) < 0:
        raise InputError(
            f"{plan.method.name} takes no negative weights, got {min(weights):g} for {name!r}: "
            "task_arithmetic takes a model out"
        )
    if plan.method.scope == MATRICES and not _is_matrix(name, merged.spec):
        return _with_note(replace(merged, weights=_shares(weights)), "no matrix: averaged")
    merged = replace(merged, scope=plan.method.scope)
    if plan.method.matrix is not None:
        return replace(merged, scale=scale)
    if plan.method.thinned:  # these methods divide by the weights entry by entry
        merged = replace(merged, densities=_densities(plan, name), scale=scale)
        return _with_options(plan, merged)
    scaled = tuple(weight * scale for weight in _normalized(plan, name, weights))
    return replace(merged, weights=scaled)


def _weights(plan: MergePlan, name: str) -> list[float]:
    """α_t of every model for one tensor."""
    return [number(model.weight, name, f"weight of {model.source.name!r}") for model in plan.models]


def _densities(plan: MergePlan, name: str) -> tuple[float, ...]:
    """For each model, the share of θ_t − θ_0 that stays."""
    densities = tuple(
        number(model.density, name, f"density of {model.source.name!r}") for model in plan.models
    )
    if not all(0 < density <= 1 for density in densities):
        raise InputError(
            f"densities of {name!r} must be above 0 and at most 1, got {list(densities)}"
        )
    return densities


def _with_options(plan: MergePlan, tensor: TensorPlan) -> TensorPlan:
    """A tensor with ε or γ, where the method has one.

    Raises:
        InputError: γ, or density ± ε, is not between 0 and 1.
    """
    if plan.method.takes("gamma"):
        gammas = tuple(
            number(model.gamma, tensor.name, f"gamma of {model.source.name!r}")
            for model in plan.models
        )
        if not all(0 <= gamma < 1 for gamma in gammas):
            raise InputError(f"gamma of {tensor.name!r} must be from 0 to below 1: {list(gammas)}")
        return replace(tensor, gammas=gammas)
    if not plan.method.takes("epsilon"):
        return tensor
    epsilons = tuple(
        number(
            DELLA_EPSILON if model.epsilon is None else model.epsilon,
            tensor.name,
            f"epsilon of {model.source.name!r}",
        )
        for model in plan.models
    )
    for density, epsilon in zip(tensor.densities, epsilons, strict=True):
        smallest = density - abs(epsilon)
        largest = density + abs(epsilon)
        if smallest <= 0 or largest > 1:
            raise InputError(
                f"density ± epsilon of {tensor.name!r} must lie between 0 and 1, got "
                f"{density:g} ± {epsilon:g}"
            )
    return replace(tensor, epsilons=epsilons)


def _is_matrix(name: str, spec: Spec) -> bool:
    """Whether a tensor is the weight of a layer, and no table with a row for each token."""
    return len(spec.shape) >= 2 and module_word(name) not in TOKEN_TABLES


def _shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights of an average: α_t over their sum; all equal if an α_t is negative or all are 0."""
    total = sum(weights)
    if min(weights) < 0 or total <= 0:
        return (1 / len(weights),) * len(weights)
    return tuple(weight / total for weight in weights)


def _normalized(plan: MergePlan, name: str, weights: Sequence[float]) -> Sequence[float]:
    """α_t, over their sum where the method or the user says so.

    A Fisher average stays the same if all weights are multiplied by a number. Without a base, its
    weights are divided too, so that entries without any precision are averaged.
    """
    total = sum(weights)
    by_precisions = plan.method.divides_by_precisions
    if (plan.job.divides or by_precisions) and not abs(total) > SMALLEST_TOTAL:
        raise InputError(
            f"the weights of {name!r} sum to {total:g}: change them, or set normalize: false"
        )
    if plan.job.divides or (by_precisions and plan.base is None):
        return [weight / total for weight in weights]
    return weights


def _reason_to_copy(plan: MergePlan, name: str) -> str:
    """The note of a tensor that cannot be merged and is copied.

    Raises:
        ModelError: the models differ in it.
    """
    different = _models_that_differ(plan, name)
    if not different:
        return ALIKE
    if name.endswith(COUNTER):
        return f"a count of batches, {plan.reference.name}'s"
    raise ModelError(
        f"{name!r} is of {plan.reference.specs[name].dtype} and differs between "
        f"{different[0]!r} and {plan.reference.name!r}: merge before quantisation"
    )


def _models_that_differ(plan: MergePlan, name: str) -> list[str]:
    """The names of the models whose tensor differs from the reference's."""
    reference = plan.reference
    if reference.specs[name].numel == 0:
        return []
    return [
        model.source.name
        for model in plan.models
        if not same_bytes(reference, name, model.source, model.names[name])
    ]


def _origin(model: OpenModel, name: str) -> str:
    """A note on where one model's tensor comes from; "" where its name is the result's."""
    stored_name = model.names[name]
    facts = []
    if stored_name != name:
        facts.append(f"tied to {stored_name}")
    if model.source.words(stored_name):
        facts.append(model.source.words(stored_name))
    return f"{model.source.name}: {', '.join(facts)}" if facts else ""


def number(weight: Weight, name: str, role: str) -> float:
    """The value of a weight, density or the like for one tensor.

    Args:
        weight: a number, or a function of the tensor's name.
        role: what the number is, for the error.

    Raises:
        InputError: it is no finite number.
    """
    value: Any = weight(name) if callable(weight) else weight
    try:
        checked = float(value)
    except (TypeError, ValueError):
        checked = math.nan
    if not math.isfinite(checked):
        raise InputError(f"the {role} for {name!r} is {value!r}: expected a finite number")
    return checked


def _precisions(plan: MergePlan, name: str) -> tuple[str, ...]:
    """H_t of each model: "own", "zero", or "" where it is missing."""
    if not plan.method.uses_precisions:
        return (ZERO,) * len(plan.models)
    return tuple(_precision(model, name) for model in plan.models)


def _precision(model: OpenModel, name: str) -> str:
    """H_t of one model: "own", "zero" of frozen weights, or "" where it is missing."""
    if model.precision is None:
        return MISSING
    if model.precision.covers(name):
        return OWN
    return ZERO if name in model.precision.frozen else MISSING


def _refuse_missing(plan: MergePlan, tensors: Sequence[TensorPlan]) -> None:
    """Raise :class:`PosteriorError` where a model lacks the precision of a merged tensor."""
    for k, model in enumerate(plan.models):
        lacking = [
            tensor.name
            for tensor in tensors
            if tensor.fate == MERGED and tensor.precisions[k] == MISSING
        ]
        if not lacking:
            continue
        model_name = repr(model.source.name)
        fault = f"the precision of {model_name} is missing"
        if model.precision is not None:
            fault = f"{model.precision.name!r} has none for {some(lacking)} of {model_name}"
        raise PosteriorError(
            f"{fault}: compute it (`blr-analysis fisher`), or set missing_precision"
        )


def _with_stand_in(tensor: TensorPlan, stand_in: str) -> TensorPlan:
    """A tensor whose missing precisions are replaced."""
    if MISSING not in tensor.precisions:
        return tensor
    precisions = tuple(precision or stand_in for precision in tensor.precisions)
    return _with_note(replace(tensor, precisions=precisions), f"precision missing: {stand_in}")


def _with_note(tensor: TensorPlan, note: str) -> TensorPlan:
    """A tensor with one note more."""
    return replace(tensor, note=_joined(tensor.note, note))


def _joined(*notes: str) -> str:
    """Notes as one text; empty ones are left out."""
    return "; ".join(note for note in notes if note)


def _in_layers(plan: MergePlan, tensors: Sequence[TensorPlan]) -> tuple[TensorPlan, ...]:
    """The tensors, each with the name of the layer that it is solved with."""
    joints = {
        layer: joint
        for precision in plan.precisions
        for layer, (joint, _) in precision.layers.items()
    }
    by_name = {tensor.name: tensor for tensor in tensors}
    for layer, joint in joints.items():
        _check_layer(plan, layer, joint, [by_name[name] for name in joint.names])
    layer_of = {name: layer for layer, joint in joints.items() for name in joint.names}
    return tuple(replace(tensor, layer=layer_of.get(tensor.name, "")) for tensor in tensors)


def _check_layer(plan: MergePlan, layer: str, joint: Joint, tensors: Sequence[TensorPlan]) -> None:
    """Raise where one layer's precisions, or the weights of its tensors, differ."""
    for precision in plan.precisions:
        has_same_structure = layer in precision.layers and precision.layers[layer][0] == joint
        if not has_same_structure and any(precision.covers(name) for name in joint.names):
            raise PosteriorError(
                f"{precision.name!r} has another structure in {layer!r} than the other precisions: "
                "fit all of them alike"
            )
    first = tensors[0]
    for tensor in tensors:
        if tensor.weights != first.weights or tensor.precisions != first.precisions:
            raise InputError(
                f"{' and '.join(joint.names)} are merged as one matrix: give them the same weights"
            )

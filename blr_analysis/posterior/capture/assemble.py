"""Puts the captured posterior together, from what an optimizer stores for each parameter."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.errors import ModelError, OptimizerError, PosteriorError, warn_user
from blr_analysis.half import HALF, working
from blr_analysis.posterior.capture.learned import curvature_of
from blr_analysis.posterior.capture.readers import (
    IVON,
    Reader,
    Slot,
    beta2,
    steps,
    weight_of_start,
)
from blr_analysis.posterior.capture.scale import (
    Scale,
    TrainingFacts,
    scale_of_hess,
    scale_of_second_moments,
)
from blr_analysis.posterior.precision_files import write_precision
from blr_analysis.posterior.prior import FormPrior, Given, Prior
from blr_analysis.posterior.prior_choice import by_evidence
from blr_analysis.posterior.structures import Diagonal, Structure

HALF_REASON = "in half precision a running mean cannot fall, and small squares vanish"


@dataclass(frozen=True)
class Captured:
    """The posterior that was captured, as plain tensors by parameter name.

    Attributes:
        mean: the trainable parameters (detached clones; a tied tensor once, by its first name).
        precision: S as a structure, or its diagonal by name, the prior included; float32 where the
            parameter is float16 or bfloat16.
        prior_precision: δ: one number, or one for each name if the optimizer's groups differ.
        n_data: N, the number of training examples.
        record: where it came from, JSON-able.
    """

    mean: dict[str, Tensor]
    precision: dict[str, Tensor] | Structure
    prior_precision: Given | Prior
    n_data: int
    record: dict[str, Any]


def assemble(
    slots: Sequence[Slot],
    reader: Reader,
    model: nn.Module,
    facts: TrainingFacts,
    record: dict[str, Any],
) -> Captured:
    """The captured posterior, with the parameters in the model's order.

    Some optimizers do not know their prior. For them ``facts.bare`` leaves the prior out of S. Then
    S is 0 for weights that never got a gradient, and a prior from the caller is recorded as
    ``prior_outside``.

    Args:
        slots: each trainable parameter of the optimizer with its state.
        reader: reads the state of this kind of optimizer.
        model: the model that was trained.
        facts: what the caller says of the training.
        record: entries of the record, to which this function adds more.
    """
    slots = _in_order_of_model(slots, model)
    learned = _with_gradients(slots, reader)
    earlier = _earlier_posterior(slots, facts)
    _check_half(learned, reader, record)
    groups = {slot.name: slot.group for slot in slots}
    learns_posterior = reader.scaled
    scale = (
        scale_of_hess(groups, facts) if learns_posterior else scale_of_second_moments(groups, facts)
    )
    mean = {slot.name: _mean(slot) for slot in slots}
    estimates, choices = _estimates(slots, learned, reader, facts)
    data_part = {slot.name: _data_part(slot, estimates, scale) for slot in slots}
    without_prior = facts.bare and not learns_posterior
    precision, prior, prior_record = _with_prior(
        data_part, mean, scale, facts, earlier, without_prior=without_prior
    )
    captured_record = {
        "kind": reader.kind,
        "n_data": scale.n_data,
        **scale.record,
        **record,
        "definition": scale.definition,
        **choices,
        **prior_record,
        **_record_of_state(model, slots, learned),
    }
    if earlier is not None:  # its precision S0 stands in the place of the weight decay
        definition = captured_record["definition"].replace("weight_decay", "S0/ess")
        captured_record["definition"] = definition
    return Captured(mean, precision, prior, scale.n_data, captured_record)


def _in_order_of_model(slots: Sequence[Slot], model: nn.Module) -> list[Slot]:
    """The slots in the order of the model's parameters."""
    by_name = {slot.name: slot for slot in slots}
    return [by_name[name] for name, _ in model.named_parameters() if name in by_name]


def _estimates(
    slots: Sequence[Slot], learned: Sequence[Slot], reader: Reader, facts: TrainingFacts
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """h or v̂ by parameter name, and the record's entries on how h was corrected."""
    estimates = {slot.name: _estimate(slot, reader) for slot in learned}
    if not reader.scaled:
        return estimates, {}
    curvature = curvature_of(
        learned,
        estimates,
        is_ivon=reader.kind == IVON.kind,
        batch_size=facts.batch_size,
    )
    return dict(curvature.hessian), curvature.record(initial_share(slots))


def _with_prior(
    data_part: Mapping[str, Tensor],
    mean: Mapping[str, Tensor],
    scale: Scale,
    facts: TrainingFacts,
    earlier: FormPrior | None,
    *,
    without_prior: bool,
) -> tuple[dict[str, Tensor], Given | Prior, dict[str, Any]]:
    """S, the prior that it contains, and the record's entries on the prior."""
    if earlier is not None:
        precision = {name: part + earlier.form.values[name] for name, part in data_part.items()}
        return precision, earlier, {}
    if without_prior:
        return dict(data_part), 0.0, _record_without_prior(scale, facts)
    deltas, choice = _chosen_prior(scale, data_part, mean, facts)
    precision = {name: part + deltas[name] for name, part in data_part.items()}
    return precision, _as_one_number(deltas), choice


def _earlier_posterior(slots: Sequence[Slot], facts: TrainingFacts) -> FormPrior | None:
    """The posterior that an optimizer was made with, as ``prior=``; None for all other optimizers.

    Raises:
        OptimizerError: the caller passes another prior.
    """
    if not any("prior_precision" in slot.state for slot in slots):
        return None
    if facts.prior_precision is not None:
        raise OptimizerError("the optimizer was made with prior=: leave prior_precision out")
    mean = {slot.name: slot.state["prior_mean"].detach().to(slot.value) for slot in slots}
    precision = {
        slot.name: slot.state["prior_precision"].detach().to(slot.value.device, copy=True)
        for slot in slots
    }
    smallest: dict[str | None, float] = {
        name: float(values.min()) for name, values in precision.items()
    }
    return FormPrior(smallest, mean, Diagonal(precision))


def _with_gradients(slots: Sequence[Slot], reader: Reader) -> list[Slot]:
    """The slots of the parameters that a gradient has updated at least once.

    Raises:
        OptimizerError: no parameter was updated.
    """
    learned = [slot for slot in slots if reader.has_learned(slot.state, slot.group)]
    if not learned:
        raise OptimizerError(
            f"the optimizer holds no {reader.key!r} of a parameter: it has not stepped, or trained "
            "another model"
        )
    return learned


def _check_half(learned: Sequence[Slot], reader: Reader, record: Mapping[str, Any]) -> None:
    """Warn if the optimizer's second moment is in half precision.

    Raises:
        OptimizerError: the same, in a state that comes from a file.
    """
    in_half = [slot.name for slot in learned if slot.state[reader.key].dtype in HALF]
    if not in_half:
        return
    fault = f"the optimizer's second moment of {in_half[0]!r}: {HALF_REASON}"
    is_from_file = record["source"] != "optimizer"
    if is_from_file:
        raise OptimizerError(f"{fault}; use fit_laplace")
    warn_user(f"{fault}; train with parameters in float32 (autocast)")


def _data_part(slot: Slot, estimates: Mapping[str, Tensor], scale: Scale) -> Tensor:
    """S − δ of one parameter; zeros if the parameter never got a gradient."""
    if slot.name not in estimates:
        return torch.zeros_like(slot.value, dtype=working(slot.value.dtype))
    return scale.data_part(estimates[slot.name], slot.group)


def _largest_count(learned: Sequence[Slot]) -> float | None:
    """The number of optimizer steps; None for states of ivon-opt, which contain no count."""
    count = max(steps(slot.state, slot.group) for slot in learned)
    return None if math.isnan(count) else count


def _record_without_prior(scale: Scale, facts: TrainingFacts) -> dict[str, Any]:
    """The record's entries for tensors that contain H = S − δ; δ stands in ``prior_outside``."""
    record = {"definition": scale.definition.replace("S = ", "H = ").removesuffix(" + delta")}
    if facts.prior_precision is not None:
        record["prior_outside"] = Prior.of_any(facts.prior_precision).given
    return record


def _record_of_state(
    model: nn.Module, slots: Sequence[Slot], learned: Sequence[Slot]
) -> dict[str, Any]:
    """The record's entries on the optimizer's steps, and on parameters that were not trained.

    The names of these parameters stand by the reason.
    """
    parameters = dict(model.named_parameters())
    in_optimizer = {slot.name for slot in slots}
    with_gradients = {slot.name for slot in learned}
    trainable = [name for name, p in parameters.items() if p.requires_grad]
    return {
        "step": _largest_count(learned),
        "beta2": beta2(slots[0].group),
        "never_updated": [slot.name for slot in slots if slot.name not in with_gradients],
        "not_in_optimizer": [name for name in trainable if name not in in_optimizer],
        "frozen": [name for name, p in parameters.items() if not p.requires_grad],
        "tied": tied_names(model),
    }


def _as_one_number(deltas: Mapping[str, float]) -> float | dict[str, float]:
    """One number if δ is the same for all parameters; else δ by name."""
    distinct = set(deltas.values())
    return dict(deltas) if len(distinct) > 1 else next(iter(distinct))


def _chosen_prior(
    scale: Scale, data_part: Mapping[str, Tensor], mean: Mapping[str, Tensor], facts: TrainingFacts
) -> tuple[dict[str, float], dict[str, Any]]:
    """δ by name, and the record's entries on its choice.

    A δ of the caller, or of an optimizer that learns a posterior, is taken as it is. Otherwise the
    L2 penalty of the training gives δ, if there is one and the prior's mean is 0, as that of the
    penalty is. In all other cases the evidence decides.
    """
    is_of_posterior_optimizer = "ess" in scale.record
    is_stated = facts.prior_precision is not None or is_of_posterior_optimizer
    if scale.prior is not None and is_stated:
        return scale.prior, {}
    has_mean_of_zero = facts.initial is None
    if scale.prior is not None and has_mean_of_zero:
        choice = {"delta": _as_one_number(scale.prior), "rule": "weight_decay"}
        return scale.prior, {"prior_choice": choice}
    delta, choice = by_evidence(Diagonal(dict(data_part)), mean, facts.initial)
    return dict.fromkeys(data_part, delta), choice


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The further names of every parameter that has more than one name, by the first name."""
    first_names: dict[int, str] = {}  # by the parameter's identity
    tied: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first_names.setdefault(id(parameter), name)
        if first_name != name:
            tied.setdefault(first_name, []).append(name)
    return tied


def _mean(slot: Slot) -> Tensor:
    """A copy of one parameter's weights.

    Raises:
        ModelError: the weights are not finite, or have no values.
    """
    if slot.value.is_meta:
        raise ModelError(f"parameter {slot.name!r} is on the meta device: it has no values.")
    n_not_finite = int((~slot.value.isfinite()).sum())
    if n_not_finite:
        raise ModelError(
            f"{slot.name!r} has {n_not_finite} entries that are not finite: use an earlier "
            "checkpoint"
        )
    return slot.value.detach().clone()


def _estimate(slot: Slot, reader: Reader) -> Tensor:
    """h or v̂ of one parameter, in float32 or float64.

    Raises:
        OptimizerError: the optimizer's tensor has another shape than the parameter.
        PosteriorError: the estimate is not finite, or v̂ is negative.
    """
    moment = slot.state[reader.key]
    title = f"the optimizer's {reader.key!r} for {slot.name!r}"
    if moment.shape != slot.value.shape:
        raise OptimizerError(
            f"{title} is {tuple(moment.shape)}, the parameter {tuple(slot.value.shape)}: it was "
            "saved for another model."
        )
    widened_moment = moment.detach().to(slot.value.device, working(moment.dtype))
    estimate = reader.estimate({**slot.state, reader.key: widened_moment}, slot.group)
    is_possible = estimate.isfinite()
    is_second_moment = not reader.scaled  # v̂, where h may be negative
    if is_second_moment:
        is_possible &= estimate >= 0
    n_impossible = int((~is_possible).sum())
    if n_impossible:
        raise PosteriorError(
            f"{title} is negative or not finite in {n_impossible} of {moment.numel()} entries: "
            "use an earlier checkpoint"
        )
    return estimate


def initial_share(slots: Sequence[Slot]) -> float | None:
    """The share of its initial value in h, from 0 to 1; None if the optimizer counts no steps.

    It is the larger of two shares over all weights. The first is Σ ess β₂ᵗ hess_init / Σ ess h. The
    second is the mean of β₂ᵗ, the weight of the initial value; it is larger if that value is small.
    Before any step the share is 1.
    """
    n_weights = sum(slot.value.numel() for slot in slots)
    mean_weight = sum(_weight_of_start(slot) * slot.value.numel() for slot in slots) / n_weights
    if math.isnan(mean_weight):
        return None
    start_sum = sum(_start_sum(slot) for slot in slots)
    h_sum = sum(_h_sum(slot) for slot in slots)
    if h_sum > 0:
        return max(min(start_sum / h_sum, 1.0), mean_weight)
    return max(float(start_sum > 0), mean_weight)


def _weight_of_start(slot: Slot) -> float:
    """β₂ᵗ, the weight of hess_init in h of one parameter; 1 before any step."""
    has_stepped = bool(slot.state)
    return weight_of_start(slot.state, slot.group) if has_stepped else 1.0


def _start_sum(slot: Slot) -> float:
    """Σ ess β₂ᵗ hess_init over the weights of one parameter."""
    ess = float(slot.group["ess"])
    hess_init = float(slot.group.get("hess_init", 0.0))
    return _weight_of_start(slot) * slot.value.numel() * ess * hess_init


def _h_sum(slot: Slot) -> float:
    """Σ ess h over the weights of one parameter; before any step h is hess_init."""
    has_stepped = bool(slot.state)
    if not has_stepped:
        return _start_sum(slot)
    return float(slot.group["ess"]) * float(slot.state["hess"].double().sum())


def write_captured(path: str | os.PathLike[str], captured: Captured, **record: Any) -> None:
    """Write the diagonal precision that was captured, for merging.

    Args:
        path: the file, as in :func:`~blr_analysis.posterior.precision_files.write_precision`.
        captured: the posterior of an optimizer or of a training checkpoint.
        record: further entries of the record, which replace entries of ``captured``.
    """
    assert isinstance(captured.precision, dict)
    if isinstance(captured.prior_precision, FormPrior):
        raise PosteriorError("the prior is an earlier posterior: save Posterior.from_optimizer's")
    entries = captured.record | record
    entries.pop("path", None)  # a path of this machine does not belong into a published file
    entries["n_data"] = captured.n_data
    entries["prior_precision"] = captured.prior_precision
    write_precision(path, captured.precision, **entries)

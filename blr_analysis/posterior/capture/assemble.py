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
        prior_precision: δ, one number, or one per name where the optimizer's groups differ.
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
    """The captured posterior, its parameters in the model's order.

    Some optimizers do not know their prior. With ``facts.bare`` it is left out of S, which may then
    be 0 where no gradient came; a prior from the caller is recorded as ``prior_outside``.

    Args:
        slots: each trainable parameter of the optimizer with its state.
        reader: of this kind of optimizer.
        model: the model that was trained.
        facts: what the caller says of the training.
        record: entries to which this function adds its own.
    """
    parameters = dict(model.named_parameters())
    by_name = {slot.name: slot for slot in slots}
    slots = [by_name[name] for name in parameters if name in by_name]
    learned = _with_gradients(slots, reader)
    earlier = _earlier_posterior(slots, facts)
    _check_half(learned, reader, record)
    groups = {slot.name: slot.group for slot in slots}
    scale = (
        scale_of_hess(groups, facts) if reader.scaled else scale_of_second_moments(groups, facts)
    )
    mean = {slot.name: _mean(slot) for slot in slots}
    estimates, choices = _estimates(slots, learned, reader, facts)
    data_part = {slot.name: _data_part(slot, estimates, scale) for slot in slots}
    is_bare = facts.bare and not reader.scaled
    precision, prior, prior_record = _with_prior(data_part, mean, scale, facts, earlier, is_bare)
    captured_record = {
        "kind": reader.kind,
        "n_data": scale.n_data,
        **scale.record,
        **record,
        "definition": scale.definition,
        **choices,
        **prior_record,
        "step": _largest_count(learned),
        "beta2": beta2(slots[0].group),
        **_record_of_names(parameters, slots, learned),
        "tied": tied_names(model),
    }
    if earlier is not None:
        definition = captured_record["definition"].replace("weight_decay", "S0/ess")
        captured_record["definition"] = definition
    return Captured(mean, precision, prior, scale.n_data, captured_record)


def _estimates(
    slots: Sequence[Slot], learned: Sequence[Slot], reader: Reader, facts: TrainingFacts
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """h or v̂ by parameter name, and what the record says of how h was corrected."""
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
    is_bare: bool,
) -> tuple[dict[str, Tensor], Given | Prior, dict[str, Any]]:
    """S with the prior in it, the prior, and what the record says of the prior."""
    if earlier is not None:
        precision = {name: part + earlier.form.values[name] for name, part in data_part.items()}
        return precision, earlier, {}
    if is_bare:
        return dict(data_part), 0.0, _bare_record(scale, facts)
    deltas, choice = _prior(scale, data_part, mean, facts)
    precision = {name: part + deltas[name] for name, part in data_part.items()}
    return precision, _as_one_number(deltas), choice


def _earlier_posterior(slots: Sequence[Slot], facts: TrainingFacts) -> FormPrior | None:
    """The prior of an optimizer that was made with ``prior=``; None for all others.

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
    bounds: dict[str | None, float] = {n: float(t.min()) for n, t in precision.items()}
    return FormPrior(bounds, mean, Diagonal(precision))


def _with_gradients(slots: Sequence[Slot], reader: Reader) -> list[Slot]:
    """The slots of the parameters that were updated from a gradient, at least once.

    Raises:
        OptimizerError: there is no such parameter.
    """
    learned = [slot for slot in slots if reader.has_learned(slot.state, slot.group)]
    if not learned:
        raise OptimizerError(
            f"the optimizer holds no {reader.key!r} of a parameter: it has not stepped, or trained "
            "another model"
        )
    return learned


def _check_half(learned: Sequence[Slot], reader: Reader, record: Mapping[str, Any]) -> None:
    """Warn of an optimizer whose second moment is in half precision.

    Raises:
        OptimizerError: the state comes from a file.
    """
    in_half = [slot.name for slot in learned if slot.state[reader.key].dtype in HALF]
    if not in_half:
        return
    text = f"the optimizer's second moment of {in_half[0]!r}: {HALF_REASON}"
    if record["source"] != "optimizer":
        raise OptimizerError(f"{text}; use fit_laplace")
    warn_user(f"{text}; train with parameters in float32 (autocast)")


def _data_part(slot: Slot, estimates: Mapping[str, Tensor], scale: Scale) -> Tensor:
    """S − δ of one parameter; zeros where it never got a gradient."""
    if slot.name not in estimates:
        return torch.zeros_like(slot.value, dtype=working(slot.value.dtype))
    return scale.data_part(estimates[slot.name], slot.group)


def _largest_count(learned: Sequence[Slot]) -> float | None:
    """The number of optimizer steps; None in states of ivon-opt, which counts none."""
    count = max(steps(slot.state, slot.group) for slot in learned)
    return None if math.isnan(count) else count


def _bare_record(scale: Scale, facts: TrainingFacts) -> dict[str, Any]:
    """The record's entries for tensors that hold H alone, with δ beside them."""
    record = {"definition": scale.definition.replace("S = ", "H = ").removesuffix(" + delta")}
    if facts.prior_precision is not None:
        record["prior_outside"] = Prior.of_any(facts.prior_precision).given
    return record


def _record_of_names(
    parameters: Mapping[str, nn.Parameter], slots: Sequence[Slot], learned: Sequence[Slot]
) -> dict[str, list[str]]:
    """The names of parameters without a gradient, outside the optimizer, and frozen."""
    in_optimizer = {slot.name for slot in slots}
    with_gradients = {slot.name for slot in learned}
    trainable = [name for name, p in parameters.items() if p.requires_grad]
    return {
        "never_updated": [slot.name for slot in slots if slot.name not in with_gradients],
        "not_in_optimizer": [name for name in trainable if name not in in_optimizer],
        "frozen": [name for name, p in parameters.items() if not p.requires_grad],
    }


def _as_one_number(prior: Mapping[str, float]) -> float | dict[str, float]:
    """The δ of all parameters as one number, where all are the same."""
    distinct = set(prior.values())
    return dict(prior) if len(distinct) > 1 else next(iter(distinct))


def _prior(
    scale: Scale, data_part: Mapping[str, Tensor], mean: Mapping[str, Tensor], facts: TrainingFacts
) -> tuple[dict[str, float], dict[str, Any]]:
    """δ by name, and what the record says of its choice.

    δ is that of the caller or of the optimizer. Where there is none, the L2 penalty of the training
    is taken, if the prior's mean is 0 as that of the penalty; else the evidence decides.
    """
    is_stated = facts.prior_precision is not None or "ess" in scale.record
    if scale.prior is not None and is_stated:
        return scale.prior, {}
    if scale.prior is not None and facts.initial is None:
        choice = {"delta": _as_one_number(scale.prior), "rule": "weight_decay"}
        return scale.prior, {"prior_choice": choice}
    delta, choice = by_evidence(Diagonal(dict(data_part)), mean, facts.initial)
    return dict.fromkeys(data_part, delta), choice


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The other names of every parameter that has several, by its first name."""
    first_names: dict[int, str] = {}  # by the parameter's identity
    tied: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first_names.setdefault(id(parameter), name)
        if first_name != name:
            tied.setdefault(first_name, []).append(name)
    return tied


def _mean(slot: Slot) -> Tensor:
    """A copy of one parameter's weights."""
    if slot.value.is_meta:
        raise ModelError(f"parameter {slot.name!r} is on the meta device: it has no values.")
    n_not_finite = int((~slot.value.isfinite()).sum())
    if n_not_finite:
        raise ModelError(
            f"{slot.name!r} has {n_not_finite} entries not finite: use an earlier checkpoint"
        )
    return slot.value.detach().clone()


def _estimate(slot: Slot, reader: Reader) -> Tensor:
    """h or v̂ of one parameter, in float32 at least.

    Raises:
        OptimizerError: its shape is not the parameter's.
        PosteriorError: it is not finite, or it is a second moment that is negative.
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
    is_second_moment = not reader.scaled
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
    """The share of h that is still its start, from 0 to 1; None where no steps were counted.

    It is the larger one of two shares. The first is Σ β₂ᵗ hess_init / Σ h over all weights, each
    times its group's ess. The second is the weight of the start, the mean of β₂ᵗ, because a small
    start makes h smaller than the data's. Before any step h is all start.
    """
    weight_sum = 0.0
    start_sum = 0.0
    h_sum = 0.0
    for slot in slots:
        n_entries = slot.value.numel()
        has_stepped = bool(slot.state)
        weight = weight_of_start(slot.state, slot.group) if has_stepped else 1.0
        ess = float(slot.group["ess"])
        start = weight * n_entries * ess * float(slot.group.get("hess_init", 0.0))
        weight_sum += weight * n_entries
        start_sum += start
        h_sum += ess * float(slot.state["hess"].double().sum()) if has_stepped else start
    mean_weight = weight_sum / sum(slot.value.numel() for slot in slots)
    if math.isnan(mean_weight):
        return None
    if h_sum > 0:
        return max(min(start_sum / h_sum, 1.0), mean_weight)
    return max(float(start_sum > 0), mean_weight)


def write_captured(path: str | os.PathLike[str], captured: Captured, **record: Any) -> None:
    """Write the diagonal precision that was captured, for merging.

    Args:
        path: as of :func:`~blr_analysis.posterior.precision_files.write_precision`.
        captured: of an optimizer or a training checkpoint.
        record: further entries of the record; they replace those of ``captured``.
    """
    assert isinstance(captured.precision, dict)
    if isinstance(captured.prior_precision, FormPrior):
        raise PosteriorError("the prior is an earlier posterior: save Posterior.from_optimizer's")
    entries = captured.record | record
    entries.pop("path", None)  # a path of this machine does not belong into a published file
    entries["n_data"] = captured.n_data
    entries["prior_precision"] = captured.prior_precision
    write_precision(path, captured.precision, **entries)

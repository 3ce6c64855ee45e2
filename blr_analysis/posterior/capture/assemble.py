"""From what an optimizer holds about each parameter to a mean and a diagonal precision: how many
examples, which prior, and how they enter S."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError, ModelError, OptimizerError, PosteriorError
from blr_analysis.half import HALF, working
from blr_analysis.posterior.capture.learned import curvature_of
from blr_analysis.posterior.capture.readers import (
    IVON,
    Reader,
    Slot,
    State,
    beta2,
    steps,
    weight_of_start,
)
from blr_analysis.posterior.precision_files import write_precision
from blr_analysis.posterior.prior import FormPrior, Given, Prior, n_data_of
from blr_analysis.posterior.prior_choice import by_evidence
from blr_analysis.posterior.structures import Diagonal, Structure

HALF_REASON = "in half precision a running mean cannot fall, and small squares vanish"


@dataclass(frozen=True)
class Facts:
    """What the caller says of a training: see :func:`.from_optimizer`."""

    n_data: int | None = None
    prior_precision: Given | None = None
    initial: Mapping[str, Tensor] | None = None
    scaling: str = "sqrt"
    batch_size: int | None = None
    tokens: int | None = None
    bare: bool = False


@dataclass(frozen=True)
class Captured:
    """What was read: plain tensors by parameter name.

    Attributes:
        mean: the trainable parameters (detached clones; a tied tensor once, by its first name).
        precision: the diagonal of S, same names and shapes, prior precision included; float32
            where the parameter is float16 or bfloat16. Or S as a structure.
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
    slots: Sequence[Slot], reader: Reader, model: nn.Module, facts: Facts, record: dict[str, Any]
) -> Captured:
    """From one slot per trainable parameter to the captured posterior, in the model's order.

    With ``facts.bare``, the prior of an optimizer that does not know its own may be missing, and is
    left out of S, which may then be 0 where no gradient ever came. A prior that the caller gives is
    recorded as ``prior_outside``.
    """
    parameters = dict(model.named_parameters())
    by_name = {slot.name: slot for slot in slots}
    slots = [by_name[name] for name in parameters if name in by_name]
    learned = _with_gradients(slots, reader)
    earlier = _earlier_posterior(slots, facts)
    _check_half(learned, reader, record)
    groups = {slot.name: slot.group for slot in slots}
    scale = own_scale(groups, facts) if reader.scaled else given_scale(groups, facts)
    mean = {slot.name: _mean(slot) for slot in slots}
    estimates = {slot.name: _estimate(slot, reader) for slot in learned}
    choices: dict[str, Any] = {"definition": scale.definition}
    if reader.scaled:
        curvature = curvature_of(
            learned,
            estimates,
            is_ivon=reader.kind == IVON.kind,
            batch_size=facts.batch_size,
        )
        estimates = curvature.hessian
        choices = curvature.record(initial_share(slots))
    data_part = {slot.name: _data_part(slot, estimates, scale) for slot in slots}
    n_steps = _largest_count(learned)
    prior: Given | Prior
    if earlier is not None:
        prior = earlier
        precision = {name: part + earlier.form.values[name] for name, part in data_part.items()}
        choices["definition"] = choices["definition"].replace("weight_decay", "S0/ess")
    elif facts.bare and not reader.scaled:
        prior = 0.0
        precision = data_part
        choices |= _bare_record(scale, facts)
    else:
        deltas, choice = _prior(scale, data_part, mean, facts)
        prior = _as_one_number(deltas)
        precision = {name: part + deltas[name] for name, part in data_part.items()}
        choices |= choice
    captured_record = {
        "kind": reader.kind,
        "n_data": scale.n_data,
        **scale.record,
        **record,
        **choices,
        "step": n_steps,
        "beta2": beta2(slots[0].group),
        **_record_of_names(parameters, slots, learned),
        "tied": tied_names(model),
    }
    return Captured(mean, precision, prior, scale.n_data, captured_record)


def _earlier_posterior(slots: Sequence[Slot], facts: Facts) -> FormPrior | None:
    """The prior of an optimizer that was made with ``prior=``; None of all others.

    Raises:
        OptimizerError: the caller gives another one.
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
    """The parameters that were ever updated from a gradient.

    Raises:
        OptimizerError: there are none.
    """
    learned = [slot for slot in slots if reader.has_learned(slot.state, slot.group)]
    if not learned:
        raise OptimizerError(
            f"the optimizer holds no {reader.key!r} of a parameter: it has not stepped, or trained "
            "another model"
        )
    return learned


def _check_half(learned: Sequence[Slot], reader: Reader, record: Mapping[str, Any]) -> None:
    """Warn of a second moment in half precision; refuse it in a file.

    Raises:
        OptimizerError: a saved state has one.
    """
    in_half = [slot.name for slot in learned if slot.state[reader.key].dtype in HALF]
    if not in_half:
        return
    text = f"the optimizer's second moment of {in_half[0]!r}: {HALF_REASON}"
    if record["source"] != "optimizer":
        raise OptimizerError(f"{text}; use fit_laplace")
    warnings.warn(f"{text}; train with parameters in float32 (autocast)", stacklevel=7)


def _data_part(slot: Slot, estimates: Mapping[str, Tensor], scale: Scale) -> Tensor:
    """S − δ of one parameter: 0 where no gradient ever came."""
    if slot.name not in estimates:
        return torch.zeros_like(slot.value, dtype=working(slot.value.dtype))
    return scale.data_part(estimates[slot.name], slot.group)


def _largest_count(learned: Sequence[Slot]) -> float | None:
    """The number of steps taken; None where nothing counted them (a state that ivon-opt saved)."""
    count = max(steps(slot.state, slot.group) for slot in learned)
    return None if math.isnan(count) else count


def _bare_record(scale: Scale, facts: Facts) -> dict[str, Any]:
    """What the record says of tensors that hold H alone, while δ stands beside them."""
    record = {"definition": scale.definition.replace("S = ", "H = ").removesuffix(" + delta")}
    if facts.prior_precision is not None:
        record["prior_outside"] = Prior.of_any(facts.prior_precision).given
    return record


def _record_of_names(
    parameters: Mapping[str, nn.Parameter], slots: Sequence[Slot], learned: Sequence[Slot]
) -> dict[str, list[str]]:
    """Which parameters had no gradient, no place in the optimizer, or were frozen."""
    in_optimizer = {slot.name for slot in slots}
    with_gradients = {slot.name for slot in learned}
    trainable = [name for name, p in parameters.items() if p.requires_grad]
    return {
        "never_updated": [slot.name for slot in slots if slot.name not in with_gradients],
        "not_in_optimizer": [name for name in trainable if name not in in_optimizer],
        "frozen": [name for name, p in parameters.items() if not p.requires_grad],
    }


def _as_one_number(prior: Mapping[str, float]) -> float | dict[str, float]:
    """One number where all are the same."""
    distinct = set(prior.values())
    return dict(prior) if len(distinct) > 1 else next(iter(distinct))


def _prior(
    scale: Scale, data_part: Mapping[str, Tensor], mean: Mapping[str, Tensor], facts: Facts
) -> tuple[dict[str, float], dict[str, Any]]:
    """δ by name, and how it was chosen where the caller gave none.

    The L2 penalty of the training, where it pulls to 0 as the prior does; else by the evidence.
    """
    is_stated = facts.prior_precision is not None or "ess" in scale.record
    penalty_fits = is_stated or facts.initial is None
    if scale.prior is None or not penalty_fits:
        delta, choice = by_evidence(Diagonal(dict(data_part)), mean, facts.initial)
        return dict.fromkeys(data_part, delta), choice
    if is_stated:
        return scale.prior, {}
    choice = {"delta": _as_one_number(scale.prior), "rule": "weight_decay"}
    return scale.prior, {"prior_choice": choice}


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The further names of parameters that have several, by their first one."""
    first: dict[int, str] = {}
    tied: dict[str, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name:
            tied.setdefault(first[id(p)], []).append(name)
    return tied


def _mean(slot: Slot) -> Tensor:
    if slot.value.is_meta:
        raise ModelError(f"parameter {slot.name!r} is on the meta device: it has no values.")
    if bad := int((~slot.value.isfinite()).sum()):
        raise ModelError(f"{slot.name!r} has {bad} entries not finite: use an earlier checkpoint")
    return slot.value.detach().clone()


def _estimate(slot: Slot, reader: Reader) -> Tensor:
    """h or v̂ of one parameter, in float32 at least.

    Raises:
        OptimizerError: it is of another shape.
        PosteriorError: it is not finite, or a second moment is negative.
    """
    moment = slot.state[reader.key]
    title = f"the optimizer's {reader.key!r} for {slot.name!r}"
    if moment.shape != slot.value.shape:
        raise OptimizerError(
            f"{title} is {tuple(moment.shape)}, the parameter {tuple(slot.value.shape)}: it was "
            "saved for another model."
        )
    wide = moment.detach().to(slot.value.device, working(moment.dtype))
    estimate = reader.estimate({**slot.state, reader.key: wide}, slot.group)
    is_good = estimate.isfinite()
    if not reader.scaled:
        is_good &= estimate >= 0
    bad = int((~is_good).sum())
    if bad:
        raise PosteriorError(
            f"{title} is negative or not finite in {bad} of {moment.numel()} entries: use an "
            "earlier checkpoint"
        )
    return estimate


def initial_share(slots: Sequence[Slot]) -> float | None:
    """How much of h is its start, 0 … 1: what is left of it after t steps in what is there,

        Σ β₂ᵗ hess_init / Σ h  over all weights, each times its group's ess,

    or its weight, the mean of β₂ᵗ, where that is larger: a small start holds h below the data's.
    Without a step, h is all start. None where nobody counted the steps.
    """
    total_weight = 0.0
    total_start = 0.0
    total_h = 0.0
    for slot in slots:
        weight = weight_of_start(slot.state, slot.group) if slot.state else 1.0
        ess = float(slot.group["ess"])
        start = weight * slot.value.numel() * ess * float(slot.group.get("hess_init", 0.0))
        total_weight += weight * slot.value.numel()
        total_start += start
        total_h += ess * float(slot.state["hess"].double().sum()) if slot.state else start
    mean_weight = total_weight / sum(slot.value.numel() for slot in slots)
    if math.isnan(mean_weight):
        return None
    if total_h > 0:
        return max(min(total_start / total_h, 1.0), mean_weight)
    return max(float(total_start > 0), mean_weight)


@dataclass(frozen=True)
class Scale:
    """What turns an estimate (h or v̂) into the data's part of S, and the prior's part.

    Attributes:
        n_data: N.
        prior: δ by parameter name; None: nobody knows it.
        data_part: (estimate, group) → S − δ.
        definition: the formula, as text.
        record: the choices made, JSON-able.
    """

    n_data: int
    prior: dict[str, float] | None
    data_part: Callable[[Tensor, State], Tensor]
    definition: str
    record: dict[str, Any]


def own_scale(groups: Mapping[str, State], facts: Facts) -> Scale:
    """For optimizers that learn a posterior: ess and weight_decay are in the groups.

    Args:
        groups: the optimizer's group by parameter name.
        facts: what the caller says, which must agree.
    """
    one_of("scaling", facts.scaling, ("sqrt", "ess"))
    if facts.initial is not None:
        raise OptimizerError("this optimizer learned with its prior around 0: leave initial out")
    sizes = sorted({float(group["ess"]) for group in groups.values()})
    if not all(math.isfinite(ess) and ess > 0 for ess in sizes):
        raise OptimizerError(f"the optimizer's ess must be positive and finite, not {sizes}.")
    prior = {name: float(g["ess"]) * float(g["weight_decay"]) for name, g in groups.items()}
    _check_prior(prior, facts)
    counts = _token_count(facts)
    if facts.n_data is None:
        n_data = max(1, round(sizes[0]))
    else:
        n_data = n_data_of(facts.n_data)
    if facts.scaling != "ess":  # which says that ess was set apart from N on purpose
        _check_sizes(sizes, n_data, counts, facts)
    return Scale(
        n_data,
        prior,
        lambda hess, group: hess * float(group["ess"]),
        "S = ess*(h + weight_decay)",
        {"scaling": "ess", "ess": sizes, **counts},
    )


def _check_prior(prior: Mapping[str, float], facts: Facts) -> None:
    """Raise :class:`OptimizerError` where the caller's δ is not the optimizer's."""
    if facts.prior_precision is None:
        return
    for name, delta in _by_name(facts, prior).items():
        if not math.isclose(delta, prior[name], rel_tol=1e-6):
            raise OptimizerError(
                f"prior_precision={delta:g} contradicts the optimizer's {prior[name]:g} for "
                f"{name!r}: leave it out"
            )


def _check_sizes(
    sizes: Sequence[float], n_data: int, counts: Mapping[str, int], facts: Facts
) -> None:
    """Raise :class:`OptimizerError` where ``ess`` is not the number of terms of the loss."""
    terms = counts.get("tokens", n_data)
    if facts.n_data is None and (counts or len(sizes) > 1):
        raise OptimizerError(
            f"n_data is missing: the optimizer's ess={sizes} is no number of examples; pass it "
            "beside tokens=, or with scaling='ess'"
        )
    if not all(math.isclose(ess, terms, rel_tol=1e-6) for ess in sizes):
        raise OptimizerError(
            f"{terms} is inconsistent with the optimizer's ess={sizes}: leave n_data out, pass "
            f"tokens={sizes[0]:.0f}, or scaling='ess' (tempered)"
        )


def given_scale(groups: Mapping[str, State], facts: Facts) -> Scale:
    """For second moments: N and the choice of the formula are the caller's, δ where it is known.

    An L2 penalty ``weight_decay`` on the mean loss is δ = N · weight_decay.
    """
    takes_root = one_of("scaling", facts.scaling, ("sqrt", "squared")) == "sqrt"
    if takes_root and facts.batch_size is not None:
        raise InputError("batch_size is used with scaling='squared' only: leave it out")
    if facts.n_data is None:
        raise OptimizerError("n_data is missing: pass n_data=len(dataset)")
    n_data = n_data_of(facts.n_data)
    counts = _token_count(facts)
    terms = float(counts.get("tokens", n_data))  # the loss is a mean over so many

    def root(v: Tensor, group: State) -> Tensor:
        return terms * v.sqrt()

    def squared(v: Tensor, group: State) -> Tensor:
        return terms * positive_int("batch_size", facts.batch_size) * v

    if not takes_root:
        positive_int("batch_size", facts.batch_size)
    return Scale(
        n_data,
        _prior_of_groups(groups, terms, facts),
        root if takes_root else squared,
        "S = N*sqrt(v_hat) + delta" if takes_root else "S = N*B*v_hat + delta",
        {
            "scaling": facts.scaling,
            "batch_size": facts.batch_size,
            "bias_corrected": True,
            **counts,
        },
    )


def _prior_of_groups(
    groups: Mapping[str, State], terms: float, facts: Facts
) -> dict[str, float] | None:
    """δ by name: the caller's, or the penalty of the training; None where there was none."""
    if facts.prior_precision is not None:
        return _by_name(facts, groups)
    penalty = {name: terms * float(g.get("weight_decay", 0.0)) for name, g in groups.items()}
    has_penalty = all(penalty.values()) and all(map(is_penalty, groups.values()))
    return penalty if has_penalty else None


def _token_count(facts: Facts) -> dict[str, int]:
    """T, where the caller gave it."""
    if facts.tokens is None:
        return {}
    return {"tokens": positive_int("tokens", facts.tokens)}


def is_penalty(group: State) -> bool:
    """Whether an optimizer's weight decay is an L2 penalty of the loss: not AdamW's, and not where
    a saved state does not say which of the two it is."""
    if "algorithm" in group:
        return group["algorithm"] != "AdamW"
    return not group.get("decoupled_weight_decay", "betas" in group)


def _by_name(facts: Facts, names: Mapping[str, Any]) -> dict[str, float]:
    return Prior.read(facts.prior_precision, dict.fromkeys(names, ())).numbers(names)


def write_captured(path: str | os.PathLike[str], captured: Captured, **record: Any) -> None:
    """:func:`write_precision` for what an optimizer or a training checkpoint gave."""
    assert isinstance(captured.precision, dict)
    if isinstance(captured.prior_precision, FormPrior):
        raise PosteriorError("the prior is an earlier posterior: save Posterior.from_optimizer's")
    record = captured.record | record
    record.pop("path", None)  # a place on this machine; the file is made to be published
    record["n_data"] = captured.n_data
    record["prior_precision"] = captured.prior_precision
    write_precision(path, captured.precision, **record)

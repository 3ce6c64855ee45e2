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
from blr_analysis.posterior.capture.readers import Reader, State, beta2, steps
from blr_analysis.posterior.precision_files import write_precision
from blr_analysis.posterior.prior import Given, Prior, n_data_of
from blr_analysis.posterior.prior_choice import by_evidence
from blr_analysis.posterior.structures import Diagonal, Structure

HALF_REASON = "in half precision a running mean cannot fall, and small squares vanish"


@dataclass(frozen=True)
class Told:
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


@dataclass(frozen=True)
class Slot:
    """One trainable parameter: its name, its value, and what the optimizer holds about it."""

    name: str
    value: Tensor
    state: State
    group: State


def assemble(
    slots: Sequence[Slot], reader: Reader, model: nn.Module, told: Told, record: dict[str, Any]
) -> Captured:
    """From one slot per trainable parameter to the captured posterior, in the model's order.

    Told ``bare``, the prior of an optimizer that does not know its own may be missing and is left
    out of S, which may then be 0 where no gradient ever came; a given one is recorded as
    ``prior_outside``.
    """
    own = dict(model.named_parameters())
    given = {slot.name: slot for slot in slots}
    slots = [given[name] for name in own if name in given]
    learned = {s.name for s in slots if reader.has_learned(s.state, s.group)}
    if not learned:
        said = f"the optimizer holds no {reader.key!r} of a parameter"
        raise OptimizerError(f"{said}: it has not stepped, or trained another model")
    if half := [n for n in given if n in learned and given[n].state[reader.key].dtype in HALF]:
        said = f"the optimizer's second moment of {half[0]!r}: {HALF_REASON}"
        if record["source"] != "optimizer":
            raise OptimizerError(f"{said}; use fit_laplace")
        warnings.warn(f"{said}; train with parameters in float32 (autocast)", stacklevel=6)
    groups = {s.name: s.group for s in slots}
    scale = (own_scale if reader.scaled else given_scale)(groups, told)
    mean = {slot.name: _mean(slot) for slot in slots}
    data = {
        slot.name: scale.data_part(_estimate(slot, reader), slot.group)
        if slot.name in learned
        else torch.zeros_like(slot.value, dtype=working(slot.value.dtype))
        for slot in slots
    }
    taken_steps = max(steps(s.state, s.group) for s in slots if s.name in learned)
    counted = not math.isnan(taken_steps)  # a state that ivon-opt saved does not say
    more: dict[str, Any] = {}
    if reader.scaled:
        more["initial_share"] = initial_share(slots, data) if counted else None
    if told.bare and not reader.scaled:  # H alone; δ stands beside
        prior = dict.fromkeys(data, 0.0)
        more["definition"] = scale.definition.replace("S = ", "H = ").removesuffix(" + delta")
        if told.prior_precision is not None:
            more["prior_outside"] = Prior.of_any(told.prior_precision).given
    else:
        prior, choice = _prior(scale, data, mean, told)
        more |= choice
        data = {n: h + prior[n] for n, h in data.items()}
    about = {
        "kind": reader.kind,
        "definition": scale.definition,
        "n_data": scale.n_data,
        **scale.record,
        **record,
        **more,
        "step": taken_steps if counted else None,
        "beta2": beta2(slots[0].group),
        "never_updated": [s.name for s in slots if s.name not in learned],
        "not_in_optimizer": [n for n, p in own.items() if p.requires_grad and n not in groups],
        "frozen": [name for name, p in own.items() if not p.requires_grad],
        "tied": tied_names(model),
    }
    return Captured(mean, data, _alike(prior), scale.n_data, about)


def _alike(prior: Mapping[str, float]) -> float | dict[str, float]:
    """One number where they are the same for all."""
    return dict(prior) if len(set(prior.values())) > 1 else next(iter(prior.values()))


def _prior(
    scale: Scale, data: Mapping[str, Tensor], mean: Mapping[str, Tensor], told: Told
) -> tuple[dict[str, float], dict[str, Any]]:
    """δ by name, and how it was chosen where nobody gave it.

    The L2 penalty of the training, where there was one around 0; else by the evidence.
    """
    known = told.prior_precision is not None or "ess" in scale.record
    if scale.prior is None or (told.initial is not None and not known):
        delta, choice = by_evidence(Diagonal(dict(data)), mean, told.initial)
        return dict.fromkeys(data, delta), choice
    choice = {"delta": _alike(scale.prior), "rule": "weight_decay"}
    return scale.prior, {} if known else {"prior_choice": choice}


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
    held, what = slot.state[reader.key], f"the optimizer's {reader.key!r} for {slot.name!r}"
    if held.shape != slot.value.shape:
        sizes = f"{tuple(held.shape)}, the parameter {tuple(slot.value.shape)}"
        raise OptimizerError(f"{what} is {sizes}: it was saved for another model.")
    wide = {**slot.state, reader.key: held.detach().to(slot.value.device, working(held.dtype))}
    estimate = reader.estimate(wide, slot.group)
    bad = int((~(estimate.isfinite() & ((estimate >= 0) | reader.scaled))).sum())
    if bad:
        said = f"{what} is negative or not finite in {bad} of {held.numel()} entries"
        raise PosteriorError(f"{said}: use an earlier checkpoint")
    return estimate


def initial_share(slots: Sequence[Slot], data: Mapping[str, Tensor]) -> float:
    """How much of h is its start, 0 … 1: what is left of it after t steps in what is there,

        Σ β₂ᵗ hess_init / Σ h  over all weights,

    or its weight, the mean of β₂ᵗ, where that is larger: a small start holds h below the data's.
    Without a step, h is all start.

    Args:
        data: ess · h by name.
    """
    kept = left = there = 0.0
    for slot in slots:
        count = steps(slot.state, slot.group) if slot.state else 0.0
        weight = float(slot.group["beta2"]) ** count * slot.value.numel()
        start = weight * float(slot.group["ess"]) * float(slot.group.get("hess_init", 0.0))
        kept, left = kept + weight, left + start
        there += float(data[slot.name].sum()) if count else start
    share = min(left / there, 1.0) if there > 0 else float(left > 0)
    return max(share, kept / sum(slot.value.numel() for slot in slots))


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


def own_scale(groups: Mapping[str, State], told: Told) -> Scale:
    """For optimizers that learn a posterior: ess and weight_decay are in the groups.

    Args:
        groups: the optimizer's group by parameter name.
    """
    one_of("scaling", told.scaling, ("sqrt", "ess"))
    if told.initial is not None:
        raise OptimizerError("this optimizer learned with its prior around 0: leave initial out")
    sizes = sorted({float(group["ess"]) for group in groups.values()})
    if not all(math.isfinite(ess) and ess > 0 for ess in sizes):
        raise OptimizerError(f"the optimizer's ess must be positive and finite, not {sizes}.")
    prior = {name: float(g["ess"]) * float(g["weight_decay"]) for name, g in groups.items()}
    for name, given in ({} if told.prior_precision is None else _by_name(told, groups)).items():
        if not math.isclose(given, prior[name], rel_tol=1e-6):
            said = f"prior_precision={given:g} contradicts the optimizer's {prior[name]:g}"
            raise OptimizerError(f"{said} for {name!r}: leave it out")
    n, counted = max(1, round(sizes[0])), _counted(told)
    n = n if told.n_data is None else n_data_of(told.n_data)
    if told.scaling != "ess":  # set apart from N on purpose
        terms = counted.get("tokens", n)
        if told.n_data is None and (counted or len(sizes) > 1):
            said = f"n_data is missing: the optimizer's ess={sizes} is no number of examples"
            raise OptimizerError(f"{said}; pass it beside tokens=, or with scaling='ess'")
        if not all(math.isclose(ess, terms, rel_tol=1e-6) for ess in sizes):
            said = f"{terms} is inconsistent with the optimizer's ess={sizes}: leave n_data out"
            raise OptimizerError(f"{said}, pass tokens={sizes[0]:.0f}, or scaling='ess' (tempered)")
    return Scale(
        n,
        prior,
        lambda hess, group: hess * float(group["ess"]),
        "S = ess*(h + weight_decay)",
        {"scaling": "ess", "ess": sizes, **counted},
    )


def given_scale(groups: Mapping[str, State], told: Told) -> Scale:
    """For second moments: N and the choice of the formula are the caller's, δ where it is known.

    An L2 penalty ``weight_decay`` on the mean loss is δ = N · weight_decay.
    """
    root = one_of("scaling", told.scaling, ("sqrt", "squared")) == "sqrt"
    if root and told.batch_size is not None:
        raise InputError("batch_size is used with scaling='squared' only: leave it out")
    if told.n_data is None:
        raise OptimizerError("n_data is missing: pass n_data=len(dataset)")
    n, counted = n_data_of(told.n_data), _counted(told)
    terms = float(counted.get("tokens", n))  # of the loss, which is their mean
    factor = terms if root else terms * positive_int("batch_size", told.batch_size)
    penalty = {name: terms * float(g.get("weight_decay", 0.0)) for name, g in groups.items()}
    known = all(penalty.values()) and all(map(is_penalty, groups.values()))
    about = {"scaling": told.scaling, "batch_size": told.batch_size, "bias_corrected": True}
    return Scale(
        n,
        (penalty if known else None) if told.prior_precision is None else _by_name(told, groups),
        lambda v, _: factor * (v.sqrt() if root else v),
        f"S = {'N*sqrt(v_hat)' if root else 'N*B*v_hat'} + delta",
        {**about, **counted},
    )


def _counted(told: Told) -> dict[str, int]:
    return {} if told.tokens is None else {"tokens": positive_int("tokens", told.tokens)}


def is_penalty(group: State) -> bool:
    """Whether an optimizer's weight decay is an L2 penalty of the loss: not AdamW's, and not where
    a saved state does not say which of the two it is."""
    if "algorithm" in group:
        return group["algorithm"] != "AdamW"
    return not group.get("decoupled_weight_decay", "betas" in group)


def _by_name(told: Told, names: Mapping[str, Any]) -> dict[str, float]:
    return Prior.read(told.prior_precision, dict.fromkeys(names, ())).numbers(names)


def write_captured(path: str | os.PathLike[str], captured: Captured, **about: Any) -> None:
    """:func:`write_precision` for what an optimizer or a training checkpoint gave."""
    assert isinstance(captured.precision, dict)
    about = captured.record | about
    about |= {"n_data": captured.n_data, "prior_precision": captured.prior_precision}
    about.pop("path", None)  # a place on this machine; the file is made to be published
    write_precision(path, captured.precision, **about)

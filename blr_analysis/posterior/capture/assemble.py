"""From what an optimizer holds about each parameter to a mean and a diagonal precision: how many
examples, which prior, and how they enter S."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import one_of, positive_int, some
from blr_analysis.errors import InputError, ModelError, OptimizerError, PosteriorError
from blr_analysis.half import working
from blr_analysis.posterior.capture.readers import Reader, State, steps
from blr_analysis.posterior.prior import Given, Prior, n_data_of
from blr_analysis.posterior.prior_choice import chosen_prior
from blr_analysis.posterior.structures import Diagonal, Structure
from blr_analysis.posterior.structures.contract import Spectral

UNSURE = "by the weights and the curvature alone; fit_laplace(task) asks the data's gradient too"
HALF_REASON = (
    "in bfloat16 or float16 a running mean with beta near 1 cannot fall (each decrement is "
    "rounded away) and small squares vanish, so that the second moment is not the gradients'"
)


@dataclass(frozen=True)
class Told:
    """What the caller says of a training: see :func:`.from_optimizer`."""

    n_data: int | None = None
    prior_precision: Given | None = None
    scaling: str = "sqrt"
    batch_size: int | None = None
    tokens: int | None = None
    initial: Mapping[str, Tensor] | None = None
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
    record: dict[str, Any] = field(default_factory=dict)


def assemble(
    slots: Sequence[Slot], reader: Reader, model: nn.Module, told: Told, record: dict[str, Any]
) -> Captured:
    """From one slot per trainable parameter to the captured posterior, in the model's order.

    Told ``bare``, the prior of an optimizer that does not know its own may be missing and is left
    out of S, which may then be 0 where no gradient ever came; a given one is recorded as
    ``prior_outside``.
    """
    by_name = {slot.name: slot for slot in slots}
    slots = [by_name[name] for name, _ in model.named_parameters() if name in by_name]
    learned = {s.name for s in slots if reader.has_learned(s.state, s.group)}
    if not learned:
        raise OptimizerError("the optimizer has not stepped, or its parameters are frozen")
    if reader.scaled and told.initial is not None:
        raise OptimizerError(f"{reader.kind} learned with its prior around 0: leave initial out")
    bare = told.bare and not reader.scaled
    groups = {s.name: s.group for s in slots}
    scale = (own_scale if reader.scaled else given_scale)(groups, told)
    mean = {slot.name: _mean(slot) for slot in slots}
    data = {
        slot.name: scale.data_part(_estimate(slot, reader), slot.group)
        if slot.name in learned
        else torch.zeros_like(slot.value, dtype=working(slot.value.dtype))
        for slot in slots
    }
    known = reader.scaled or told.prior_precision is not None
    definition, more = scale.definition, dict[str, Any]()
    if bare:  # H alone; δ stands beside
        prior: dict[str, float] = dict.fromkeys(data, 0.0)
        definition = definition.replace("S = ", "H = ", 1).removesuffix(" + delta")
        if told.prior_precision is not None:
            more["prior_outside"] = Prior.of_any(told.prior_precision).record
        precision = data
    else:
        prior, more = _prior(scale, data, mean, told.initial, known=known)
        precision = {n: _positive(n, h + prior[n]) for n, h in data.items()}
    if reader.scaled:
        more["initial_share"] = initial_share(slots, data)
    counts = [c for s in slots if (c := steps(s.state, s.group)) is not None]
    dtypes = {str(s.state[reader.key].dtype) for s in slots if s.name in learned}
    return Captured(
        mean,
        precision,
        prior if len(set(prior.values())) > 1 else next(iter(prior.values())),
        scale.n_data,
        {
            "kind": reader.kind,
            "definition": definition,
            "n_data": scale.n_data,
            **scale.record,
            **record,
            **more,
            "step": max(counts) if counts else None,
            "beta2": _beta2(slots),
            "state_dtypes": sorted(dtypes),
            "groups": _settings(slots, reader),
            "never_updated": [s.name for s in slots if s.name not in learned],
            "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
            "tied": tied_names(model),
        },
    )


def _prior(
    scale: Scale,
    data: Mapping[str, Tensor],
    mean: Mapping[str, Tensor],
    initial: Mapping[str, Tensor] | None,
    *,
    known: bool,
) -> tuple[dict[str, float], dict[str, Any]]:
    """δ by name, and how it was chosen where nobody gave it.

    The L2 penalty of the training, where there was one around 0; else by the evidence.
    """
    if scale.prior is None or (initial is not None and not known):
        delta, choice = by_evidence(Diagonal(dict(data)), mean, initial)
        return dict.fromkeys(data, delta), choice
    if known:
        return scale.prior, {}
    several = set(scale.prior.values())
    said = several.pop() if len(several) == 1 else scale.prior
    return scale.prior, {"prior_choice": {"delta": said, "rule": "weight_decay"}}


def by_evidence(
    form: Spectral, mean: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None
) -> tuple[float, dict[str, Any]]:
    """δ by the weights and the curvature, whose state has no gradient of all the data."""
    delta, about = chosen_prior(form, Prior({}).around(initial, mean).gap(mean), None)
    return delta, {"prior_choice": {"delta": delta, **about, "unsure": UNSURE}}


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
    held = slot.state[reader.key]
    if held.shape != slot.value.shape:
        raise OptimizerError(
            f"the optimizer's {reader.key!r} for {slot.name!r} is {tuple(held.shape)}, the "
            f"parameter {tuple(slot.value.shape)}: it was saved for another model."
        )
    wide = {**slot.state, reader.key: held.detach().to(slot.value.device, working(held.dtype))}
    estimate = reader.estimate(wide, slot.group)
    fine = estimate.isfinite() & (reader.scaled | (estimate >= 0))
    if bad := int((~fine).sum()):
        raise PosteriorError(
            f"the optimizer's {reader.key!r} for parameter {slot.name!r} is negative or not finite "
            f"in {bad} of {fine.numel()} entries: use an earlier checkpoint."
        )
    return estimate


def _positive(name: str, precision: Tensor) -> Tensor:
    if bad := int((~(precision.isfinite() & (precision > 0))).sum()):
        raise PosteriorError(
            f"the precision of parameter {name!r} is not positive and finite in {bad} "
            f"of {precision.numel()} entries: pass a positive prior_precision, or freeze it"
        )
    return precision


def _settings(slots: Sequence[Slot], reader: Reader) -> list[dict[str, Any]]:
    groups = {id(slot.group): slot.group for slot in slots}
    return [
        {key: _plain(group[key]) for key in reader.settings if key in group}
        for group in groups.values()
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _beta2(slots: Sequence[Slot]) -> float | list[float] | None:
    """How slowly the second moment forgets: one number, or one per distinct setting."""
    betas = set()
    for group in (slot.group for slot in slots):
        held = group["betas"][1] if "betas" in group else group.get("beta2", group.get("alpha"))
        betas |= set() if held is None else {float(held)}
    return min(betas) if len(betas) == 1 else sorted(betas) or None


def initial_share(slots: Sequence[Slot], data: Mapping[str, Tensor]) -> float | None:
    """How much of h is its start, 0 … 1: what is left of it after t steps in what is there,

        Σ β₂ᵗ hess_init / Σ h  over all weights,

    or its weight, the mean of β₂ᵗ, where that is larger: a small start holds h below the data's.
    None where the optimizer counts no steps. Without a step, h is all start.

    Args:
        data: ess · h by name.
    """
    weight = left = there = 0.0
    for slot in slots:
        count = steps(slot.state, slot.group) if slot.state else 0.0
        if count is None:
            return None
        kept = float(slot.group["beta2"]) ** count * slot.value.numel()
        start = kept * float(slot.group["ess"]) * float(slot.group.get("hess_init", 0.0))
        weight, left = weight + kept, left + start
        there += float(data[slot.name].sum()) if slot.state and count else start
    share = min(left / there, 1.0) if there > 0 else float(left > 0)
    return max(share, weight / sum(slot.value.numel() for slot in slots))


def own_scale(groups: Mapping[str, State], told: Told) -> Scale:
    """For optimizers that learn a posterior: ess and weight_decay are in the groups.

    Args:
        groups: the optimizer's group by parameter name.
    """
    one_of("scaling", told.scaling, ("sqrt", "ess"))
    sizes = sorted({float(group["ess"]) for group in groups.values()})
    prior = {name: float(g["ess"]) * float(g["weight_decay"]) for name, g in groups.items()}
    given = prior if told.prior_precision is None else _by_name(told.prior_precision, groups)
    for name, own in prior.items():
        if not math.isclose(given[name], own, rel_tol=1e-6):
            said = f"prior_precision={given[name]:g} contradicts the optimizer's {own:g}"
            raise OptimizerError(f"{said} for {some([name])}: leave it out")
    return Scale(
        n_data=_examples(sizes, told),
        prior=prior,
        data_part=lambda hess, group: hess * float(group["ess"]),
        definition="S = ess*(h + weight_decay)",
        record={"scaling": "ess", "ess": sizes, **_counted(told)},
    )


def _examples(sizes: Sequence[float], told: Told) -> int:
    """N, which the optimizer's ess is, unless tokens were counted or it was set apart."""
    n = None if told.n_data is None else n_data_of(told.n_data)
    if not all(math.isfinite(ess) and ess > 0 for ess in sizes):
        raise OptimizerError(f"the optimizer's ess must be positive and finite, not {sizes}.")
    if told.scaling == "ess":
        return n or max(1, round(sizes[0]))
    if n is None and (told.tokens is not None or len(sizes) > 1):
        said = f"n_data is missing: the optimizer's ess ({sizes}) is no number of examples"
        raise OptimizerError(f"{said}. Pass n_data=len(dataset) beside tokens= or scaling='ess'.")
    n = n or max(1, round(sizes[0]))
    terms = n if told.tokens is None else told.tokens
    if not all(math.isclose(ess, terms, rel_tol=1e-6) for ess in sizes):
        name = "n_data" if told.tokens is None else "tokens"
        said = f"{name}={terms} is inconsistent with the optimizer's ess={sizes}: leave it out"
        raise OptimizerError(
            f"{said}, or pass tokens={round(sizes[0])}, or scaling='ess' if tempered"
        )
    return n


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
    given = told.prior_precision
    return Scale(
        n_data=n,
        prior=_trained_with(groups, terms) if given is None else _by_name(given, groups),
        data_part=lambda v, _: factor * (v.sqrt() if root else v),
        definition=f"S = {'N*sqrt(v_hat)' if root else 'N*B*v_hat'} + delta",
        record={
            "scaling": told.scaling,
            "batch_size": told.batch_size,
            "bias_corrected": True,
            **counted,
        },
    )


def _counted(told: Told) -> dict[str, int]:
    return {} if told.tokens is None else {"tokens": positive_int("tokens", told.tokens)}


def _trained_with(groups: Mapping[str, State], terms: float) -> dict[str, float] | None:
    """δ of the L2 penalty that all parameters were trained with; None where they were not."""
    prior = {name: terms * float(g.get("weight_decay", 0.0)) for name, g in groups.items()}
    return prior if all(map(is_penalty, groups.values())) and all(prior.values()) else None


def is_penalty(group: State) -> bool:
    """Whether an optimizer's weight decay is an L2 penalty of the loss: not AdamW's, and not where
    a saved state does not say which of the two it is."""
    if "algorithm" in group:
        return group["algorithm"] != "AdamW"
    return not group.get("decoupled_weight_decay", "betas" in group)


def _by_name(given: Given, names: Mapping[str, Any]) -> dict[str, float]:
    return Prior.read(given, dict.fromkeys(names, ())).numbers(names)

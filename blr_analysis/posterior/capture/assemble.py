"""From what an optimizer holds about each parameter to a mean and a diagonal precision: how many
examples, which prior, and how they enter S."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import positive_int, some, whole
from blr_analysis.errors import InputError, ModelError, OptimizerError, PosteriorError
from blr_analysis.half import working
from blr_analysis.posterior.capture.readers import Reader, State, steps
from blr_analysis.posterior.prior import Given, Prior, n_data_of
from blr_analysis.posterior.prior_choice import chosen_prior
from blr_analysis.posterior.structures import Diagonal

UNSURE = "by the weights and the curvature alone; fit_laplace(task) asks the data's gradient too"
HALF_REASON = (
    "in bfloat16 or float16 a running mean with beta near 1 cannot fall (each decrement is "
    "rounded away) and small squares vanish, so that the second moment is not the gradients'"
)
SCALINGS = ("sqrt", "squared", "ess")


@dataclass(frozen=True)
class Captured:
    """What was read: plain tensors by parameter name.

    Attributes:
        mean: the trainable parameters (detached clones; a tied tensor once, by its first name).
        precision: the diagonal of S, same names and shapes, prior precision included; float32
            where the parameter is float16 or bfloat16.
        prior_precision: δ, one number, or one per name where the optimizer's groups differ.
        n_data: N, the number of training examples.
        record: where it came from, JSON-able.
    """

    mean: dict[str, Tensor]
    precision: dict[str, Tensor]
    prior_precision: float | dict[str, float]
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
    by_name = {slot.name: slot for slot in slots}
    slots = [by_name[name] for name, _ in model.named_parameters() if name in by_name]
    learned = {s.name for s in slots if reader.has_learned(s.state, s.group)}
    if not learned:
        raise OptimizerError("the optimizer has not stepped, or its parameters are frozen")
    bare = told.bare and not reader.scaled
    outside = told.prior_precision if bare else None
    groups = {s.name: s.group for s in slots}
    tokens = None if told.tokens is None else positive_int("tokens", told.tokens)
    told = replace(told, bare=bare, tokens=tokens)
    scale = (own_scale if reader.scaled else given_scale)(groups, told)
    if reader.scaled and told.initial is not None:
        raise OptimizerError(f"{reader.kind} learned with its prior around 0: leave initial out")
    mean = {slot.name: _mean(slot) for slot in slots}
    data = {
        slot.name: scale.data_part(_estimate(slot, reader), slot.group)
        if slot.name in learned
        else torch.zeros_like(slot.value, dtype=working(slot.value.dtype))
        for slot in slots
    }
    given = bare or reader.scaled or told.prior_precision is not None
    prior, choice = _prior(scale, data, mean, told.initial, given=given)
    precision = data if bare else {n: _positive(n, h + prior[n], prior[n]) for n, h in data.items()}
    deltas = {0.0} if bare else set(prior.values())
    definition = scale.definition
    if bare:  # from "S = … + delta" to "H = …"
        definition = definition.replace("S = ", "H = ", 1).removesuffix(" + delta")
    counts = [c for s in slots if (c := steps(s.state, s.group)) is not None]
    return Captured(
        mean=mean,
        precision=precision,
        prior_precision=deltas.pop() if len(deltas) == 1 else prior,
        n_data=scale.n_data,
        record={
            "kind": reader.kind,
            "definition": definition,
            "n_data": scale.n_data,
            **scale.record,
            **({} if choice is None else {"prior_choice": choice}),
            **record,
            **({} if outside is None else {"prior_outside": Prior.of_any(outside).record}),
            "step": max(counts) if counts else None,
            "beta2": _beta2(slots),
            **({"initial_share": initial_share(slots, data)} if reader.scaled else {}),
            "state_dtypes": sorted(
                {str(s.state[reader.key].dtype) for s in slots if s.name in learned}
            ),
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
    given: bool,
) -> tuple[dict[str, float], dict[str, Any] | None]:
    """δ by name, and how it was chosen where nobody gave it.

    The L2 penalty of the training, where there was one around 0. Else the evidence decides, from
    the weights and the diagonal: the state of an optimizer has no gradient of all the data.
    """
    if scale.prior is not None and (given or initial is None):
        known = set(scale.prior.values())
        choice = {"delta": known.pop() if len(known) == 1 else scale.prior, "rule": "weight_decay"}
        return scale.prior, None if given else choice
    gap = Prior({}).around(initial, mean).gap(mean)
    delta, about = chosen_prior(Diagonal(dict(data)), gap, None)
    return dict.fromkeys(data, delta), {"delta": delta, **about, "unsure": UNSURE}


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The further names of parameters that have several, by their first one."""
    first: dict[int, str] = {}
    tied: dict[str, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in first:
            tied.setdefault(first[id(p)], []).append(name)
        else:
            first[id(p)] = name
    return tied


def _mean(slot: Slot) -> Tensor:
    if slot.value.is_meta:
        raise ModelError(f"parameter {slot.name!r} is on the meta device: it has no values.")
    if not bool(slot.value.isfinite().all()):
        bad = int((~slot.value.isfinite()).sum())
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
    bad = ~estimate.isfinite() if reader.scaled else ~(estimate.isfinite() & (estimate >= 0))
    if bool(bad.any()):
        what = "not finite" if reader.scaled else "negative or not finite"
        raise PosteriorError(
            f"the optimizer's {reader.key!r} for parameter {slot.name!r} is {what} in "
            f"{int(bad.sum())} of {bad.numel()} entries: use an earlier checkpoint."
        )
    return estimate


def _positive(name: str, precision: Tensor, delta: float) -> Tensor:
    bad = ~(precision.isfinite() & (precision > 0))
    if bool(bad.any()):
        raise PosteriorError(
            f"the precision of parameter {name!r} is not positive and finite in {int(bad.sum())} "
            f"of {bad.numel()} entries: pass a positive prior_precision, or freeze it"
        )
    return precision


def _settings(slots: Sequence[Slot], reader: Reader) -> list[dict[str, Any]]:
    groups = {id(slot.group): slot.group for slot in slots}
    return [
        {key: _plain(group[key]) for key in reader.settings if key in group}
        for group in groups.values()
    ]


def _beta2(slots: Sequence[Slot]) -> float | list[float] | None:
    """How slowly the second moment forgets: one number, or one per distinct setting."""
    betas = set()
    for group in (slot.group for slot in slots):
        if "betas" in group:
            betas.add(float(group["betas"][1]))
        elif "beta2" in group or "alpha" in group:
            betas.add(float(group.get("beta2", group.get("alpha"))))
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


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Told:
    """What the caller says of a training: see :func:`.from_optimizer`."""

    n_data: int | None
    prior_precision: Given | None
    scaling: str
    batch_size: int | None
    tokens: int | None
    bare: bool = False
    initial: Mapping[str, Tensor] | None = None

    @property
    def delta(self) -> Given | None:
        """δ of the files to merge may be left out."""
        return 0.0 if self.bare and self.prior_precision is None else self.prior_precision

    @property
    def counted(self) -> dict[str, int]:
        return {} if self.tokens is None else {"tokens": self.tokens}


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


def own_scale(groups: Mapping[str, State], told: Told) -> Scale:
    """For optimizers that learn a posterior: ess and weight_decay are in the groups.

    Args:
        groups: the optimizer's group by parameter name.
    """
    _check_scaling(told.scaling, told.batch_size)
    if told.scaling == "squared":
        raise InputError("scaling='squared' is for second moments: leave it out")
    sizes = sorted({float(group["ess"]) for group in groups.values()})
    n = _check_ess(sizes, told)
    prior = {name: float(g["ess"]) * float(g["weight_decay"]) for name, g in groups.items()}
    if told.delta is not None:
        given = _by_name(told.delta, groups)
        wrong = [
            name for name in groups if not math.isclose(given[name], prior[name], rel_tol=1e-6)
        ]
        if wrong:
            own, said = prior[wrong[0]], f"prior_precision={given[wrong[0]]:g} contradicts"
            raise OptimizerError(f"{said} the optimizer's {own:g} for {some(wrong)}: leave it out")
    return Scale(
        n_data=n,
        prior=prior,
        data_part=lambda hess, group: hess * float(group["ess"]),
        definition="S = ess*(h + weight_decay)",
        record={"scaling": "ess", "ess": sizes, **told.counted},
    )


def given_scale(groups: Mapping[str, State], told: Told) -> Scale:
    """For second moments: N and the choice of the formula are the caller's, δ where it is known.

    An L2 penalty ``weight_decay`` on the mean loss is δ = N · weight_decay.
    """
    _check_scaling(told.scaling, told.batch_size)
    if told.scaling == "ess":
        raise InputError("scaling='ess' is for IVON, VOGN and their like: pass 'sqrt' or 'squared'")
    if told.n_data is None:
        raise OptimizerError("n_data is missing: pass n_data=len(dataset)")
    n = n_data_of(told.n_data)
    terms = float(n if told.tokens is None else told.tokens)  # of the loss, which is their mean
    root = told.scaling == "sqrt"
    factor = terms if root else terms * float(told.batch_size or 1)
    return Scale(
        n_data=n,
        prior=_trained_with(groups, terms) if told.delta is None else _by_name(told.delta, groups),
        data_part=lambda v, _: factor * (v.sqrt() if root else v),
        definition=f"S = {'N*sqrt(v_hat)' if root else 'N*B*v_hat'} + delta",
        record={
            "scaling": told.scaling,
            "batch_size": told.batch_size,
            "bias_corrected": True,
            **told.counted,
        },
    )


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


def _check_scaling(scaling: str, batch_size: object) -> None:
    if scaling not in SCALINGS:
        raise InputError(f"scaling must be one of {SCALINGS}, not {scaling!r}.")
    if scaling == "squared":
        size = whole(batch_size)
        if size is None or size < 1:
            raise InputError(f"scaling='squared' needs batch_size, not {batch_size!r}")
    elif batch_size is not None:
        raise InputError(f"batch_size is used with scaling='squared' only, not {scaling!r}.")


def _check_ess(sizes: Sequence[float], told: Told) -> int:
    n_data = None if told.n_data is None else n_data_of(told.n_data)
    scaling, tokens = told.scaling, told.tokens
    if not all(math.isfinite(ess) and ess > 0 for ess in sizes):
        raise OptimizerError(f"the optimizer's ess must be positive and finite, not {sizes}.")
    if tokens is not None and scaling != "ess":
        if n_data is None:
            raise OptimizerError("n_data, the number of sequences, is missing beside tokens=")
        if not all(math.isclose(ess, tokens, rel_tol=1e-6) for ess in sizes):
            raise OptimizerError(f"tokens={tokens} is inconsistent with ess={sizes}")
        return n_data
    n = n_data or max(1, round(sizes[0]))
    if scaling == "ess" or all(math.isclose(ess, n, rel_tol=1e-6) for ess in sizes):
        return n
    if n_data is None:
        said = f"n_data is missing: the optimizer's ess ({sizes}) is no number of examples"
        raise OptimizerError(f"{said}. Pass n_data=len(dataset) and scaling='ess'.")
    said = f"n_data={n_data} is inconsistent with the optimizer's ess={sizes}: leave n_data out"
    raise OptimizerError(f"{said}, or pass tokens={round(sizes[0])}, or scaling='ess' if tempered")


def _by_name(given: Given, names: Iterable[str]) -> dict[str, float]:
    return Prior.read(given, dict.fromkeys(names, ())).numbers(names)

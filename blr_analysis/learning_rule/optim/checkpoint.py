"""The state out and in, draws gathered for the next step included, without losing a bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim.draws import state_dtype
from blr_analysis.learning_rule.optim.gathered import Gathered

STEADY = ("step", "hess", "momentum")
REQUIRED = ("lr", "ess", "weight_decay", "hess_init", "hess_approx")


def add_gathered(
    state_dict: dict[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    gathered: Gathered,
    generator: torch.Generator | None,
) -> dict[str, Any]:
    """``state_dict`` of torch plus the gathered draws and the generator's state.

    The draws stand beside ``hess`` as ``sample_grad`` and ``sample_noise`` or
    ``sample_curvature``; ``state_dict["sampling"]`` holds their number and the generator's state.
    """
    state = dict(state_dict["state"])
    for key, param in _pairs(state_dict, param_groups):
        if packed := gathered.pack(param):
            state[key] = {**state.get(key, {}), **packed}
    sampling: dict[str, Any] = {"count": gathered.count}
    if generator is not None:
        sampling["generator"] = generator.get_state()
    return {**state_dict, "state": state, "sampling": sampling}


def without_gathered(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``state_dict`` that torch knows how to load."""
    state = {
        key: {name: value for name, value in entry.items() if name in STEADY}
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": {key: entry for key, entry in state.items() if entry}}


def restore(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    gathered: Gathered,
    generator: torch.Generator | None,
) -> None:
    """Copy what torch would alias or round to the parameter's dtype, and the gathered draws."""
    methods = {p: group["hess_approx"] for group in param_groups for p in group["params"]}
    for key, param in _pairs(state_dict, param_groups):
        saved = state_dict["state"].get(key, {})
        for name in ("hess", "momentum"):
            if name in saved:
                state[param][name] = saved[name].to(
                    device=param.device, dtype=state_dtype(param), copy=True
                )
        gathered.unpack(param, methods[param], saved)
    sampling = state_dict.get("sampling", {})
    gathered.count = sampling.get("count", 0) if gathered.estimates else 0
    if generator is not None and "generator" in sampling:
        generator.set_state(sampling["generator"].cpu())


def check_loadable(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    steady: Sequence[str] = STEADY,
    *,
    positive: bool = True,
) -> None:
    """Raise :class:`OptimizerError` unless ``state_dict`` fits parameters of the same shapes.

    ``steady`` are the entries of every parameter's state; with ``positive``, hess + weight_decay
    has to be.
    """
    hint = "load a state_dict() of this class, made with the same parameters in the same order"
    try:
        saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
        saved = [list(group["params"]) for group in saved_groups]
    except (KeyError, TypeError) as error:
        raise OptimizerError(f"this is no optimizer state ({error!r} is missing); {hint}") from None
    found, own_row = (
        {str(group.get("algorithm", "IVON")) for group in groups}  # IVON's once had no name
        for groups in (saved_groups, param_groups)
    )
    if found - own_row:
        raise OptimizerError(
            f"this is the state of {', '.join(sorted(found))}, not of "
            f"{', '.join(sorted(own_row))}; {hint}"
        )
    sizes, own = [len(ids) for ids in saved], [len(group["params"]) for group in param_groups]
    if sizes != own:
        raise OptimizerError(
            f"the state has groups of {sizes} parameters, this optimizer of {own}; {hint}"
        )
    missing = [key for key in REQUIRED if any(key not in group for group in saved_groups)]
    if missing:
        raise OptimizerError(f"the state's groups have no {', '.join(missing)}; {hint}")
    known = set(chain.from_iterable(saved))
    if foreign := [key for key in saved_state if key not in known]:
        raise OptimizerError(f"the state has entries of no parameter: {foreign}; {hint}")
    decays = {key: group["weight_decay"] for group in saved_groups for key in group["params"]}
    for key, param in _pairs(state_dict, param_groups):
        entry = saved_state.get(key, {})
        if entry and not {*steady} <= {*entry} and "sample_grad" not in entry:
            raise OptimizerError(f"the state of parameter {key} holds {sorted(entry)}; {hint}")
        _check_entry(key, entry, param, decays[key] if positive else None, hint)


def _check_entry(
    key: Any, entry: Mapping[str, Any], param: Tensor, decay: float | None, hint: str
) -> None:
    for name, value in entry.items():
        if name != "step" and (not isinstance(value, Tensor) or value.shape != param.shape):
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
            raise OptimizerError(
                f"{name} of parameter {key} has {found}, the parameter has shape "
                f"{tuple(param.shape)}; {hint}"
            )
    if "hess" in entry and decay is not None:
        precision = entry["hess"] + decay
        if not ((precision > 0) & precision.isfinite()).all():
            raise OptimizerError(
                f"hess + weight_decay of parameter {key} is not positive and finite everywhere: "
                f"the state is damaged; {hint}"
            )


def _pairs(state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> Any:
    """(key in the state dict, parameter), in order."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return zip(keys, chain.from_iterable(g["params"] for g in param_groups), strict=True)

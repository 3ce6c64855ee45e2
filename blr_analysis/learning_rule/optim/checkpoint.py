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

KEPT = ("hess", "momentum", "moved")
"""Tensors that the state of a parameter may hold."""

REQUIRED = ("lr", "ess", "weight_decay", "hess_init", "hess_approx")
HINT = "load a state_dict() of this class, made with the same parameters in the same order"


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


def steady(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``state_dict`` that torch knows how to load: the gathered draws left out."""
    state = {
        key: {name: entry[name] for name in ("step", *KEPT) if name in entry}
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
        for name in KEPT:
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
    kept: Sequence[str],
    *,
    positive: bool,
) -> None:
    """Raise :class:`OptimizerError` unless ``state_dict`` fits parameters of the same shapes.

    ``kept`` are the tensors of every parameter's state; with ``positive``, hess + weight_decay
    has to be.
    """
    if wrong := _what_differs(state_dict, param_groups, {"step", *kept}, positive):
        raise OptimizerError(f"{wrong}; {HINT}")


def _what_differs(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    kept: set[str],
    positive: bool,
) -> str | None:
    try:
        groups, state = state_dict["param_groups"], state_dict["state"]
        ids = [list(group["params"]) for group in groups]
    except (KeyError, TypeError) as error:
        return f"this is no optimizer state ({error!r} is missing)"
    rows = {str(group.get("algorithm", "IVON")) for group in groups}  # IVON's once had no name
    own_rows = {str(group["algorithm"]) for group in param_groups}
    if rows - own_rows:
        return f"this is the state of {', '.join(rows)}, not of {', '.join(own_rows)}"
    sizes, own_sizes = map(len, ids), [len(group["params"]) for group in param_groups]
    if (sizes := [*sizes]) != own_sizes:
        return f"the state has groups of {sizes} parameters, this optimizer of {own_sizes}"
    if missing := [name for name in REQUIRED if any(name not in group for group in groups)]:
        return f"the state's groups have no {', '.join(missing)}"
    if foreign := [key for key in state if key not in {*chain.from_iterable(ids)}]:
        return f"the state has entries of no parameter: {foreign}"
    decays = {key: group["weight_decay"] for group in groups for key in group["params"]}
    for key, param in _pairs(state_dict, param_groups):
        entry = state.get(key, {})
        if entry and not kept <= {*entry} and "sample_grad" not in entry:
            return f"the state of parameter {key} holds {sorted(entry)}"
        for name, value in entry.items():
            shape = tuple(value.shape) if isinstance(value, Tensor) else value
            if name != "step" and shape != (own := tuple(param.shape)):
                return f"{name} of parameter {key} has shape {shape}, the parameter {own}"
        if positive and "hess" in entry:
            precision = entry["hess"] + decays[key]
            if not ((precision > 0) & precision.isfinite()).all():
                return f"hess + weight_decay of parameter {key} is not positive and finite"
    return None


def _pairs(state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> Any:
    """(key in the state dict, parameter), in order."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return zip(keys, chain.from_iterable(g["params"] for g in param_groups), strict=True)

"""The state out and in, draws gathered for the next step included, without losing a bit.

States of the package ``ivon-opt`` have one flat ``hess`` and ``momentum`` in each group.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim.draws import Gathered, state_dtype

KEPT = ("hess", "momentum", "moved")
"""Tensors that the state of a parameter may hold."""

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
    methods: Mapping[Tensor, str],
    generator: torch.Generator | None,
) -> None:
    """Copy what torch would alias or round to the parameter's dtype, and the gathered draws."""
    sampling = state_dict.get("sampling", {})
    gathered.count = sampling.get("count", 0)
    for key, param in _pairs(state_dict, param_groups):
        saved = state_dict["state"].get(key, {})
        for name in KEPT:
            if name in saved:
                state[param][name] = saved[name].to(
                    device=param.device, dtype=state_dtype(param), copy=True
                )
        gathered.unpack(param, methods[param], saved)
    if not gathered.estimates:
        gathered.count = 0
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
        sizes = [len(group["params"]) for group in groups]
    except (KeyError, TypeError) as error:
        return f"this is no optimizer state ({error!r} is missing)"
    own, own_sizes = param_groups[0]["algorithm"], [len(group["params"]) for group in param_groups]
    if others := {group.get("algorithm", "another optimizer") for group in groups} - {own}:
        return f"this is the state of {', '.join(others)}, not of {own}"
    if sizes != own_sizes:
        return f"the state has groups of {sizes} parameters, this optimizer of {own_sizes}"
    decays = [group["weight_decay"] for group in groups for _ in group["params"]]
    for (key, param), decay in zip(_pairs(state_dict, param_groups), decays, strict=True):
        entry = state.get(key, {})
        if entry and not kept <= {*entry} and "sample_grad" not in entry:
            return f"the state of parameter {key} holds {sorted(entry)}"
        for name, value in entry.items():
            shape = tuple(value.shape) if isinstance(value, Tensor) else value
            if name != "step" and shape != (own_shape := tuple(param.shape)):
                return f"{name} of parameter {key} has shape {shape}, the parameter {own_shape}"
        if positive and "hess" in entry:
            precision = entry["hess"] + decay
            if not ((precision > 0) & precision.isfinite()).all():
                return f"hess + weight_decay of parameter {key} is not positive and finite"
    return None


def _pairs(state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> Any:
    """(key in the state dict, parameter), in order."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return zip(keys, chain.from_iterable(g["params"] for g in param_groups), strict=True)


THEIRS = ("lr", "mc_samples", "beta1", "beta2", "weight_decay", "hess_init", "ess", "clip_radius")
FLAT = ("hess", "momentum")


def is_ivon_opt(state_dict: Any) -> bool:
    """Whether a state is that package's."""
    groups = state_dict.get("param_groups", ()) if isinstance(state_dict, Mapping) else ()
    return any(isinstance(group.get("hess"), Tensor) for group in groups)


def from_ivon_opt(
    state_dict: Mapping[str, Any], own_groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The same state as ours is saved, for parameters of the shapes in ``own_groups``.

    Raises:
        OptimizerError: parameters of other sizes; draws that no step has used.
    """
    groups = state_dict["param_groups"]
    if state_dict["state"].get("count"):
        raise OptimizerError("this ivon-opt state has draws without a step: save it after step()")
    ours = [sum(p.numel() for p in group["params"]) for group in own_groups]
    theirs = [group["hess"].numel() for group in groups]
    if ours != theirs:
        raise OptimizerError(f"the ivon-opt state has groups of {theirs} weights, this of {ours}")
    state: dict[int, dict[str, Any]] = {}
    loaded = []
    for group, own in zip(groups, own_groups, strict=True):
        count = _steps(state_dict, group)
        sizes = [p.numel() for p in own["params"]]
        pieces = [group[name].split(sizes) for name in FLAT]
        for key, param, *parts in zip(group["params"], own["params"], *pieces, strict=True):
            if count and param.requires_grad:
                values = {n: x.view_as(param) for n, x in zip(FLAT, parts, strict=True)}
                state[key] = {"step": count, **values}
        settings = {name: group[name] for name in THEIRS if name in group and name in own}
        kept = {name: value for name, value in own.items() if name != "params"}
        loaded.append({**kept, **settings, "params": list(group["params"])})
    return {"state": state, "param_groups": loaded}


def _steps(state_dict: Mapping[str, Any], group: Mapping[str, Any]) -> int:
    if "current_step" in state_dict:
        return int(state_dict["current_step"])
    if not bool((group["momentum"] != 0).any() | (group["hess"] != group["hess_init"]).any()):
        return 0
    warnings.warn(
        "ivon-opt saves no count of its steps: the momentum is taken as debiased; add "
        '"current_step" to the state',
        stacklevel=4,
    )
    beta1 = float(group["beta1"])
    return math.ceil(math.log(1e-17) / math.log(beta1)) if beta1 > 0 else 1


def to_ivon_opt(
    state_dict: Mapping[str, Any], own_groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Our state as that package's ``load_state_dict`` takes it.

    Raises:
        OptimizerError: parameters that have taken different numbers of steps, or none.
    """
    groups, counts = [], set()
    for group, own in zip(state_dict["param_groups"], own_groups, strict=True):
        entries = [state_dict["state"].get(key, {}) for key in group["params"]]
        pairs = list(zip(entries, own["params"], strict=True))
        counts |= {entry.get("step") for entry, p in pairs if p.requires_grad}
        start = {"hess": float(own["hess_init"]), "momentum": 0.0}
        flat = {
            name: torch.cat(
                [entry.get(name, torch.full_like(p, start[name])).flatten() for entry, p in pairs]
            )
            for name in FLAT
        }
        settings = {name: group[name] for name in THEIRS if name in group}
        numel = sum(p.numel() for p in own["params"])
        groups.append({**settings, "params": group["params"], "numel": numel, **flat})
    if len(counts) != 1 or None in counts or state_dict.get("sampling", {}).get("count"):
        raise OptimizerError("ivon-opt has one count of steps for all parameters: step() first")
    empty = {"count": 0, "avg_grad": None, "avg_nxg": None, "avg_gsq": None}
    return {"state": empty, "param_groups": groups, "current_step": counts.pop()}

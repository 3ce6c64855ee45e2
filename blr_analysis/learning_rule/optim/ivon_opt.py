"""States of the package ``ivon-opt``: one flat ``hess`` and ``momentum`` in each group."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError

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

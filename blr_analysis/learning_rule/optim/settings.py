"""Is what an optimizer was given usable? Settings and parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError, OptimizerError

HESS_APPROX = ("price", "gradsq")
ROUNDING = 1e-12
"""A schedule that ends at 0 may miss it by so much."""

POSITIVE = "a finite number above 0", lambda x: 0 < x < math.inf
FINITE = "a finite number of 0 or more", lambda x: 0 <= x < math.inf
RANGES: dict[str, tuple[str, Any]] = {
    "lr": (FINITE[0], lambda x: -ROUNDING <= x < math.inf),
    "ess": (f"{POSITIVE[0]} (the number of training examples)", POSITIVE[1]),
    "hess_init": FINITE,
    "beta1": ("0 or more and below 1", lambda x: 0 <= x < 1),
    "beta2": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "weight_decay": FINITE,
    "eps": FINITE,
    "radius": FINITE,
    "damping": FINITE,
    "clip_radius": ("above 0 (inf for no clipping)", lambda x: x > 0),
}


def check_settings(group: Mapping[str, Any], algorithm: str, *, samples: bool) -> None:
    """Raise :class:`InputError` for the first setting of ``group`` out of its range."""
    for name, (expected, is_valid) in RANGES.items():
        if name in group:
            check_range(group, name, expected, is_valid)
    if samples and group["hess_init"] + group["weight_decay"] <= 0:
        raise InputError(
            f"{algorithm} draws weights with the precision ess·(hess + weight_decay), which starts "
            "at 0: give weight_decay (the prior precision divided by ess) or hess_init"
        )
    if group.get("algorithm") != algorithm:
        raise InputError(f"algorithm is {algorithm!r} for all groups, not {group['algorithm']!r}")


def check_range(group: Mapping[str, Any], name: str, expected: str, is_valid: Any) -> None:
    """Raise :class:`InputError` unless ``is_valid(float(group[name]))``."""
    value = group[name]
    try:
        valid = bool(is_valid(float(value)))
    except (TypeError, ValueError, RuntimeError):
        valid = False
    if not valid:
        raise InputError(f"{name} must be {expected}, not {value!r}")


def check_mc_samples(mc_samples: Any) -> None:
    """Raise :class:`InputError` unless ``mc_samples`` is an integer of 1 or more."""
    if isinstance(mc_samples, bool) or not isinstance(mc_samples, int) or mc_samples < 1:
        raise InputError(f"mc_samples must be an integer of 1 or more, not {mc_samples!r}")


def check_generator(generator: Any) -> None:
    """Raise :class:`InputError` unless ``generator`` is one, or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(f"generator must be a torch.Generator or None, not {generator!r}")


def check_closure(closure: Any) -> None:
    """Raise :class:`OptimizerError` unless ``closure`` can be called, or is None."""
    if closure is not None and not callable(closure):
        raise OptimizerError(
            f"step() takes a function that computes the loss, not {closure!r}: step(closure)"
        )


def listed(params: Any) -> list[Any] | Tensor:
    """``params`` as torch's optimizers take them, a generator of parameters read once.

    Raises:
        InputError: it is empty, or nothing that holds parameters.
    """
    if isinstance(params, Tensor):
        return params
    if isinstance(params, set):
        raise InputError("params is a set, which has no order to save a state by; pass a list")
    try:
        found = list(params)
    except TypeError:
        kind = type(params).__name__
        raise InputError(f"params must be model.parameters() or groups, not a {kind}") from None
    if not found:
        raise InputError("params is empty; pass model.parameters()")
    return found


def read_group(group: Any) -> dict[str, Any]:
    """A group of parameters with its ``params`` as a list.

    Raises:
        InputError: it is no dictionary with parameters.
    """
    if not isinstance(group, Mapping) or "params" not in group:
        raise InputError(f"a group of parameters is a dictionary with 'params', not {group!r}")
    params = listed(group["params"])
    return {**group, "params": [params] if isinstance(params, Tensor) else params}


def check_parameters(params: Sequence[Any], learner: str) -> None:
    """Raise :class:`InputError` for a parameter that has no real Gaussian."""
    for index, param in enumerate(params):
        tensor = param[1] if isinstance(param, tuple) else param
        if isinstance(tensor, Tensor) and not tensor.is_floating_point():
            raise InputError(
                f"parameter {index} of shape {tuple(tensor.shape)} is {tensor.dtype}; {learner} "
                "learns a Gaussian over real floating-point parameters: leave it out, or split a "
                "complex one into its real and imaginary parts"
            )

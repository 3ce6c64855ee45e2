"""Settings of the groups of parameters: where each may lie, and how they are checked."""

from __future__ import annotations

import math
from typing import Any

from blr_analysis.errors import InputError, told_as
from blr_analysis.learning_rule.optim.plain import PlainOptimizer

ROUNDING = 1e-12
"""A schedule that ends at 0 may miss it by this much."""

INTERVALS = {
    "beta1": "[0, 1)",
    "beta2": "[0, 1]",
    "keep": "(0, 1]",
    "keep_prior": "(0, 1)",
    "ess": "(0, inf)",
    "temperature": "(0, inf)",
    "clip": "(0, inf]",
    "clip_radius": "(0, inf]",
    "lr": "[0, inf)",
    "weight_decay": "[0, inf)",
    "hess_init": "[0, inf)",
    "eps": "[0, inf)",
    "radius": "[0, inf)",
    "damping": "[0, inf)",
    "floor": "[0, inf)",
    "noise": "[0, inf)",
    "keep_lr": "[0, inf)",
}
"""The interval of each setting that is a number."""
OTHER_SETTINGS = ("hess_approx", "debias", "rescale_lr", "dim", "squares", "batch_size")
NAMES = (*INTERVALS, *OTHER_SETTINGS)
"""The settings that every optimizer takes, for all parameters or by group."""
DEFAULTS = {
    "ess": 1.0,
    "weight_decay": 0.0,
    "hess_init": 0.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
}


def check_setting(name: str, value: Any, interval: str) -> None:
    """Raise :class:`InputError` unless the number lies in the interval.

    A number that misses a closed lower end by rounding passes: schedules do.
    """
    low, high = map(float, interval[1:-1].split(","))
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    is_above = number > low if interval[0] == "(" else number >= low - ROUNDING
    is_below = number < high if interval[-1] == ")" else number <= high
    if not (is_above and is_below):
        raise InputError(f"{name} must be a number in {interval}, not {value!r}")


def groups_of(params: Any) -> list[dict[str, Any]]:
    """The groups of parameters that torch reads in what a user passes."""
    with told_as(InputError, "params cannot be trained", "pass model.parameters() or groups"):
        if isinstance(params, set):
            raise TypeError("a set has no order")
        return PlainOptimizer(params, {}).param_groups

"""Is what IVON was given usable? Hyperparameters and parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from blr_analysis.errors import InputError

HESS_APPROX = ("price", "gradsq")


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` for the first hyperparameter of ``group`` out of its range."""
    check_range(group, "lr", "a finite number of 0 or more", lambda x: 0 <= x < math.inf)
    check_range(
        group,
        "ess",
        "a finite number above 0 (the number of training examples)",
        lambda x: 0 < x < math.inf,
    )
    check_range(group, "hess_init", "a finite number above 0", lambda x: 0 < x < math.inf)
    check_range(group, "beta1", "0 or more and below 1", lambda x: 0 <= x < 1)
    check_range(group, "beta2", "from 0 to 1", lambda x: 0 <= x <= 1)
    check_range(group, "weight_decay", "a finite number of 0 or more", lambda x: 0 <= x < math.inf)
    check_range(group, "clip_radius", "above 0 (inf for no clipping)", lambda x: x > 0)
    if group["hess_approx"] not in HESS_APPROX:
        raise InputError(f"hess_approx must be one of {HESS_APPROX}, not {group['hess_approx']!r}")


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


def check_parameters(params: Sequence[Any], learner: str = "IVON") -> None:
    """Raise :class:`InputError` for a parameter that has no real Gaussian."""
    for index, param in enumerate(params):
        tensor = param[1] if isinstance(param, tuple) else param
        if isinstance(tensor, Tensor) and not tensor.is_floating_point():
            raise InputError(
                f"parameter {index} of shape {tuple(tensor.shape)} is {tensor.dtype}; {learner} "
                "learns a Gaussian over real floating-point parameters: leave it out, or split a "
                "complex one into its real and imaginary parts"
            )

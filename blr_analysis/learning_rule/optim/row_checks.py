"""Is what a row's optimizer was given usable?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.optim.ivon_checks import check_range

FINITE = "a finite number of 0 or more", lambda x: 0 <= x < math.inf
RANGES: dict[str, tuple[str, Any]] = {
    "lr": FINITE,
    "ess": (
        "a finite number above 0 (the number of training examples)",
        lambda x: 0 < x < math.inf,
    ),
    "hess_init": FINITE,
    "beta1": ("0 or more and below 1", lambda x: 0 <= x < 1),
    "beta2": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "weight_decay": FINITE,
    "eps": FINITE,
    "radius": FINITE,
    "damping": FINITE,
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

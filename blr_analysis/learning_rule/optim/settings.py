"""The settings of a row as data: which values each may have, and its value where none is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import instance, positive_int
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.expectations import AT_ADVERSARY
from blr_analysis.learning_rule.table import Row

ROUNDING = 1e-12
"""A schedule that ends at 0 may miss it by so much."""


@dataclass(frozen=True)
class Setting:
    """A number of a parameter group; ``default`` is for rows whose signature does not name it."""

    expected: str
    holds: Callable[[float], bool]
    default: float | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise :class:`InputError` for a value out of range."""
        try:
            valid = bool(self.holds(float(value)))
        except (TypeError, ValueError, RuntimeError):
            valid = False
        if not valid:
            raise InputError(f"{name} must be {self.expected}, not {value!r}")


NATURAL = Setting("a finite number of 0 or more", lambda x: 0 <= x < math.inf)
POSITIVE = Setting("a finite number above 0", lambda x: 0 < x < math.inf)
SHARE = Setting("from 0 to 1", lambda x: 0 <= x <= 1)
PART = Setting("above 0 and at most 1", lambda x: 0 < x <= 1)
BOUND = Setting("above 0 (inf for no clipping)", lambda x: x > 0)

SETTINGS: dict[str, Setting] = {
    "lr": Setting(NATURAL.expected, lambda x: -ROUNDING <= x < math.inf),
    "ess": replace(POSITIVE, expected="above 0, the number of training examples", default=1.0),
    "weight_decay": replace(NATURAL, default=0.0),
    "hess_init": replace(NATURAL, default=0.0),
    "beta1": Setting("0 or more and below 1", lambda x: 0 <= x < 1, default=0.9),
    "beta2": replace(SHARE, default=0.999),
    "eps": NATURAL,
    "radius": NATURAL,
    "damping": NATURAL,
    "clip_radius": BOUND,
    "clip": BOUND,
    "keep": PART,
    "keep_lr": SHARE,
    "keep_prior": PART,
    "temperature": POSITIVE,
    "floor": NATURAL,
    "noise": NATURAL,
}
OF_THE_OPTIMIZER = (
    *("params", "row", "mc_samples", "sync", "generator"),
    *("model", "loss_reduction", "steps", "foreach"),
)
"""Arguments that no group has one of its own of."""


def group_defaults(row: Row, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group holds of the arguments that ``row``'s optimizer was given."""
    unused = {*OF_THE_OPTIMIZER, "self"}
    if not row.move.damping.startswith("eps"):
        unused |= {"eps"}
    if row.look != AT_ADVERSARY:
        unused |= {"radius", "damping"}
    return {
        **{name: s.default for name, s in SETTINGS.items() if s.default is not None},
        "hess_approx": row.curvature.method,
        **{name: value for name, value in given.items() if name not in unused},
        "algorithm": row.algorithm,
    }


def check_group(
    group: Mapping[str, Any], algorithm: str, own: Mapping[str, Setting], *, samples: bool
) -> None:
    """Raise :class:`InputError` for the first setting out of its range; ``own`` are narrower."""
    for name, setting in {**SETTINGS, **own}.items():
        if name in group:
            setting.check(name, group[name])
    if samples and group["hess_init"] + group["weight_decay"] <= 0:
        raise InputError(f"{algorithm}'s precision starts at 0: give weight_decay or hess_init")
    if group.get("algorithm", algorithm) != algorithm:
        raise InputError(f"algorithm is {algorithm!r} for all groups, not {group['algorithm']!r}")


def check_arguments(mc_samples: Any, generator: Any) -> None:
    """Raise :class:`InputError` for what is no number of draws, or no generator."""
    positive_int("mc_samples", mc_samples)
    if generator is not None:
        instance("generator", generator, torch.Generator, "a torch.Generator or None")


def check_closure(closure: Any) -> None:
    """Raise :class:`OptimizerError` unless ``closure`` can be called, or is None."""
    if closure is not None and not callable(closure):
        raise OptimizerError(f"step(closure) takes a function of the loss, not {closure!r}")


def listed(params: Any) -> list[Any] | Tensor:
    """``params`` as torch's optimizers take them, a generator of parameters read once.

    Raises:
        InputError: it is empty, has no order, or holds no parameters.
    """
    if isinstance(params, Tensor):
        return params
    try:
        held = [] if isinstance(params, set) else list(params)  # no order to save a state by
    except TypeError:
        held = []
    if not held:
        raise InputError(
            f"params is empty or a set ({type(params).__name__}): pass model.parameters() or groups"
        )
    return held


def read_group(group: Any, algorithm: str) -> dict[str, Any]:
    """A group of parameters with its ``params`` as a list.

    Raises:
        InputError: it is no dictionary with parameters; one of them has no real Gaussian.
    """
    if not isinstance(group, Mapping) or "params" not in group:
        raise InputError(f"a group of parameters is a dictionary with 'params', not {group!r}")
    params = listed(group["params"])
    group = {**group, "params": [params] if isinstance(params, Tensor) else params}
    for index, tensor in enumerate(tensors_of(group)):
        if not tensor.is_floating_point():
            raise InputError(
                f"parameter {index} is {tensor.dtype}; {algorithm} takes real floating-point ones"
            )
    return group


def tensors_of(group: Mapping[str, Any]) -> Sequence[Tensor]:
    """The tensors of a group, whose parameters may be named."""
    held = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
    return [p for p in held if isinstance(p, Tensor)]

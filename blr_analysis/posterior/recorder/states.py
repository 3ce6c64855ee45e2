"""What a recorder saves: counts, means, sums of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError

COUNTS = ("passes", "recorded", "drawn")
KEYS = {"passes", "recorded", "shapes", "joints", "means"}  # of a state


def shapes_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, list[int]]:
    """The shape of each parameter, as a state holds it."""
    return {name: list(p.shape) for name, p in parameters.items()}


def check_state(state: Any, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise unless this is a state of a recorder of these parameters.

    Raises:
        InputError: it is no such state.
        ModelError: it is another model's.
    """
    if not isinstance(state, Mapping) or not state.keys() >= KEYS:
        raise InputError("this is no state of a KroneckerRecorder; pass its state_dict()")
    shapes = shapes_of(parameters)
    saved_shapes = state["shapes"]
    names = shapes | saved_shapes
    if odd := [name for name in names if shapes.get(name) != saved_shapes.get(name)]:
        raise ModelError(f"the state was recorded on another model: {some(sorted(odd))}")


def between(earlier: Mapping[str, Any] | None, later: Mapping[str, Any]) -> dict[str, Any]:
    """What a recorder without ``beta2`` saw between two of its states; None: from the beginning.

    Where nothing was recorded between them it is all that was seen before.
    """
    n_earlier = earlier["recorded"] if earlier else 0
    n_between = later["recorded"] - n_earlier
    if earlier is None or n_between <= 0:
        return dict(later)
    means = {}
    for key, mean in later["means"].items():
        total = later["recorded"] * mean
        if key in earlier["means"]:
            total = total - n_earlier * earlier["means"][key].to(mean)
        means[key] = total / n_between
    before = earlier["gradients"]
    gradients = {
        name: total - before[name].to(total) if name in before else total
        for name, total in later["gradients"].items()
    }
    return {
        **later,
        "recorded": n_between,
        "drawn": later["drawn"] - earlier["drawn"],
        "means": means,
        "gradients": gradients,
    }

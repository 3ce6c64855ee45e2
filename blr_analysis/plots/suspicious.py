"""The suspicious examples as a picture: relabelling gain against unfamiliarity."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.errors import InputError
from blr_analysis.plots._canvas import (
    BLUE,
    GREY,
    ORANGE,
    VERMILLION,
    as_array,
    axes_or_new,
    choose_scale,
    count_of,
)
from blr_analysis.sensitivity.suspicious import KINDS, NONE, Suspicions

__all__ = ["plot_suspicious"]

_STYLES = {
    "none": (GREY, ".", "nothing suspected"),
    "label": (VERMILLION, "x", "label"),
    "unfamiliar": (BLUE, "^", "unfamiliar"),
    "duplicate": (ORANGE, "s", "duplicate"),
}


def plot_suspicious(found: Any, ax: Axes | None = None) -> Axes:
    """Draw what relabelling each example would gain against how unfamiliar it is.

    Args:
        found: what :func:`blr_analysis.suspicious` returns.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Raises:
        InputError: something else.
    """
    if not isinstance(found, Suspicions):
        raise InputError(
            f"plot_suspicious expects what suspicious(...) returns; got {type(found).__name__}"
        )
    ax = axes_or_new(ax, (7.2, 5.0))
    unfamiliarity, up = as_array(found.unfamiliarity), as_array(found.gain)
    across = choose_scale(unfamiliarity)
    x, kind = across.draw(unfamiliarity), np.array(found.kind)
    for name in (NONE, *KINDS):
        chosen = kind == name
        if chosen.any():
            colour, marker, words = _STYLES[name]
            size, alpha = (8, 0.4) if name == NONE else (26, 0.9)
            label = f"{words} ({int(chosen.sum()):,})"
            ax.scatter(
                x[chosen], up[chosen], s=size, c=colour, marker=marker, alpha=alpha, label=label
            )
    ax.set_xscale(across.name)
    if found.proposed is not None:
        ax.axhline(0, color="0.25", lw=0.9, ls="--", zorder=0.5)
        ax.set_ylabel("gain of relabelling [nats]  (→ label more suspicious)")
    else:
        ax.set_ylabel("left-out loss [nats]  (→ target more suspicious)")
    ax.set_xlabel(f"unfamiliarity tr ΛV [parameters]  (→ less familiar){across.note}")
    ax.set_title(f"What looks wrong in {count_of(len(found))}")
    ax.legend(loc="best", fontsize="small")
    return ax

"""The loss without each group as a dot and its range: one small drawing for each row of the page.

The drawings have the page's colours, and are as wide as the page allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from blr_analysis.audit.groups import in_order, is_measured

HEIGHT = 22  # pixels
MARGIN = 0.06  # of the width, on either side


def bars_of(removals: pd.DataFrame, truth: Mapping[Any, float] | None = None) -> list[Markup]:
    """A drawing for each group, in the order of the page.

    A group whose figures the page does not show has an empty drawing.

    Args:
        truth: the loss after retraining without a group, by group, where that is known.
    """
    table = in_order(removals)
    trusted = is_measured(table)
    truths = [(truth or {}).get(group, np.nan) for group in table["group"]]
    columns = ["nll_before", "nll_after", "nll_low", "nll_high"]
    values = np.column_stack([table[columns].to_numpy(float), truths])
    shown = values[trusted]
    shown = shown[np.isfinite(shown)]
    if not len(shown):
        return [Markup("") for _ in range(len(table))]
    low = float(shown.min())
    span = float(shown.max()) - low or 1.0
    places = 100 * (MARGIN + (1 - 2 * MARGIN) * (values - low) / span)
    return [
        _drawing(row) if is_trusted else Markup("")
        for row, is_trusted in zip(places, trusted, strict=True)
    ]


def _drawing(places: np.ndarray) -> Markup:
    """The drawing of a group: the line of all data, the range, the dot, and a diamond.

    Args:
        places: of the loss before and after, the range's ends, and the retrained model's loss, in
            percent of the width; NaN where there is none.
    """
    before, after, low, high, retrained = map(float, places)
    middle = HEIGHT / 2
    parts = [f'<line class="before" x1="{before:.1f}%" x2="{before:.1f}%" y1="0" y2="{HEIGHT}"/>']
    if np.isfinite([low, high]).all():
        parts.append(
            f'<line class="range" x1="{low:.1f}%" x2="{high:.1f}%" y1="{middle}" y2="{middle}"/>'
        )
    parts.append(f'<circle cx="{after:.1f}%" cy="{middle}" r="5"/>')
    if np.isfinite(retrained):
        parts.append(
            f'<svg class="truth" x="{retrained:.1f}%" y="{middle}" overflow="visible">'
            '<path d="M0 -7L7 0L0 7L-7 0Z"/></svg>'
        )
    return Markup(f'<svg height="{HEIGHT}" aria-hidden="true">{"".join(parts)}</svg>')

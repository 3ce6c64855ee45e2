"""The page's charts: Bokeh models, wired up in the browser by the page's own script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from bokeh.embed import json_item
from bokeh.models import (
    BooleanFilter,
    BoxSelectTool,
    CDSView,
    ColumnDataSource,
    HoverTool,
    InlineStyleSheet,
    Label,
    LassoSelectTool,
    PanTool,
    Range1d,
    ResetTool,
    Span,
    TapTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from blr_analysis.memory_map import REGIONS, VARIANCES, MemoryMap
from blr_analysis.plots._canvas import (
    BLUE,
    GREY,
    LOOKS,
    MEASURES,
    ORANGE,
    AxisScale,
    choose_scale,
    shortened,
)
from blr_analysis.plots.memory import CROWD

CELLS = (72, 44)
ON_PAPER = "@media print { :host { visibility: hidden } }"
MOST_GROUPS = 30
MARKS = {"o": "circle", "s": "square", "^": "triangle"}
DASHES = {":": "dotted", "-": "solid", "--": "dashed"}


def memory_chart(memory: MemoryMap, rows: np.ndarray) -> dict[str, Any]:
    """Error against variance: cells that count all examples, and a point for each of ``rows``."""
    variance, error = memory.variance.numpy(), memory.error.numpy()
    across = choose_scale(variance, memory.variance_threshold)
    up = choose_scale(error, memory.error_threshold)
    x, y = across.draw(variance), up.draw(error)
    line_x, line_y = across.line(memory.variance_threshold), up.line(memory.error_threshold)
    x_range = across.limits(np.append(x, line_x), 0.05, 0.05)
    y_range = up.limits(np.append(y, line_y), 0.1, 0.1)
    kind = VARIANCES[memory.variance_kind]
    chart = figure(
        x_axis_type=across.name,
        y_axis_type=up.name,
        x_range=Range1d(start=x_range[0], end=x_range[1]),
        y_range=Range1d(start=y_range[0], end=y_range[1]),
        x_axis_label=f"prediction {kind}  (→ less certain){_note(across)}",
        y_axis_label=f"prediction error ‖e‖₂  (→ more wrong){_note(up)}",
        tools=[],
        height=480,
        sizing_mode="stretch_width",
        name="map",
    )
    if len(x) >= CROWD:
        chart.quad(source=ColumnDataSource(_cells(x, y, across, up)), left="left", right="right",
                   bottom="bottom", top="top", fill_color=GREY, fill_alpha="alpha",
                   line_color=None)  # fmt: skip
    n = len(rows)
    shown = {"x": x[rows].astype(np.float32), "y": y[rows].astype(np.float32)}
    looks = {"colour": [GREY] * n, "mark": ["circle"] * n}
    source = ColumnDataSource({**shown, **looks}, name="points")
    points = chart.scatter(
        "x",
        "y",
        source=source,
        view=CDSView(filter=BooleanFilter(name="shown")),
        marker="mark",
        size=8 if n <= 1000 else 5 if n < CROWD else 4,
        color="colour",
        alpha=0.8 if n <= 1000 else 0.55 if n < CROWD else 0.3,
        nonselection_alpha=0.06,
    )
    focus = ColumnDataSource({"x": [], "y": []}, name="focus")
    chart.scatter("x", "y", source=focus, size=17, fill_color=None, line_color=ORANGE, line_width=3)
    dashed: dict[str, Any] = {"line_dash": "dashed", "line_color": GREY}
    chart.add_layout(Span(location=line_x, dimension="height", **dashed))
    chart.add_layout(Span(location=line_y, dimension="width", **dashed))
    for place, region in enumerate(REGIONS):
        right, top = place % 2, place // 2
        chart.add_layout(
            Label(
                x=x_range[right],
                y=y_range[top],
                x_offset=-8 if right else 8,
                y_offset=-8 if top else 8,
                text=region,
                text_align="right" if right else "left",
                text_baseline="top" if top else "bottom",
                text_font_size="12px",
                text_font_style="bold" if region == "memorable" else "normal",
                background_fill_color="white",
                background_fill_alpha=0.7,
            )
        )
    brush = BoxSelectTool(renderers=[points])
    chart.add_tools(
        brush,
        LassoSelectTool(renderers=[points], continuous=False),
        PanTool(),
        wheel := WheelZoomTool(),
        ResetTool(),
        TapTool(renderers=[points]),
        HoverTool(renderers=[points], tooltips=None),
    )
    chart.toolbar.active_drag, chart.toolbar.active_scroll = brush, None
    chart.toolbar.stylesheets = [InlineStyleSheet(css=ON_PAPER)]
    wheel.zoom_on_axis = True
    return _item(chart)


def removals_chart(removals: pd.DataFrame, truth: dict[Any, float] | None) -> dict[str, Any]:
    """The loss without each group, with its rough range, beside the loss with all data."""
    order = np.argsort(-removals["nll_change"].abs().to_numpy(float), kind="stable")
    shown = removals.iloc[order[:MOST_GROUPS]][::-1]
    place = np.arange(len(shown), dtype=float)
    names = [plain_label(str(g)) for g in shown["group"]]
    chart = figure(
        height=110 + 24 * len(shown),
        sizing_mode="stretch_width",
        x_axis_label="NLL without it [nats per example]  (→ worse)",
        tools=[],
        toolbar_location=None,
        y_range=Range1d(start=-0.7, end=len(shown) - 0.3),
    )
    before = float(removals["nll_before"].iloc[0])
    chart.add_layout(Span(location=before, dimension="height", line_dash="dashed", line_color=GREY))
    chart.scatter([before], [0.0], size=0)  # so that the line lies within the axis
    low, high = shown["nll_low"].to_numpy(float), shown["nll_high"].to_numpy(float)
    chart.segment(low, place, high, place, line_width=6, color=BLUE, alpha=0.35,
                  legend_label="rough range")  # fmt: skip
    chart.scatter(shown["nll_after"].to_numpy(float), place, size=11, color=BLUE,
                  legend_label="without it, predicted")  # fmt: skip
    if truth:
        known = [(truth[g], k) for k, g in enumerate(shown["group"]) if g in truth]
        if known:
            chart.scatter(*map(list, zip(*known, strict=True)), size=12, marker="diamond",
                          color=ORANGE, line_color="black", legend_label="retrained")  # fmt: skip
    chart.yaxis.ticker = place.tolist()
    chart.yaxis.major_label_overrides = dict(zip(place.tolist(), names, strict=True))
    chart.ygrid.visible = False
    chart.add_layout(chart.legend[0], "above")
    chart.legend.orientation = "horizontal"
    return _item(chart)


def training_chart(table: pd.DataFrame) -> dict[str, Any]:
    """Losses over the epochs: training data, leave-one-out estimate, test data."""
    chart = figure(height=320, sizing_mode="stretch_width", tools=[], toolbar_location=None,
                   x_axis_label="epoch", y_axis_label=MEASURES["nll"])  # fmt: skip
    for where, (label, look) in LOOKS.items():
        values = table[f"{where}_nll"].to_numpy(float)
        if np.isfinite(values).any():
            epochs = table["epoch"].to_numpy(float)
            chart.line(epochs, values, color=look["color"], line_dash=DASHES[look["ls"]],
                       line_width=2, legend_label=label)  # fmt: skip
            chart.scatter(epochs, values, color=look["color"], marker=MARKS[look["marker"]],
                          size=8, legend_label=label)  # fmt: skip
    chart.add_layout(chart.legend[0], "above")
    chart.legend.orientation = "horizontal"
    return _item(chart)


def plain_label(text: str) -> str:
    """Somebody's word as a tick label: short, and never taken for a formula."""
    return shortened(text, 28).replace("$$", "$\u200b$").replace("\\", "\\\u200b")


def _note(scale: AxisScale) -> str:
    return f"; {scale.clipped:,} below {scale.floor:.1g} at the edge" if scale.clipped else ""


def _cells(x: np.ndarray, y: np.ndarray, across: AxisScale, up: AxisScale) -> dict[str, Any]:
    """How many examples there are in each cell of a grid, as opacity; empty cells are left out."""
    u, v = (np.log10(z) if s.log else z for z, s in ((x, across), (y, up)))
    counts, left, bottom = np.histogram2d(u, v, bins=CELLS)
    i, j = np.nonzero(counts)
    edges: Sequence[np.ndarray] = [left[i], left[i + 1], bottom[j], bottom[j + 1]]
    scales = (across, across, up, up)
    drawn = [10**e if s.log else e for e, s in zip(edges, scales, strict=True)]
    share = np.log1p(counts[i, j]) / np.log1p(counts.max())
    names = ("left", "right", "bottom", "top")
    return {**dict(zip(names, drawn, strict=True)), "alpha": 0.1 + 0.6 * share}


def _item(chart: Any) -> dict[str, Any]:
    """What the browser draws the chart from; its paper is the page's own."""
    chart.toolbar.logo = None
    chart.background_fill_color = chart.border_fill_color = None
    chart.outline_line_color = None
    return dict(json_item(chart))

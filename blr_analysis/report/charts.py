"""The page's pictures: the memory map as Bokeh models, wired up in the browser by the page's own
script; the others drawn here."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.models import BooleanFilter, CDSView, ColumnDataSource, HoverTool, InlineStyleSheet, Span
from bokeh.plotting import figure
from matplotlib.axes import Axes

from blr_analysis.memory_map import VARIANCES, MemoryMap
from blr_analysis.plots import _canvas as canvas

ON_PAPER = "@media print { :host { visibility: hidden } }"
DASHED: dict[str, Any] = {"line_dash": "dashed", "line_color": canvas.GREY}
PAD = 0.05  # of an axis


def memory_chart(memory: MemoryMap, rows: np.ndarray) -> dict[str, Any]:
    """Error against variance: a point for each of ``rows``."""
    across = _Axis(memory.variance.numpy(), memory.variance_threshold)
    up = _Axis(memory.error.numpy(), memory.error_threshold)
    chart = figure(
        x_axis_type=across.kind,
        y_axis_type=up.kind,
        x_range=across.limits,
        y_range=up.limits,
        x_axis_label=f"prediction {VARIANCES[memory.variance_kind]}  (→ less certain)",
        y_axis_label="prediction error ‖e‖₂  (→ more wrong)",
        tools="box_select,lasso_select,pan,wheel_zoom,reset,tap",
        active_drag="box_select",
        active_scroll=None,
        height=480,
        sizing_mode="stretch_width",
        name="map",
    )
    n = len(rows)
    shown = {"x": across.drawn[rows].astype(np.float32), "y": up.drawn[rows].astype(np.float32)}
    looks = {"colour": [canvas.GREY] * n, "mark": ["circle"] * n}
    size, alpha = (8, 0.8) if n <= 1000 else (5, 0.5) if n <= 3000 else (4, 0.3)
    points = chart.scatter(
        "x",
        "y",
        source=ColumnDataSource({**shown, **looks}, name="points"),
        view=CDSView(filter=BooleanFilter(name="shown")),
        marker="mark",
        size=size,
        color="colour",
        alpha=alpha,
        nonselection_alpha=0.06,
    )
    focus = ColumnDataSource({"x": [], "y": []}, name="focus")
    chart.scatter(
        "x", "y", source=focus, size=17, fill_color=None, line_color=canvas.ORANGE, line_width=3
    )
    chart.add_layout(Span(location=across.line, dimension="height", **DASHED))
    chart.add_layout(Span(location=up.line, dimension="width", **DASHED))
    chart.add_tools(HoverTool(renderers=[points], tooltips=None))
    chart.toolbar.stylesheets = [InlineStyleSheet(css=ON_PAPER)]
    chart.toolbar.logo = None
    chart.background_fill_color = chart.border_fill_color = None  # the paper is the page's own
    chart.outline_line_color = None
    return dict(json_item(chart))


def drawn_here(ax: Axes) -> str:
    """A picture as a ``data:`` URI."""
    file = io.BytesIO()
    canvas.whole_figure(ax).savefig(file, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class _Axis:
    """One axis of the map: logarithmic or not; Bokeh's has no zero, which stands at its edge."""

    def __init__(self, values: np.ndarray, threshold: float) -> None:
        scale = canvas.scale_of(values)
        log = scale["value"] != "linear"
        self.kind: Any = "log" if log else "linear"
        floor = scale.get("linthresh", -np.inf)
        self.drawn = np.where(values < floor, floor / 2, values)
        self.line = max(threshold, floor / 1.4) if log else threshold
        every = np.append(self.drawn, self.line)
        low, high = np.quantile(np.log10(every) if log else every, [0, 1])
        pad = PAD * ((high - low) or abs(high) or 1.0)
        ends = (float(low - pad), float(high + pad))
        self.limits: Any = (10 ** ends[0], 10 ** ends[1]) if log else ends

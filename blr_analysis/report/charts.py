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
    points = _points(chart, across.drawn[rows], up.drawn[rows])
    focus = ColumnDataSource({"x": [], "y": []}, name="focus")
    chart.scatter(
        "x", "y", source=focus, size=17, fill_color=None, line_color=canvas.ORANGE, line_width=3
    )
    chart.add_layout(Span(location=across.line, dimension="height", **DASHED))
    chart.add_layout(Span(location=up.line, dimension="width", **DASHED))
    chart.add_tools(HoverTool(renderers=[points], tooltips=None))
    chart.toolbar.stylesheets = [InlineStyleSheet(css=ON_PAPER)]
    chart.toolbar.logo = None
    chart.background_fill_color = None  # the page's background shows through
    chart.border_fill_color = None
    chart.outline_line_color = None
    return dict(json_item(chart))


def _points(chart: Any, x: np.ndarray, y: np.ndarray) -> Any:
    """Draw the examples, smaller and fainter where they are many."""
    n = len(x)
    if n <= 1000:
        size = 8
        alpha = 0.8
    elif n <= 3000:
        size = 5
        alpha = 0.5
    else:
        size = 4
        alpha = 0.3
    columns = {
        "x": x.astype(np.float32),
        "y": y.astype(np.float32),
        "colour": [canvas.GREY] * n,
        "mark": ["circle"] * n,
    }
    return chart.scatter(
        "x",
        "y",
        source=ColumnDataSource(columns, name="points"),
        view=CDSView(filter=BooleanFilter(name="shown")),
        marker="mark",
        size=size,
        color="colour",
        alpha=alpha,
        nonselection_alpha=0.06,
    )


def drawn_here(ax: Axes) -> str:
    """A picture as a ``data:`` URI."""
    file = io.BytesIO()
    canvas.whole_figure(ax).savefig(file, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class _Axis:
    """One axis of the map. Bokeh's logarithmic axis has no zero: zeros stand at its edge."""

    def __init__(self, values: np.ndarray, threshold: float) -> None:
        scale = canvas.scale_of(values)
        is_logarithmic = scale["value"] != "linear"
        self.kind: Any = "log" if is_logarithmic else "linear"
        floor = scale.get("linthresh", -np.inf)
        self.drawn = np.where(values < floor, floor / 2, values)
        self.line = max(threshold, floor / 1.4) if is_logarithmic else threshold
        places = np.append(self.drawn, self.line)
        if is_logarithmic:
            places = np.log10(places)
        low, high = np.quantile(places, [0, 1])
        pad = PAD * ((high - low) or abs(high) or 1.0)
        self.limits: Any = (float(low - pad), float(high + pad))
        if is_logarithmic:
            self.limits = (10 ** self.limits[0], 10 ** self.limits[1])

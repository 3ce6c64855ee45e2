"""The page's pictures: the memory map as Bokeh models, and pictures of matplotlib.

The page's own script connects the memory map to its tables, in the browser.
"""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.models import BooleanFilter, CDSView, ColumnDataSource, HoverTool, InlineStyleSheet, Span
from bokeh.plotting import figure
from matplotlib.axes import Axes

from blr_analysis.memory_map import MemoryMap
from blr_analysis.plots import _canvas as canvas

HIDDEN_ON_PAPER = "@media print { :host { visibility: hidden } }"
DASHED: dict[str, Any] = {"line_dash": "dashed", "line_color": canvas.GREY}
# Up to how many points, their size in pixels, their opacity.
DOT_STYLES = [(1000, 8, 0.8), (3000, 5, 0.5), (math.inf, 4, 0.3)]
PAD = 0.05  # free at either end of an axis, as a share of its length


def memory_chart(memory: MemoryMap, rows: np.ndarray) -> dict[str, Any]:
    """Error against variance, with a point for each of these examples, as JSON for Bokeh.

    Args:
        rows: the indices of the examples that are shown.
    """
    across = _Axis(memory.variance.numpy(), memory.variance_threshold)
    up = _Axis(memory.error.numpy(), memory.error_threshold)
    chart = figure(
        x_axis_type=across.kind,
        y_axis_type=up.kind,
        x_range=across.limits,
        y_range=up.limits,
        x_axis_label="prediction variance  (→ less certain)",
        y_axis_label="prediction error  (→ more wrong)",
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
    _show_page_behind(chart)
    return dict(json_item(chart))


def _show_page_behind(chart: Any) -> None:
    """Leave out the frame, the background, and the toolbar's logo."""
    chart.toolbar.stylesheets = [InlineStyleSheet(css=HIDDEN_ON_PAPER)]
    chart.toolbar.logo = None
    chart.background_fill_color = None
    chart.border_fill_color = None
    chart.outline_line_color = None


def _points(chart: Any, x: np.ndarray, y: np.ndarray) -> Any:
    """Draw the examples, smaller and fainter where they are many."""
    n = len(x)
    size, opacity = canvas.dot_style(n, DOT_STYLES)
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
        alpha=opacity,
        nonselection_alpha=0.06,
    )


def as_uri(ax: Axes) -> str:
    """A picture of matplotlib as a ``data:`` URI."""
    file = io.BytesIO()
    canvas.whole_figure(ax).savefig(file, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class _Axis:
    """One axis of the map. Bokeh's logarithmic axis has no zero: zeros stand at its edge.

    Attributes:
        kind: "log" or "linear".
        drawn: where each example stands, ``[N]``.
        line: where the threshold stands.
        limits: the ends of the axis.
    """

    def __init__(self, values: np.ndarray, threshold: float) -> None:
        scale = canvas.scale_of(values)
        is_logarithmic = scale["value"] != "linear"
        self.kind: Any = "log" if is_logarithmic else "linear"
        floor = scale.get("linthresh", -np.inf)
        self.drawn = np.where(values < floor, floor / 2, values)
        self.line = threshold
        if is_logarithmic:
            self.line = max(threshold, floor / 1.4)  # between zeros and the smallest value
        places = np.append(self.drawn, self.line)
        if is_logarithmic:
            places = np.log10(places)
        low, high = np.quantile(places, [0, 1])
        pad = PAD * ((high - low) or abs(high) or 1.0)
        self.limits: Any = (float(low - pad), float(high + pad))
        if is_logarithmic:
            self.limits = (10 ** self.limits[0], 10 ** self.limits[1])

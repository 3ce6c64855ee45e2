"""Tables and pictures of mismatches and merge curves show the numbers of their results."""

from __future__ import annotations

import math
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, TextArea

from blr_analysis.errors import InputError
from blr_analysis.merging import GradientMismatch, MergeCurve, MergePoint
from blr_analysis.plots import plot_merge_curve, plot_mismatch


def row(merge: str, task: str, size: float, **changes: float) -> dict[str, Any]:
    """A row of the mismatch table, without test data or a metric unless ``changes`` has them."""
    numbers = {
        "mismatch": 10 * size,
        "mismatch_per_example": size,
        "mismatch_in_metric": math.nan,
        "distance": 2 * size,
        "gap": size,
        "nll_own": 0.5,
        "nll_merged": 0.5 + size / 10,
        "accuracy_own": 0.9,
        "accuracy_merged": 0.9 - size / 40,
        "test_nll_own": math.nan,
        "test_nll_merged": math.nan,
        "test_accuracy_own": math.nan,
        "test_accuracy_merged": math.nan,
    }
    return {"merge": merge, "task": task, **numbers, **changes}


def mismatch(merges: int = 2, **changes: float) -> GradientMismatch:
    rows = [
        row(f"merge {m}", task, (m + 1) * (t + 1), **changes)
        for m in range(merges)
        for t, task in enumerate(("news", "books", "films"))
    ]
    return GradientMismatch(rows, {f"merge {m}": 1.0 for m in range(merges)})


def curve(
    rows: list[tuple[str, tuple[float, ...]]],
    shape: str = "shared",
    tasks: tuple[str, ...] = ("news", "books"),
) -> MergeCurve:
    points = []
    for method, weights in rows:
        loss = 0.3 + (weights[0] - 0.6) ** 2
        losses = tuple(loss + 0.1 * t for t in range(len(tasks)))
        accuracies = tuple(0.9 - x / 10 for x in losses)
        points.append(MergePoint(method, weights, losses, accuracies))
    return MergeCurve(points, ("a", "b"), tasks, shape)


GRID = [k / 10 for k in range(11)]
SHARED = [("matching", (a, a)) for a in GRID]
BOTH = SHARED + [("arithmetic", (a, a)) for a in GRID]
PLANE = [("matching", (a, b)) for a in GRID for b in (0.0, 0.5, 2.0)]
EVERY: dict[str, Callable[..., Axes]] = {
    "mismatch": lambda ax=None: plot_mismatch(mismatch(), ax),
    "mismatch of one merge": lambda ax=None: plot_mismatch(mismatch(1), ax, measure="accuracy"),
    "one curve": lambda ax=None: plot_merge_curve(curve(SHARED), ax),
    "several methods": lambda ax=None: plot_merge_curve(curve(BOTH), ax, measure="accuracy"),
    "grid": lambda ax=None: plot_merge_curve(curve(PLANE, "grid"), ax),
    "rows": lambda ax=None: plot_merge_curve(curve(SHARED, "rows"), ax),
}


@pytest.mark.parametrize("name", EVERY)
def test_drawn_where_asked_or_on_a_figure_of_its_own(name: str) -> None:
    figure = Figure()
    ax = figure.subplots()
    assert EVERY[name](ax) is ax
    ax_of_its_own = EVERY[name]()
    file = BytesIO()
    ax_of_its_own.figure.savefig(file)
    assert ax_of_its_own.figure is not figure
    assert file.getvalue().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="ax must be"):
        EVERY[name]("axes")


def test_points_of_the_mismatch_lie_where_the_table_says() -> None:
    actual = mismatch()
    table = actual.table
    ax = plot_mismatch(actual)
    for k, (_, rows) in enumerate(table.groupby("merge", sort=False)):
        drawn = np.asarray(ax.collections[k].get_offsets())
        rise = rows.nll_merged - rows.nll_own
        np.testing.assert_allclose(drawn, np.column_stack([rows.mismatch_per_example, rise]))
    boxes = [b for b in ax.artists if isinstance(b, AnnotationBbox)]
    assert all(isinstance(b.offsetbox, TextArea) for b in boxes)
    assert sorted(b.offsetbox.get_text() for b in boxes) == sorted(table.task)
    legend = ax.get_legend()
    assert [t.get_text() for t in legend.get_texts()] == ["merge 0", "merge 1"]
    assert plot_mismatch(mismatch(1)).get_legend() is None
    lines = [line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_zorder() == 1]
    assert len(lines) == 3  # one for each task, between its two merges
    assert "training data" in ax.get_ylabel()


def test_the_cost_is_that_on_test_data_where_there_are_any() -> None:
    changes = dict(test_nll_own=0.2, test_nll_merged=0.7)
    changes |= dict(test_accuracy_own=0.8, test_accuracy_merged=0.5)
    for measure, cost in (("nll", 0.5), ("accuracy", 0.3)):
        ax = plot_mismatch(mismatch(**changes), measure=measure)
        drawn = np.asarray(ax.collections[0].get_offsets())
        np.testing.assert_allclose(drawn[:, 1], cost)
        np.testing.assert_allclose(drawn[:, 0], [1, 2, 3])
        assert "test data" in ax.get_ylabel()


def line(ax: Axes, label: str) -> tuple[np.ndarray, np.ndarray]:
    (actual,) = (curve_line for curve_line in ax.lines if curve_line.get_label() == label)
    return np.asarray(actual.get_xdata()), np.asarray(actual.get_ydata())


def test_one_method_shows_its_tasks_and_their_mean() -> None:
    actual = curve(SHARED[::-1])
    ax = plot_merge_curve(actual)
    losses = np.array([0.3 + (a - 0.6) ** 2 for a in GRID])
    for label, extra in (("news", 0.0), ("books", 0.1), ("mean", 0.05)):
        x, y = line(ax, label)
        np.testing.assert_allclose(x, GRID)
        np.testing.assert_allclose(y, losses + extra)
    x, y = line(ax, "best: α = 0.6")
    assert x[0] == 0.6
    assert y[0] == pytest.approx(0.35)
    ax_of_one_task = plot_merge_curve(curve(SHARED, tasks=("news",)))
    labels = [curve_line.get_label() for curve_line in ax_of_one_task.lines]
    in_legend = [label for label in labels if not label.startswith("_")]
    assert in_legend == ["news", "best: α = 0.6"]


def test_rows_and_grids_show_the_order() -> None:
    actual = curve(PLANE, "rows")
    ax = plot_merge_curve(actual)
    values = np.array([p.nll for p in actual.points])
    np.testing.assert_allclose(line(ax, "matching")[1], values)
    assert line(ax, "best: α = (0.6, 0)")[0][0] == values.argmin() + 1


REGRESSION = MergeCurve([MergePoint("m", (1.0,), (0.5,), (math.nan,))], ("a",), ("t",), "shared")
NAN = {"mismatch_per_example": math.nan}


@pytest.mark.parametrize(
    ("draw", "result", "measure", "word"),
    [
        (plot_merge_curve, curve(SHARED), "f1", "measure must be one of"),
        (plot_merge_curve, REGRESSION, "accuracy", "no finite accuracy"),
        (plot_mismatch, mismatch(), "f1", "measure"),
        (plot_mismatch, mismatch(**NAN), "nll", "no finite"),
    ],
)
def test_bad_input(draw: Any, result: Any, measure: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        draw(result, measure=measure)


def test_results_find_their_tables_and_pictures() -> None:
    failed = MergePoint("arithmetic", (1.5, 1.5), (math.inf,) * 2, (math.nan,) * 2, "outputs")
    points = [*curve(BOTH).points, failed]
    result = MergeCurve(points, ("a", "b"), ("news", "books"), "shared")
    table = result.table
    assert table.loc[table.best, ["method", "weight"]].values.tolist() == [["matching", 0.6]]
    assert table.failure.tolist() == [""] * 22 + ["outputs"]
    assert math.isinf(table.nll[22])
    assert "1 could not be run" in result.plot().get_title()
    assert list(mismatch().table.task[:3]) == ["news", "books", "films"]
    assert isinstance(mismatch().plot(), Axes)

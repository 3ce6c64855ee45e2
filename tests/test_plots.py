"""Pictures show the numbers that they are given, on the axes that they are given."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage, TextArea

from blr_analysis.errors import InputError
from blr_analysis.memory_map import REGIONS, MemoryMap, memory_map
from blr_analysis.plots import (
    extremes,
    image_of,
    plot_deviations,
    plot_examples,
    plot_leave_one_out,
    plot_memory_map,
    plot_what_if,
)
from blr_analysis.posterior import fit_laplace
from blr_analysis.sensitivity import sensitivity, what_if
from blr_analysis.task import Task
from blr_analysis.views import make_plot


def scores_of(error: Any, variance: Any) -> SimpleNamespace:
    """Scores with C = 1 from errors and variances."""
    e = torch.as_tensor(np.asarray(error, dtype=np.float64)).reshape(-1)
    v = torch.as_tensor(np.asarray(variance, dtype=np.float64)).reshape(-1)
    return SimpleNamespace(
        error=e[:, None],
        variance=v[:, None, None],
        self_influence=e * e * v,
        deviation=e.abs() * v,
        likelihood=SimpleNamespace(is_classification=False),
    )


def some_scores(n: int = 200, spread: float = 2.0) -> SimpleNamespace:
    return scores_of(*np.exp(spread * np.random.default_rng(0).normal(size=(2, n))))


def some_map(n: int = 200) -> MemoryMap:
    return memory_map(some_scores(n))


def each_table(n: int = 4, **columns: Any) -> pd.DataFrame:
    """The table of what_if_each for n groups; ``columns`` replace its own."""
    k = np.arange(n)
    table = {
        "group": k,
        "nll_before": 0.1,
        "nll_after": 0.2 + k / 10,
        "accuracy_before": 0.9,
        "accuracy_after": 0.8 - k / 100,
    }
    return pd.DataFrame(table | columns)


ONE = SimpleNamespace(
    nll=0.5,
    accuracy=0.75,
    before=SimpleNamespace(nll=0.25, accuracy=0.9),
    targets=torch.arange(6),
    by_class=each_table(3).assign(n=2).rename(columns={"group": "class"}),
)
IMAGES = np.random.default_rng(3).random((200, 8, 8))
EVERY: dict[str, Callable[..., Axes]] = {
    "memory map": lambda ax=None: plot_memory_map(some_map(), ax),
    "memory map of images": lambda ax=None: plot_memory_map(some_map(), ax, images=IMAGES),
    "memory map of a crowd": lambda ax=None: plot_memory_map(some_map(4000), ax),
    "deviations": lambda ax=None: plot_deviations(some_scores(), ax),
    "leave-one-out": lambda ax=None: plot_leave_one_out([3, 2, 1], [3, 2, 2], ax),
    "leave-one-out of one": lambda ax=None: plot_leave_one_out(0.3, 0.4, ax),
    "what-if": lambda ax=None: plot_what_if(ONE, ax),
    "what-if each": lambda ax=None: plot_what_if(each_table(), ax, truth={1: 0.3}),
    "examples": lambda ax=None: plot_examples(IMAGES, [4, 2], ax=ax),
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.slow
def test_a_figure_of_ones_own_leaves_no_trace_and_axes_given_are_drawn_on(
    name: str, recwarn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    before = matplotlib.rcParams.copy()
    target = BytesIO()
    ax: Any = EVERY[name]()
    ax.savefig(target, format="png", dpi=50)
    for shown in (target.getvalue(), ax._repr_png_()):  # as a notebook does
        assert shown.startswith(b"\x89PNG")
    left, right = Figure().subplots(1, 2)
    assert EVERY[name](ax=right) is right
    assert not left.lines
    assert not left.collections
    assert not left.texts
    assert not list(recwarn)  # no glyph is missing, nothing collapses
    assert "matplotlib.pyplot" not in sys.modules
    assert matplotlib.rcParams.copy() == before


# Memory map


def boxes_of(ax: Axes) -> dict[str, AnnotationBbox]:
    """The labelled points by their words, from the top."""
    boxes = [artist for artist in ax.artists if isinstance(artist, AnnotationBbox)]
    return {box.findobj(TextArea)[0].get_text(): box for box in boxes}  # type: ignore[union-attr]


def points_of(ax: Axes) -> dict[str, np.ndarray]:
    return {str(c.get_label()): np.asarray(c.get_offsets()) for c in ax.collections}


UGLY = st.sampled_from([0.0, 1e-300, 1e-9, 1e-4, 0.5, 1.0, 1.5, 1e4, 1e30])
ugly = st.lists(st.tuples(UGLY, UGLY), min_size=1, max_size=30)


@settings(max_examples=10, deadline=None)
@given(ugly, st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_every_example_is_seen_once_on_its_side_of_the_thresholds(pairs, quantile) -> None:
    memory = memory_map(scores_of(*np.transpose(pairs)), quantile=quantile)
    ax = plot_memory_map(memory, n_extremes=0)
    right, up = (line.get_xydata()[0] for line in ax.lines)
    actual = points_of(ax)
    left, edge = ax.get_xlim()
    low, high = ax.get_ylim()
    for code, region in enumerate(REGIONS):
        in_region = memory.region == region
        expected = np.column_stack([memory.variance[in_region], memory.error[in_region]])
        np.testing.assert_array_equal(actual[region], expected)
        for x, y in actual[region]:
            assert (x > right[0]) == bool(code % 2)
            assert (y > up[1]) == bool(code >= 2)
            assert left < x < edge
            assert low < y < high
    assert len({str(c.get_paths()[0].vertices) for c in ax.collections[:4]}) == 4  # markers


def test_extremes_are_the_largest_products_and_labelled_where_they_are() -> None:
    memory = some_map(1000)
    product = (memory.error * memory.variance).tolist()
    by_product = sorted(range(1000), key=lambda i: -product[i])
    memorable = [i for i in by_product if memory.region[i] == "memorable"]
    half_way = [i for i in by_product if memory.region[i] in ("uncertain", "unpredictable")]
    assert len(memorable) > 6
    assert extremes(memory, 2000) == memorable + half_way
    assert extremes(memory, 0) == []
    images = np.random.default_rng(3).random((1000, 8, 8))
    settings = {"labels": [f"name{i}" for i in range(1000)], "n_extremes": 6, "images": images}
    ax = plot_memory_map(memory, **settings)
    from_above = sorted(memorable[:6], key=lambda i: -float(memory.error[i]))
    boxes = boxes_of(ax)
    assert [*boxes] == [f"{i}: name{i}" for i in from_above]
    places = [(float(memory.variance[i]), float(memory.error[i])) for i in from_above]
    assert [tuple(box.xy) for box in boxes.values()] == places
    for i, box in zip(from_above, boxes.values(), strict=True):
        (thumbnail, *_) = box.findobj(OffsetImage)
        np.testing.assert_array_equal(thumbnail.get_data(), images[i])  # type: ignore[union-attr]
    ax.figure.draw_without_rendering()
    ends = [box.offsetbox.get_window_extent() for box in boxes.values()]
    assert all(above.y0 > below.y1 for above, below in itertools.pairwise(ends))
    assert len(points_of(ax)["extremes"]) == 6


# Deviations, leave-one-out, what-if


def test_deviations_fall_and_the_largest_are_labelled() -> None:
    scores = some_scores()
    scores.deviation = scores.deviation.clamp(min=0.01)
    ax = plot_deviations(scores, n_labels=4, labels=[f"no{i}" for i in range(200)])
    expected = sorted(scores.deviation.tolist(), reverse=True)
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [*enumerate(expected, 1)])
    top = sorted(range(200), key=lambda i: -scores.deviation[i])[:4]
    boxes = boxes_of(ax)
    assert [*boxes] == [f"{i}: no{i}" for i in top]
    assert [box.xy for box in boxes.values()] == [(k + 1.0, expected[k]) for k in range(4)]
    assert ax.get_xscale() == "log"
    assert ax.get_yscale() == "symlog"
    part = pd.DataFrame({"index": [7, 9], "deviation": [0.1, 0.3]})
    assert [*boxes_of(plot_deviations(part))] == ["9", "7"]
    scores.deviation = None
    ax = plot_deviations(scores)  # by self-influence
    expected = sorted(scores.self_influence.tolist(), reverse=True)
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == expected
    assert "self-influence" in ax.get_ylabel()


def heights_of(ax: Axes) -> dict[str, list[float]]:
    return {str(c.get_label()): [bar.get_height() for bar in c] for c in ax.containers}  # type: ignore[attr-defined]


def names_of(ax: Axes) -> list[str]:
    return [tick.get_text() for tick in ax.get_xticklabels()]


def test_leave_one_out_beside_test_data() -> None:
    loo = [3.0, 2.0, 1.0]
    test = [3.5, 2.5, 2.0]
    ax = plot_leave_one_out(loo, torch.tensor(test), labels="abc")
    assert heights_of(ax) == {"leave-one-out, from training data": loo, "test data": test}
    assert names_of(ax) == ["a", "b", "c"]
    assert "worse" in ax.get_ylabel()


@pytest.mark.parametrize(("measure", "way"), [("nll", "worse"), ("accuracy", "better")])
def test_bars_before_and_after_each_group(measure: str, way: str) -> None:
    table = each_table(3, nll_low=[0.1, np.nan, 0.3], nll_high=[0.4, np.nan, 0.5])
    ax = plot_what_if(table, measure=measure, truth={0: 0.5, 2: 0.7})
    before = table[f"{measure}_before"].tolist()
    after = table[f"{measure}_after"].tolist()
    assert heights_of(ax) == {"before": before, "after, predicted": after}
    assert names_of(ax) == ["0", "1", "2"]
    assert way in ax.get_ylabel()
    (diamonds,) = ax.lines
    bars = ax.containers[1]
    middles = [bars[k].get_x() + bars[k].get_width() / 2 for k in (0, 2)]  # type: ignore[index]
    np.testing.assert_allclose(diamonds.get_xydata(), [*zip(middles, [0.5, 0.7], strict=True)])
    assert "after, retrained" in [t.get_text() for t in ax.get_legend().get_texts()]
    paths = [path for collection in ax.collections for path in collection.get_paths()]
    heights = [path.vertices[:, 1].tolist() for path in paths]
    ranges = [ends for ends in heights if not np.isnan(ends).any()]
    if measure == "nll":
        assert ranges == [[0.1, 0.4], [0.3, 0.5]]
    else:
        assert ranges == []


def test_of_many_groups_those_that_change_most_by_their_names() -> None:
    table = each_table(50, nll_after=0.1 + np.random.default_rng(0).normal(size=50))
    ax = plot_what_if(table, names={k: f"no {k}\n" + 40 * "x" for k in range(50)})
    change = (table["nll_after"] - table["nll_before"]).abs().tolist()
    by_change = sorted(range(50), key=lambda k: -change[k])
    expected = sorted(by_change[:20])
    assert "20 of 50 groups" in ax.get_title()
    assert names_of(ax) == [f"no {k} ".ljust(23, "x") + "…" for k in expected]
    assert heights_of(ax)["after, predicted"] == table["nll_after"][expected].tolist()


def test_scores_and_what_ifs_are_drawn_by_their_makers() -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    task = Task(torch.nn.Linear(2, 3), (x, torch.arange(40) % 3))
    posterior = fit_laplace(task, structure="full", prior_precision=1.0)
    scores = sensitivity(task, posterior)
    top = sorted(range(40), key=lambda i: -scores.deviation[i])[:3]  # type: ignore[index]
    assert [*boxes_of(make_plot(scores, n_labels=3))] == [*map(str, top)]
    result = what_if(task, posterior, remove=[0, 1], solver="posterior")
    ax = make_plot(result, truth={"all": 0.6})
    by_class = result.by_class
    assert names_of(ax) == ["all", "0", "1", "2"]
    assert ax.lines[0].get_ydata() == [0.6]
    assert heights_of(ax)["before"] == [result.before.nll, *by_class["nll_before"]]
    assert heights_of(ax)["after, predicted"] == [result.nll, *by_class["nll_after"]]


# Images


def test_examples_in_the_order_given() -> None:
    ax = plot_examples(IMAGES, torch.tensor([7, 3, 5]), columns=2, title="worst")
    assert ax.get_title() == "worst"
    for shown, i in zip(ax.images, [7, 3, 5], strict=True):
        np.testing.assert_array_equal(np.asarray(shown.get_array()), IMAGES[i])
    assert [text.get_text() for text in ax.texts] == ["#7", "#3", "#5"]
    (x0, x1, y0, y1), right, below = (image.get_extent() for image in ax.images)
    assert x1 - x0 == pytest.approx(abs(y1 - y0))
    assert right[0] > x1
    assert right[2:] == pytest.approx((y0, y1))
    assert below[:2] == pytest.approx((x0, x1))
    assert min(below[2:]) > max(y0, y1)  # the axis runs downward


COLOUR = np.random.default_rng(0).random((3, 8, 8))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (COLOUR[0], COLOUR[0]),
        (COLOUR[0].reshape(64), COLOUR[0]),
        (COLOUR, np.moveaxis(COLOUR, 0, -1)),
        (np.moveaxis(COLOUR, 0, -1), np.moveaxis(COLOUR, 0, -1)),
        (np.array([[0, 255]], dtype=np.uint8), [[0, 1]]),
        (np.array([[-1.0, 3.0, 1.0]]), [[0, 1, 0.5]]),
        (np.array([[7.0, 7.0]]), [[0, 0]]),
        (np.array([[np.nan, 1.0]]), [[0, 1]]),
    ],
)
def test_images_of_every_kind(image: np.ndarray, expected: Any) -> None:
    np.testing.assert_array_equal(image_of([image], 0), expected)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: plot_memory_map(some_scores()), "memory_map"),  # type: ignore[arg-type]
    (lambda: plot_memory_map(some_map(), images=IMAGES[:1]), "one image per example"),
    (lambda: plot_memory_map(some_map(), labels=["a"]), "labels do not cover"),
    (lambda: plot_memory_map(some_map(), ax=3), "matplotlib Axes"),  # type: ignore[arg-type]
    (lambda: plot_deviations(SimpleNamespace(deviation=[np.inf])), "not finite"),
    (lambda: plot_deviations(3.0), "a deviation or self_influence, got float"),
    (lambda: plot_leave_one_out([1, 2], [1, 2, 3]), "test_values holds 3 values for 2"),
    (lambda: plot_leave_one_out([1, 2], [1, 2], labels=[1]), "labels holds 1 values for 2"),
    (lambda: plot_leave_one_out([np.nan] * 2, [np.nan] * 2), "finite"),
    (lambda: plot_what_if(each_table(), measure="loss"), "measure must be"),
    (lambda: plot_what_if(each_table(), truth={9: 0.1}), r"not analysed: \[9\]"),
    (lambda: plot_what_if(pd.DataFrame({"group": [1]})), "nll_before"),
    (lambda: plot_what_if(each_table(nll_after=np.inf)), "not a finite"),
    *((lambda x=x: image_of([x], 0), "is no image") for x in (np.zeros(7), np.array(["a"]), 3.0)),
    (lambda: image_of([np.zeros((2, 2, 2, 2))], 0), "is no image"),
    (lambda: plot_examples(IMAGES, []), "no indices"),
    (lambda: plot_examples(IMAGES, [1, 2], ["a"]), "1 titles for 2"),
    (lambda: plot_examples(IMAGES, [500]), "does not exist"),
]


@pytest.mark.parametrize(("draw", "message"), BAD)
def test_bad_input_is_named(draw: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw()

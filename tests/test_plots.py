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
from matplotlib.collections import PathCollection
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
from blr_analysis.posterior import Posterior, fit_laplace
from blr_analysis.sensitivity import sensitivity, what_if
from blr_analysis.task import Task
from blr_analysis.views import make_plot


def scores_of(error: Any, variance: Any) -> SimpleNamespace:
    e = torch.as_tensor(np.asarray(error, dtype=np.float64)).reshape(-1, 1)
    v = torch.as_tensor(np.asarray(variance, dtype=np.float64)).reshape(-1, 1, 1)
    return SimpleNamespace(
        error=e,
        variance=v,
        self_influence=(e * e * v[:, :, 0])[:, 0],
        deviation=(e.abs() * v[:, :, 0])[:, 0],
        likelihood=SimpleNamespace(is_classification=False),
    )


def some_scores(n: int = 200, spread: float = 2.0, seed: int = 0) -> SimpleNamespace:
    generator = np.random.default_rng(seed)
    return scores_of(*np.exp(spread * generator.normal(size=(2, n))))


def some_map(n: int = 200, **options: Any) -> MemoryMap:
    return memory_map(some_scores(n), **options)


def each_table(n: int = 4) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "group": range(n),
            "nll_before": 0.1,
            "nll_after": 0.2 + np.arange(n) / 10,
            "accuracy_before": 0.9,
            "accuracy_after": 0.8 - np.arange(n) / 100,
        }
    )


def one_what_if(classes: bool = True) -> SimpleNamespace:
    table = each_table(3).rename(columns={"group": "class"})
    return SimpleNamespace(
        nll=0.5,
        accuracy=0.75 if classes else None,
        before=SimpleNamespace(nll=0.25, accuracy=0.9 if classes else None),
        by_class=table,
    )


def small_model() -> tuple[Task, Posterior]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 2, generator=generator), torch.arange(40) % 3
    task = Task(torch.nn.Linear(2, 3), (x, y))
    return task, fit_laplace(task, structure="full", prior_precision=1.0)


IMAGES = np.random.default_rng(3).random((200, 8, 8))
EVERY: dict[str, Callable[..., Axes]] = {
    "memory map": lambda ax=None: plot_memory_map(some_map(), ax),
    "memory map of images": lambda ax=None: plot_memory_map(some_map(), ax, images=IMAGES),
    "memory map of a crowd": lambda ax=None: plot_memory_map(some_map(4000), ax),
    "deviations": lambda ax=None: plot_deviations(some_scores(), ax),
    "leave-one-out": lambda ax=None: plot_leave_one_out([3, 2, 1], [3, 2, 2], ax),
    "leave-one-out bars": lambda ax=None: plot_leave_one_out(0.3, 0.4, ax),
    "what-if": lambda ax=None: plot_what_if(one_what_if(), ax),
    "what-if each": lambda ax=None: plot_what_if(each_table(), ax, truth={1: 0.3}),
    "examples": lambda ax=None: plot_examples(IMAGES, [4, 2], ax=ax),
}


def xs_of(line: Any) -> list[float]:
    return list(line.get_xdata())


def ys_of(line: Any) -> list[float]:
    return list(line.get_ydata())


@pytest.mark.parametrize("name", EVERY)
def test_without_axes_a_figure_that_can_be_saved_and_no_trace_is_left(
    name: str, recwarn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    before, target = matplotlib.rcParams.copy(), BytesIO()
    EVERY[name]().figure.savefig(target, format="png", dpi=50)
    assert target.getvalue().startswith(b"\x89PNG")
    assert not list(recwarn)  # no glyph is missing, nothing collapses
    assert "matplotlib.pyplot" not in sys.modules
    assert matplotlib.rcParams.copy() == before


@pytest.mark.parametrize("name", EVERY)
def test_the_axes_given_are_the_axes_drawn_on(name: str) -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert EVERY[name](ax=right) is right
    assert right.get_children() != []
    assert not left.lines
    assert not left.collections
    assert not left.texts


# ── memory map ──────────────────────────────────────────────────────────────────────────────


def boxes_of(ax: Axes) -> list[AnnotationBbox]:
    return [artist for artist in ax.artists if isinstance(artist, AnnotationBbox)]


def text_of(box: AnnotationBbox) -> str:
    (area,) = box.findobj(TextArea)
    return area.get_text()  # type: ignore[union-attr]


def test_every_example_is_drawn_once_in_its_region() -> None:
    memory = some_map()
    groups = {c.get_label(): c for c in plot_memory_map(memory).collections}
    for region in REGIONS:
        here = memory.region == region
        expected = np.column_stack([memory.variance[here], memory.error[here]])
        np.testing.assert_array_equal(groups[region].get_offsets(), expected)
    markers = {str(groups[r].get_paths()[0].vertices) for r in REGIONS}
    assert len(markers) == 4


@pytest.mark.parametrize(("spread", "scale"), [(2.0, "symlog"), (0.2, "linear")])
def test_axes_are_logarithmic_where_the_data_ask_for_it(spread: float, scale: str) -> None:
    ax = plot_memory_map(memory_map(some_scores(spread=spread)))
    assert (ax.get_xscale(), ax.get_yscale()) == (scale, scale)


ugly = st.lists(
    st.tuples(*[st.sampled_from([0.0, 1e-300, 1e-9, 1e-4, 0.5, 1.0, 1.5, 1e4, 1e30])] * 2),
    min_size=1,
    max_size=30,
)


@settings(max_examples=10, deadline=None)
@given(ugly, st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_every_point_is_seen_on_its_side_of_the_thresholds(
    pairs: list[tuple[float, float]], quantile: float
) -> None:
    memory = memory_map(scores_of(*np.transpose(pairs)), quantile=quantile)
    ax = plot_memory_map(memory, n_extremes=0)
    line_x, line_y = xs_of(ax.lines[0])[0], ys_of(ax.lines[1])[0]
    for code, region in enumerate(REGIONS):
        (points,) = [c for c in ax.collections if c.get_label() == region]
        for x, y in np.asarray(points.get_offsets()):
            assert (x > line_x) == bool(code % 2)
            assert (y > line_y) == bool(code >= 2)
            assert ax.get_xlim()[0] < x < ax.get_xlim()[1]
            assert ax.get_ylim()[0] < y < ax.get_ylim()[1]


def test_extremes_are_the_largest_products_and_never_regular() -> None:
    memory = some_map(n=1000)
    product = (memory.error * memory.variance).tolist()
    memorable = [i for i in range(1000) if memory.region[i] == "memorable"]
    best = sorted(memorable, key=lambda i: -product[i])
    assert len(best) > 5
    assert extremes(memory, 5) == best[:5]
    others = [i for i in range(1000) if memory.region[i] in ("uncertain", "unpredictable")]
    expected = best + sorted(others, key=lambda i: -product[i])
    assert extremes(memory, 2000) == expected
    assert extremes(memory, 0) == []


def test_extremes_are_labelled_where_they_are() -> None:
    memory = some_map()
    names = [f"name{i}" for i in range(200)]
    ax = plot_memory_map(memory, labels=names, n_extremes=6)
    boxes = boxes_of(ax)
    heights = [float(memory.error[i]) for i in extremes(memory, 6)]
    order = [extremes(memory, 6)[k] for k in np.argsort(-np.array(heights))]
    assert [text_of(box) for box in boxes] == [f"{i}: name{i}" for i in order]
    for box, i in zip(boxes, order, strict=True):
        assert tuple(box.xy) == (float(memory.variance[i]), float(memory.error[i]))
    ax.figure.draw_without_rendering()
    ends = [box.offsetbox.get_window_extent() for box in boxes]
    assert all(above.y0 > below.y1 for above, below in itertools.pairwise(ends))
    (rings,) = [c for c in ax.collections if c.get_label() == "extremes"]
    assert isinstance(rings, PathCollection)
    assert len(np.asarray(rings.get_offsets())) == 6


@pytest.mark.parametrize("kind", ["array", "tensor", "dataset"])
def test_the_images_at_the_extremes_are_theirs(kind: str) -> None:
    images: Any = {
        "array": IMAGES,
        "tensor": torch.from_numpy(IMAGES).unsqueeze(1),
        "dataset": [(torch.from_numpy(image), 0) for image in IMAGES],
    }[kind]
    memory = some_map()
    boxes = boxes_of(plot_memory_map(memory, images=images, n_extremes=5))
    assert {text_of(box) for box in boxes} == {*map(str, extremes(memory, 5))}
    for box in boxes:
        (shown,) = box.findobj(OffsetImage)
        np.testing.assert_array_equal(shown.get_data(), IMAGES[int(text_of(box))])


@pytest.mark.parametrize(("n", "value"), [(1, 0.3), (40, 1.0), (40, 0.0)])
def test_a_map_of_one_place(n: int, value: float) -> None:
    memory = memory_map(scores_of([value] * n, [value] * n))
    ax = plot_memory_map(memory)
    assert (ax.get_xscale(), ax.get_yscale()) == ("linear", "linear")
    assert ax.get_title() == f"Memory map of {n} example{'s' * (n > 1)}"
    assert boxes_of(ax) == []


def test_scores_and_what_ifs_are_drawn_by_their_makers() -> None:
    task, posterior = small_model()
    scores = sensitivity(task, posterior)
    top = sorted(range(40), key=lambda i: -scores.deviation[i])[:3]  # type: ignore[index]
    assert [text_of(box) for box in boxes_of(make_plot(scores, n_labels=3))] == list(map(str, top))
    result = what_if(task, posterior, remove=[0, 1], solver="posterior")
    ax = make_plot(result)
    assert names_of(ax) == ["all", "0", "1", "2"]
    assert heights_of(ax)["before"][0] == result.before.nll
    assert heights_of(ax)["after, predicted"][0] == result.nll


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: plot_memory_map(some_map(), images=IMAGES[:1]), "one image per example"),
    (lambda: plot_memory_map(some_map(), labels=["a"]), "labels do not cover"),
    (lambda: plot_deviations(SimpleNamespace(deviation=[np.inf])), "not finite"),
    (lambda: plot_deviations(SimpleNamespace(deviation=[])), "of examples"),
    (lambda: plot_deviations(3.0), "got float"),
    (lambda: plot_leave_one_out([1, 2], [1, 2, 3]), "test_values holds 3 values for 2"),
    (lambda: plot_leave_one_out([1, 2], [1, 2], labels=[1]), "labels holds 1 values for 2"),
    (lambda: plot_leave_one_out([np.nan] * 2, [np.nan] * 2), "finite"),
    (lambda: plot_what_if(each_table(), measure="loss"), "measure must be"),
    (lambda: plot_what_if(each_table(), truth={9: 0.1}), r"not analysed: \[9\]"),
    (lambda: plot_what_if(pd.DataFrame({"group": [1]})), "nll_before"),
    (lambda: plot_what_if(each_table().assign(nll_after=np.inf)), "no finite|not a finite"),
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


# ── deviations ──────────────────────────────────────────────────────────────────────────────


def test_deviations_fall_and_the_largest_are_labelled() -> None:
    scores = some_scores(200)
    scores.deviation = scores.deviation.clamp(min=0.01)
    ax = plot_deviations(scores, n_labels=4)
    expected = sorted(scores.deviation.tolist(), reverse=True)
    assert ys_of(ax.lines[0]) == expected
    assert xs_of(ax.lines[0]) == list(range(1, 201))
    top = sorted(range(200), key=lambda i: -scores.deviation[i])[:4]
    assert [text_of(box) for box in boxes_of(ax)] == [str(i) for i in top]
    assert [box.xy for box in boxes_of(ax)] == [(k + 1.0, expected[k]) for k in range(4)]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "symlog")


def test_deviations_of_few_examples_and_their_names() -> None:
    scores = SimpleNamespace(deviation=[0.2, 0.5, 0.3])
    ax = plot_deviations(scores, n_labels=2, labels={1: "cat", 2: "dog"})
    assert [text_of(box) for box in boxes_of(ax)] == ["1: cat", "2: dog"]
    assert (ax.get_xscale(), ax.get_yscale()) == ("linear", "linear")


@pytest.mark.parametrize("missing", [None, torch.full((200,), float("nan"))])
def test_self_influence_where_there_is_no_deviation(missing: Any) -> None:
    scores = some_scores(spread=1.0)
    scores.deviation = missing
    ax = plot_deviations(scores)
    assert "self-influence" in ax.get_ylabel()
    expected = sorted(scores.self_influence.tolist(), reverse=True)
    assert ys_of(ax.lines[0]) == expected


# ── leave-one-out against test ──────────────────────────────────────────────────────────────


def test_a_pair_of_bars_for_each() -> None:
    ax = plot_leave_one_out([3.0, 2.0, 1.0], torch.tensor([3.5, 2.5, 2.0]), labels="abc")
    expected = {"leave-one-out, from training data": [3.0, 2.0, 1.0], "test data": [3.5, 2.5, 2.0]}
    assert heights_of(ax) == expected
    assert names_of(ax) == ["a", "b", "c"]
    assert "worse" in ax.get_ylabel()


# ── what if ─────────────────────────────────────────────────────────────────────────────────


def heights_of(ax: Axes) -> dict[str, list[float]]:
    return {str(c.get_label()): [bar.get_height() for bar in c] for c in ax.containers}  # type: ignore[attr-defined]


def names_of(ax: Axes) -> list[str]:
    return [tick.get_text() for tick in ax.get_xticklabels()]


@pytest.mark.parametrize("measure", ["nll", "accuracy"])
def test_bars_before_and_after_each_group(measure: str) -> None:
    table = each_table()
    ax = plot_what_if(table, measure=measure)
    assert heights_of(ax) == {
        "before": table[f"{measure}_before"].tolist(),
        "after, predicted": table[f"{measure}_after"].tolist(),
    }
    assert names_of(ax) == ["0", "1", "2", "3"]
    assert ("worse" if measure == "nll" else "better") in ax.get_ylabel()


def test_one_what_if_shows_the_whole_and_its_classes() -> None:
    ax = plot_what_if(one_what_if(), truth={"all": 0.6})
    assert names_of(ax) == ["all", "0", "1", "2"]
    assert heights_of(ax)["before"] == [0.25, 0.1, 0.1, 0.1]
    assert heights_of(ax)["after, predicted"] == pytest.approx([0.5, 0.2, 0.3, 0.4])
    assert ys_of(ax.lines[0]) == [0.6]


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ({1: 0.5, 3: 0.7}, {1: 0.5, 3: 0.7}),
        ({0: 0.1, 1: 0.2, 2: float("nan"), 3: 0.4}, {0: 0.1, 1: 0.2, 3: 0.4}),
    ],
)
def test_truth_stands_over_the_bar_it_judges(truth: Any, expected: dict[int, float]) -> None:
    ax = plot_what_if(each_table(), truth=truth)
    (diamonds,) = ax.lines
    assert ys_of(diamonds) == list(expected.values())
    after = ax.containers[1]
    middles = [after[k].get_x() + after[k].get_width() / 2 for k in expected]  # type: ignore[index]
    assert xs_of(diamonds) == pytest.approx(middles)
    legend = ax.get_legend()
    assert legend is not None
    assert "after, retrained" in [t.get_text() for t in legend.get_texts()]


def test_the_likely_range_stands_over_the_bar() -> None:
    table = each_table(3).assign(nll_low=[0.1, np.nan, 0.3], nll_high=[0.4, np.nan, 0.5])
    ax = plot_what_if(table)
    (lines,) = ax.collections
    drawn = [path.vertices[:, 1].tolist() for path in lines.get_paths()]
    assert drawn[0] == [0.1, 0.4] and drawn[2] == [0.3, 0.5]
    assert not plot_what_if(table, measure="accuracy").collections


def test_of_many_groups_those_that_change_most() -> None:
    generator = np.random.default_rng(0)
    table = each_table(50).assign(nll_after=0.1 + generator.normal(size=50))
    ax = plot_what_if(table)
    change = (table["nll_after"] - table["nll_before"]).abs().tolist()
    most = sorted(sorted(range(50), key=lambda k: -change[k])[:20])
    assert names_of(ax) == [str(k) for k in most]
    assert heights_of(ax)["after, predicted"] == table["nll_after"][most].tolist()
    assert "20 of 50 groups" in ax.get_title()


# ── examples ────────────────────────────────────────────────────────────────────────────────


def test_examples_in_the_order_given() -> None:
    ax = plot_examples(IMAGES, torch.tensor([7, 3, 5]), columns=2)
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
        (np.array([[0, 128]], dtype=np.uint8), [[0, 128 / 255]]),
        (np.array([[-1.0, 3.0, 1.0]]), [[0, 1, 0.5]]),
        (np.array([[7.0, 7.0]]), [[0, 0]]),
        (np.array([[np.nan, 1.0]]), [[0, 1]]),
    ],
)
def test_images_of_every_kind(image: np.ndarray, expected: Any) -> None:
    np.testing.assert_array_equal(image_of([image], 0), expected)


def test_a_notebook_shows_a_picture_and_saves_it(tmp_path: Any) -> None:
    ax = memory_map(scores_of(np.arange(9.0), np.arange(9.0))).plot()
    assert ax._repr_png_().startswith(b"\x89PNG")
    ax.savefig(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_groups_can_be_named() -> None:
    assert names_of(plot_what_if(each_table(2), names=["cat", "dog"])) == ["cat", "dog"]
    assert names_of(plot_what_if(each_table(2), names={1: "dog"})) == ["0", "dog"]
    (long,) = names_of(plot_what_if(each_table(1), names=["a name of\n" + 40 * "x"]))
    assert long == "a name of " + 13 * "x" + "…"  # the bars keep their room

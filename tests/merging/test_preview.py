"""Merges over a range of weights: against single merges, and losses written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import mlp
from models_on_disk import State, copied, examples
from torch import Tensor
from torch.nn import functional as F

from blr_analysis.errors import DataError, InputError, ModelError, PosteriorError
from blr_analysis.merging import MergeCurve, MergePoint, merge, merge_curve
from blr_analysis.merging.methods import METHODS
from blr_analysis.posterior import Posterior
from blr_analysis.task import Task


class Setting:
    """A base, three fine-tuned models near it, precisions, and two validation tasks."""

    def __init__(self) -> None:
        self.model = mlp()
        self.base = copied(self.model)
        g = torch.Generator().manual_seed(1)

        def near(t: Tensor, spread: float = 1.0) -> Tensor:
            return t + spread * torch.randn(t.shape, generator=g, dtype=t.dtype)

        def curved() -> State:
            return {n: near(t, 0.5).abs() + 0.05 for n, t in self.base.items()}

        names = ("news", "books", "films")
        self.models = {k: {n: near(t) for n, t in self.base.items()} for k in names}
        self.precisions = {k: curved() for k in names}
        self.prior = curved()
        self.data = {"news": examples(2), "books": examples(3, 9)}
        self.tasks = {k: Task(self.model, d, batch_size=7) for k, d in self.data.items()}

    def scores(self, weights: State) -> dict[str, tuple[float, float]]:
        """The loss and the accuracy on each task, by plain torch."""
        model = mlp()
        model.load_state_dict(weights)
        actual = {}
        for name, (x, y) in self.data.items():
            f = model(x).detach()
            accuracy = float((f.argmax(1) == y).double().mean())
            actual[name] = (float(F.cross_entropy(f, y)), accuracy)
        return actual


S = Setting()
DOUBLE: dict[str, Any] = {"dtype": torch.float64, "progress": False}


@pytest.mark.parametrize("method", ["gradient_matching", "fisher", "task_arithmetic", "linear"])
def test_every_point_is_the_merge_run_by_hand(method: str) -> None:
    rows = [(0.2, 0.5, 1.0), (1.0, 1.0, 1.0), (0.3, 0.3, 0.4), (1.2, -0.1, 0.4)]
    before = copied(S.model)
    curved: dict[str, Any] = {"precisions": S.precisions, "base_precision": S.prior}
    options: dict[str, Any] = {"method": method, **DOUBLE}
    if method == "gradient_matching":
        options["delta"] = 0.1
    curve = merge_curve(S.base, S.models, S.tasks, weights=rows, **curved, **options)
    assert curve.models == ("news", "books", "films")
    assert curve.tasks == ("news", "books")
    assert [p.weights for p in curve.points] == rows
    assert curve.methods == (method,)
    if METHODS[method].takes("precisions"):
        options["precisions"] = list(S.precisions.values())
    if METHODS[method].takes("base_precision"):
        options["base_precision"] = S.prior
    table = curve.table
    models = list(S.models.values())
    for (_, row), weights in zip(table.iterrows(), rows, strict=True):
        scores = S.scores(merge(S.base, models, weights=weights, **options))
        for k, (nll, accuracy) in scores.items():
            assert row[f"nll_{k}"] == pytest.approx(nll, rel=1e-9)
            assert row[f"accuracy_{k}"] == pytest.approx(accuracy)
        assert row["nll"] == pytest.approx(sum(s[0] for s in scores.values()) / 2, rel=1e-9)
        assert row["accuracy"] == pytest.approx(sum(s[1] for s in scores.values()) / 2)
        assert [row[f"weight_{k}"] for k in curve.models] == list(weights)
        assert row["method"] == method
        assert row["failure"] == ""
    assert table["weight"].tolist()[1] == 1.0
    assert math.isnan(table["weight"][0])
    assert table["best"].sum() == 1
    assert table["nll"][table["best"]].item() == table["nll"].min()
    assert all(torch.equal(t, before[n]) for n, t in S.model.state_dict().items())


def test_one_weight_for_all_and_the_default_grid() -> None:
    curve = merge_curve(S.base, S.models, S.tasks, method="task_arithmetic", **DOUBLE)
    alphas = [p.weights[0] for p in curve.points]
    assert alphas == sorted({k / 10 for k in range(16)} | {1 / 3})
    assert curve.shape == "shared"
    assert all(len(set(p.weights)) == 1 for p in curve.points)
    curve_of_two = merge_curve(
        S.base, S.models, S.tasks, method="task_arithmetic", weights=[0.5, 0.0, 0.5], **DOUBLE
    )
    assert [p.weights for p in curve_of_two.points] == [(0.5,) * 3, (0.0,) * 3]
    nll = S.scores(S.base)
    assert curve_of_two.points[1].nlls == pytest.approx([s[0] for s in nll.values()], rel=1e-12)


def test_all_combinations_of_some_weights() -> None:
    axes = {"books": [0.0, 1.0], "films": [0.5], "news": torch.tensor([-1.0, 0.0, 2.0])}
    curve = merge_curve(
        S.base, S.models, S.tasks["news"], method="task_arithmetic", weights=axes, **DOUBLE
    )
    expected = [(a, b, 0.5) for a in (-1.0, 0.0, 2.0) for b in (0.0, 1.0)]
    assert [p.weights for p in curve.points] == expected
    assert curve.shape == "grid"
    assert curve.tasks == ("1",)
    assert list(curve.weights) == ["news", "books", "films"]


@pytest.mark.parametrize("method", ["linear", "fisher"])
def test_weights_that_sum_to_nothing_have_no_average(method: str) -> None:
    curve = merge_curve(
        S.base,
        S.models,
        S.tasks,
        method=method,
        weights=[[0.5, -0.5, 0], [1, 1, 1]],
        precisions=S.precisions,
        **DOUBLE,
    )
    assert [p.failure for p in curve.points] == ["the weights sum to 0", ""]
    assert curve.best.weights == (1.0, 1.0, 1.0)


def curve_of(*rows: tuple[tuple[float, ...], float, float]) -> MergeCurve:
    points = [MergePoint("m", w, (nll,), (accuracy,)) for w, nll, accuracy in rows]
    return MergeCurve(points, models=("a", "b"), tasks=("t",), shape="grid")


def test_the_rule_of_the_best() -> None:
    """The loss decides, then the accuracy, then the distance; a rounding error never does."""
    rows = [((1.0, 1.0), 0.5, 0.8), ((0.0, 1.0), 0.4, 0.7), ((-0.9, 0.9), 0.4, 0.75)]
    near = [((0.5, 0.5), 0.4, 0.75), ((0.9, 0.0), math.nan, 0.9)]
    assert curve_of(*rows, *near).best.weights == (0.5, 0.5)
    assert curve_of(*rows).best.weights == (-0.9, 0.9)
    assert curve_of(*rows[:2]).best.weights == (0.0, 1.0)
    almost_equal = curve_of(((1.0, 1.0), 0.5 - 1e-9, 0.8), ((0.1, 0.1), 0.5, 0.8))
    assert almost_equal.best.weights == (0.1, 0.1)
    with pytest.raises(InputError, match="method"):
        curve_of(*rows).best_of("other")


def test_several_methods_in_one_call() -> None:
    settings: dict[str, Any] = dict(precisions=list(S.precisions.values()), **DOUBLE)
    names = ["gradient_matching", "task_arithmetic", "linear"]
    curve = merge_curve(
        S.base, S.models, S.tasks, method=names, delta=0.2, weights=[0.0, 0.5, 1.0], **settings
    )
    assert list(curve.methods) == names
    assert len(curve) == 9
    alone = merge_curve(S.base, S.models, S.tasks, delta=0.2, weights=[0.0, 0.5, 1.0], **settings)
    assert [p.nlls for p in curve.points[:3]] == [p.nlls for p in alone.points]
    assert curve.best_of("gradient_matching").nll == alone.best.nll
    first = curve.points[6]  # of the average, with weights 0
    assert first.failure == "the weights sum to 0"
    assert math.isinf(first.nll)
    assert "best of 9: " in repr(curve)
    assert "1 could not be run" in repr(curve)
    assert curve.table["failure"][6] == first.failure


def test_a_merge_that_overflows_is_not_the_end() -> None:
    models = {k: {n: 1e300 * t for n, t in m.items()} for k, m in S.models.items()}
    settings: dict[str, Any] = {"method": "task_arithmetic", **DOUBLE}
    curve = merge_curve(S.base, models, S.tasks, weights=[0.0, 1e10], **settings)
    good, bad = curve.points
    assert good.failure == ""
    assert curve.best is good
    assert "does not fit" in bad.failure
    assert math.isinf(bad.nll)
    assert math.isnan(bad.accuracy)
    with pytest.raises(ModelError, match="none of the 1 merges"):
        merge_curve(S.base, models, S.tasks, weights=[1e10], **settings)


def test_posteriors_modules_and_other_dtypes() -> None:
    posteriors = {}
    for name, curved in S.precisions.items():
        whole = {n: h + 1.5 for n, h in curved.items()}
        posteriors[name] = Posterior(S.models[name], whole, prior_precision=1.5, n_data=5)
    settings: dict[str, Any] = dict(weights=[1.0], delta=0.1, **DOUBLE)
    plain = merge_curve(S.base, S.models, S.tasks, precisions=S.precisions, **settings)
    actual = merge_curve(S.model, S.models, S.tasks, precisions=posteriors, **settings)
    assert actual.best.nlls == pytest.approx(plain.best.nlls, rel=1e-10)
    single = {k: {n: t.float() for n, t in m.items()} for k, m in S.models.items()}
    base = {n: t.float() for n, t in S.base.items()}
    near = merge_curve(base, single, S.tasks, precisions=S.precisions, **settings)
    assert near.best.nlls == pytest.approx(plain.best.nlls, rel=1e-5)


NAN_STATE = {n: t * math.nan for n, t in S.base.items()}
OTHER = {"films": S.models["films"], "news": S.models["news"], "books": {"w": torch.ones(2)}}
X, Y = examples(5)
BROKEN = Task(S.model, (X, torch.where(torch.arange(17) == 15, 7, Y)), batch_size=4)


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"weights": []}, InputError, "at least one"),
        ({"weights": [math.nan]}, InputError, "finite"),
        ({"weights": [[1.0, 2.0]]}, InputError, "one number for each of 3 models"),
        ({"weights": {"news": [1]}}, InputError, "weights are of"),
        ({"weights": {"news": [1], "books": [], "films": [1]}}, InputError, "at least one"),
        ({"method": "mean"}, InputError, "method must be one of"),
        ({"method": ["linear", "linear"]}, InputError, "each once"),
        ({"method": "gradient_matching"}, PosteriorError, "is missing"),
        ({"delta": 0.2}, InputError, "delta= has no effect"),
        ({"precisions": [{}]}, InputError, "one for each of 3"),
        ({"out": "folder"}, InputError, "takes no 'out'"),
        ({"tasks": S.model}, InputError, "tasks must be a list"),
        ({"models": [NAN_STATE], "weights": [1.0]}, ModelError, "NaN or inf"),
        ({"models": [{"w": torch.ones(1)}]}, ModelError, "not the same model"),
        ({"models": OTHER, "weights": [1.0]}, ModelError, "not the same model"),
        ({"base": {"w": torch.ones(1)}}, InputError, "belongs to another model"),
        ({"tasks": BROKEN, "weights": [1.0]}, DataError, "0 … 2"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], word: str) -> None:
    arguments = {"base": S.base, "models": S.models, "tasks": S.tasks, "method": "task_arithmetic"}
    arguments |= {**DOUBLE, **changes}
    with pytest.raises(error, match=word):
        merge_curve(**arguments)

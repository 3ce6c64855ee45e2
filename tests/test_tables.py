"""What tables show of results, column by column, and what files keep of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import mlp
from parts import normal

import blr_analysis as blr
from blr_analysis.errors import InputError, StorageError
from blr_analysis.memory_map import REGIONS
from blr_analysis.tables import TABLES, write_table
from blr_analysis.views import GroupRows, Plottable, Tabular

SCORES = ["index", "target", "prediction", "loss", "error", "variance", "deviation"]
SCORES += ["self_influence", "leverage"]
N = 20
Y = torch.arange(N) % 3
BY: dict[str, Any] = {
    "source": ["a", "b"] * (N // 2),
    "loss": range(N),
    "loss_metadata": range(N),
    "region": ["x"] * N,
    "weight": torch.arange(N),
    "each": [torch.tensor(k) for k in range(N)],
    "box": np.arange(2 * N).reshape(N, 2),
}
TASK = blr.Task(mlp(), (normal(N, 4), Y), metadata=BY)
Q = blr.fit_laplace(TASK, structure="full", prior_precision=1.0)
SEEN = blr.sensitivity(TASK, Q)


def test_scores_column_by_column() -> None:
    table = SEEN.table
    assert list(table.columns[: len(SCORES)]) == SCORES
    assert table["index"].tolist() == list(range(N))
    named = {"target": "targets", "prediction": "predictions", "loss": "losses"}
    for name in ("target", "prediction", "loss", "deviation", "self_influence", "leverage"):
        assert table[name].tolist() == getattr(SEEN, named.get(name, name)).tolist()
    error, variance = SEEN.error.numpy(), SEEN.variance.numpy()
    np.testing.assert_allclose(table["error"], np.sqrt((error**2).sum(1)), rtol=1e-14)
    np.testing.assert_allclose(table["variance"], [np.trace(v) for v in variance], rtol=1e-14)
    assert table["target"].tolist() == Y.tolist()


def test_metadata_follow_and_give_way_to_our_names() -> None:
    table = SEEN.table
    names = ["source", "loss_metadata", "loss_metadata_metadata", "region", "weight", "each", "box"]
    assert list(table.columns)[len(SCORES) :] == names
    for name in names[1:6]:
        assert table[name].tolist() == (["x"] * N if name == "region" else list(range(N)))
    assert table["box"].tolist() == [[2 * k, 2 * k + 1] for k in range(N)]


def test_what_was_not_computed_is_nan_and_half_precision_is_read() -> None:
    losses = torch.arange(N).bfloat16()
    table = replace(SEEN, variance=None, deviation=None, losses=losses).table
    assert table[["variance", "deviation", "leverage"]].isna().to_numpy().all()
    assert table[["error", "self_influence"]].notna().to_numpy().all()
    assert table["loss"].dtype == np.float32 and table["loss"].tolist() == list(range(N))


def test_several_targets_per_example_take_several_columns() -> None:
    task = blr.Task(mlp(outputs=2), (normal(5, 4), normal(5, 2, seed=1)), likelihood="gaussian")
    scores = blr.sensitivity(task, blr.fit_laplace(task, structure="diag", prior_precision=1.0))
    names = ["index", "target_0", "target_1", "prediction_0", "prediction_1"]
    assert list(scores.table.columns)[:5] == names
    assert scores.table["target_1"].tolist() == scores.targets[:, 1].tolist()


def test_leave_one_out_column_by_column() -> None:
    loo = blr.leave_one_out(TASK, Q)
    table = loo.table
    wanted = {
        "target": Y,
        "prediction": loo.predictions,
        "prediction_before": loo.predictions_before,
        "loss": loo.losses,
        "loss_before": SEEN.losses,
        "deviation": loo.deviation,
        "leverage": loo.leverage,
    }
    assert list(table.columns)[:9] == ["index", *wanted, "correction"]
    for column, values in wanted.items():
        assert table[column].tolist() == values.tolist()
    assert table["correction"].tolist() == loo.correction
    assert table["loss"].mean() == pytest.approx(loo.nll, rel=1e-6)
    assert (table["prediction"] == Y.numpy()).mean() == pytest.approx(loo.accuracy)


def test_memory_map_adds_the_region_and_the_variance_it_was_drawn_with() -> None:
    for scores in (SEEN, replace(SEEN, variance=None)):
        memory = blr.memory_map(scores, quantile=0.5)
        table = memory.table
        assert list(table.columns)[: len(SCORES) + 2] == [*SCORES, "region", "source"]
        assert table["region"].tolist() == memory.region.tolist()
        assert list(table["region"].cat.categories) == list(REGIONS)
        assert table["region_metadata"].tolist() == ["x"] * N == scores.table["region"].tolist()
        assert table["variance"].tolist() == memory.variance.tolist()


def by_class(targets: Any, *parts: tuple[Any, Any]) -> pd.DataFrame:
    before, after = (SimpleNamespace(losses=losses, correct=right) for losses, right in parts)
    return TABLES["ByClass"](SimpleNamespace(targets=targets, before=before, after=after))


def test_classes_before_and_after() -> None:
    generator = np.random.default_rng(0)
    targets = generator.choice([0, 3, 7], 50)
    losses, right = generator.random((2, 50)), generator.random((2, 50)) < 0.6
    table = by_class(targets, *zip(losses, right, strict=True))
    names = ["class", "n", "nll_before", "nll_after", "accuracy_before", "accuracy_after"]
    assert list(table.columns) == names and table["class"].tolist() == [0, 3, 7]
    for row in table.to_dict("records"):
        here = targets == row["class"]
        assert row["n"] == here.sum()
        for k, when in enumerate(("before", "after")):
            assert row[f"nll_{when}"] == pytest.approx(losses[k][here].mean(), rel=1e-12)
            assert row[f"accuracy_{when}"] == pytest.approx(right[k][here].mean(), rel=1e-12)
    result = blr.what_if(TASK, Q, remove=[0, 1], solver="posterior")
    found = result.by_class
    for when, value in (("before", result.before), ("after", result)):
        assert (found[f"nll_{when}"] * found["n"]).sum() / N == pytest.approx(value.nll)
        assert (found[f"accuracy_{when}"] * found["n"]).sum() / N == pytest.approx(value.accuracy)


def test_classes_of_float_targets_without_accuracy_and_what_is_no_class() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0])
    table = by_class(torch.tensor([[1.0], [0.0], [1.0]]), *[(losses, None)] * 2)
    assert table["class"].tolist() == [0, 1] and table["nll_before"].tolist() == [2.0, 2.0]
    assert table["accuracy_before"].isna().to_numpy().all()
    assert by_class(Y[:3], (losses, losses > 0), (-losses, losses > 0))["nll_after"].max() == 0
    for targets in (torch.tensor([0.5, 1.0]), torch.zeros(2, 2)):
        with pytest.raises(InputError, match="whole-number target"):
            by_class(targets, *[(torch.zeros(2), None)] * 2)


def test_groups_taken_out() -> None:
    names = ["group", "nll_before", "nll_after", "accuracy_before", "accuracy_after", "seconds"]
    rows = [("b", 0.25, 0.5, 0.75, 0.5, 3), ("a", 0.25, 0.125, None, None, 1)]
    table = GroupRows([dict(zip(names, row, strict=True)) for row in rows]).table
    changes = [*names[:3], "nll_change", *names[3:5], "accuracy_change", "seconds"]
    assert list(table.columns) == changes and table["group"].tolist() == ["b", "a"]
    assert table["nll_change"].tolist() == [0.25, -0.125]
    np.testing.assert_array_equal(table["accuracy_change"], [-0.25, np.nan])
    each = blr.what_if_each(TASK, Q, by="source")
    assert each["group"].tolist() == ["a", "b"] and each["n"].tolist() == [N // 2] * 2


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    texts = ["1", "NA", "a,b", 'q"', "ü\n"] * 4
    task = blr.Task(mlp(), (normal(N, 4), Y), metadata={"text": texts, "flag": [True] * N})
    table = blr.memory_map(replace(blr.sensitivity(task, Q), deviation=None)).table
    csv, parquet = write_table(table, tmp_path / "new" / "folder", "scores")
    assert sorted(p.name for p in csv.parent.iterdir()) == ["scores.csv", "scores.parquet"]
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), table)
    from_csv = pd.read_csv(csv, engine="python", keep_default_na=False, na_values={"deviation": ""})
    assert list(from_csv.columns) == list(table.columns)
    for name in ("text", "region", "error"):
        assert from_csv[name].tolist() == table[name].tolist()
    assert from_csv["deviation"].isna().to_numpy().all()


def test_a_column_of_mixed_types_becomes_text(tmp_path: Path) -> None:
    table = pd.DataFrame({"index": [0, 1], "source": [3, "web"]})
    with pytest.warns(UserWarning, match="'source'.* mix types"):
        _, parquet = write_table(table, tmp_path, "scores")
    assert pd.read_parquet(parquet)["source"].tolist() == ["3", "web"]


def test_a_failed_write_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = pd.DataFrame({"a": [1]})
    csv, parquet = write_table(old, tmp_path, "t")

    def fail(self: pd.DataFrame, path: str, **_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", fail)
    with pytest.raises(StorageError, match="No space left on device"):
        write_table(old + 1, tmp_path, "t")
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.csv", "t.parquet"]
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), old)
    pd.testing.assert_frame_equal(pd.read_csv(csv), old)
    with pytest.raises(StorageError, match="cannot write"):
        write_table(old, csv / "folder", "t")


class Stranger(Tabular, Plottable):
    """A result that no table is known for."""


def test_a_result_without_a_maker_is_shown_as_text_in_a_notebook() -> None:
    for show in (lambda: Stranger().table, lambda: Stranger().plot()):
        with pytest.raises(InputError, match="a Stranger has no table or picture"):
            show()
    assert Stranger()._repr_html_() is Stranger()._repr_png_() is None


# The map itself


def scores_of(error: Any, variance: Any) -> SimpleNamespace:
    """Scores with C = 1 and given |e| and V."""
    e = torch.as_tensor(error, dtype=torch.float64).reshape(-1, 1)
    v = torch.as_tensor(variance, dtype=torch.float64).reshape(-1, 1, 1)
    return SimpleNamespace(error=e, variance=v, self_influence=(e * e * v[:, :, 0])[:, 0])


def test_size_of_error_and_variance_in_many_dimensions() -> None:
    generator = torch.Generator().manual_seed(0)
    error = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    root = torch.randn(40, 3, 3, generator=generator, dtype=torch.float64)
    variance = root @ root.mT
    influence = torch.einsum("nc,ncd,nd->n", error, variance, error)
    scores = SimpleNamespace(error=error, variance=variance, self_influence=influence)
    memory = blr.memory_map(scores)
    np.testing.assert_allclose(memory.error, np.sqrt((error.numpy() ** 2).sum(1)), rtol=1e-12)
    np.testing.assert_allclose(memory.variance, [v.trace() for v in variance], rtol=1e-12)
    scores.variance, scores.error[0], scores.self_influence[0] = None, 0.0, 0.0
    along = blr.memory_map(
        scores
    )  # without V, that along the error, which is 0 where there is none
    assert memory.variance_kind == "trace" and along.variance_kind == "along_error"
    units = error[1:] / error[1:].norm(dim=1, keepdim=True)
    wanted = torch.einsum("nc,ncd,nd->n", units, variance[1:], units)
    torch.testing.assert_close(along.variance, torch.cat([torch.zeros(1).double(), wanted]))
    assert "along the error" in repr(along) and "along" not in repr(memory)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=40),
    st.floats(0, 1),
)
def test_regions_against_sorting_one_by_one(
    pairs: list[tuple[float, float]], quantile: float
) -> None:
    error, variance = ([pair[k] for pair in pairs] for k in (0, 1))
    memory = blr.memory_map(scores_of(error, variance), quantile=quantile)
    assert memory.error_threshold == np.quantile(error, quantile)
    assert memory.variance_threshold == np.quantile(variance, quantile)
    names = (("regular", "uncertain"), ("unpredictable", "memorable"))
    for e, v, region in zip(error, variance, memory.region, strict=True):
        assert region == names[e > memory.error_threshold][v > memory.variance_threshold]
    assert list(memory.counts()) == list(REGIONS) and sum(memory.counts().values()) == len(pairs)


def test_memorable_are_sorted_by_error_times_variance() -> None:
    error, variance = [5.0, 0.0, 9.0, 6.0, 7.0, 0.1], [5.0, 9.0, 3.0, 6.0, 0.0, 0.1]
    memory = blr.memory_map(scores_of(error, variance), quantile=0.3)
    assert memory.memorable.tolist() == [3, 2, 0]  # 36, 27, 25
    assert memory.indices("uncertain").tolist() == [1]
    equal = blr.memory_map(scores_of([1e-300] * 7, [0.3] * 7))
    assert equal.counts()["regular"] == 7 and equal.memorable.tolist() == []
    rounded = blr.memory_map(scores_of([3e-30, 0.2], [1.0, -1e-9]))
    assert rounded.variance.tolist() == [1.0, 0.0] and rounded.error[0] == 3e-30


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: blr.memory_map(scores_of([0.1, float("nan")], [1.0, 1.0])), "finite"),
        (lambda: blr.memory_map(scores_of([0.1, 0.2], [float("inf"), 1.0])), "finite"),
        (lambda: blr.memory_map(scores_of([], [])), "one example or more"),
        (lambda: blr.memory_map(scores_of([0.1], [0.1]), quantile=-0.1), "quantile must be"),
        (
            lambda: blr.memory_map(scores_of([0.1], [0.1]), quantile=float("nan")),
            "quantile must be",
        ),
        (lambda: blr.memory_map(scores_of([0.1], [0.1]), quantile="0.9"), "quantile must be"),
        (lambda: blr.memory_map([1.0, 2.0]), "scores of a network"),
        (lambda: blr.memory_map(scores_of([0.1], [0.1])).indices("memorised"), "'memorable', got"),
    ],
)
def test_scores_that_are_not_mapped(call: Any, word: str) -> None:
    with pytest.raises(InputError, match=word):
        call()

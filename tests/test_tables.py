"""Tables of results, column by column, and the files that they are written to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from models import mlp, normal

import blr_analysis as blr
from blr_analysis.errors import InputError, StorageError
from blr_analysis.memory_map import REGIONS
from blr_analysis.tables import TABLES, write_table
from blr_analysis.views import Plottable, Tabular

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
SCORES_OF_TASK = blr.sensitivity(TASK, Q)


def columns_are(table: pd.DataFrame, source: Any, **fields: str) -> None:
    """Columns are these fields of a result."""
    for column, field in fields.items():
        assert table[column].tolist() == getattr(source, field).tolist()


def test_scores_column_by_column() -> None:
    table = SCORES_OF_TASK.table
    # metadata named as one of our columns gets another name
    metadata = ["source", "loss_metadata", "loss_metadata_metadata"]
    metadata += ["region", "weight", "each", "box"]
    assert list(table.columns) == SCORES + metadata
    columns_are(table, SCORES_OF_TASK, target="targets", prediction="predictions", loss="losses")
    columns_are(table, SCORES_OF_TASK, **{name: name for name in SCORES[-3:]})
    error = SCORES_OF_TASK.error.numpy()
    variance = SCORES_OF_TASK.variance.numpy()
    np.testing.assert_allclose(table["error"], np.sqrt((error**2).sum(1)), rtol=1e-14)
    np.testing.assert_allclose(table["variance"], [np.trace(v) for v in variance], rtol=1e-14)
    assert table["target"].tolist() == Y.tolist()
    assert table["region"].tolist() == ["x"] * N
    for name in ("index", "loss_metadata", "loss_metadata_metadata", "weight", "each"):
        assert table[name].tolist() == list(range(N))
    assert table["box"].tolist() == [[2 * k, 2 * k + 1] for k in range(N)]
    losses = torch.arange(N).bfloat16()
    table = replace(SCORES_OF_TASK, variance=None, deviation=None, losses=losses).table
    assert table[["variance", "deviation", "leverage"]].isna().to_numpy().all()
    assert table[["error", "self_influence"]].notna().to_numpy().all()
    assert table["loss"].dtype == np.float32
    assert table["loss"].tolist() == list(range(N))


def test_leave_one_out_column_by_column() -> None:
    loo = blr.leave_one_out(TASK, Q)
    table = loo.table
    names = {"prediction": "predictions", "prediction_before": "predictions_before"}
    names |= {"loss": "losses", "loss_before": "losses_before"}
    names |= {"deviation": "deviation", "leverage": "leverage"}
    assert list(table.columns)[:9] == ["index", "target", *names, "correction"]
    columns_are(table, loo, **names)
    assert table["target"].tolist() == Y.tolist()
    assert table["loss_before"].tolist() == SCORES_OF_TASK.losses.tolist()
    assert table["correction"].tolist() == loo.correction
    assert table["loss"].mean() == pytest.approx(loo.nll, rel=1e-6)
    assert (table["prediction"] == Y.numpy()).mean() == pytest.approx(loo.accuracy)


def test_memory_map_adds_the_region_and_the_variance_it_was_drawn_with() -> None:
    error = SCORES_OF_TASK.error.clone()
    influence = SCORES_OF_TASK.self_influence.clone()
    error[0] = 0.0
    influence[0] = 0.0
    without = replace(SCORES_OF_TASK, variance=None, error=error, self_influence=influence)
    trace = blr.memory_map(SCORES_OF_TASK, quantile=0.5)
    along = blr.memory_map(without, quantile=0.5)
    for scores, memory in ((SCORES_OF_TASK, trace), (without, along)):
        table = memory.table
        assert list(table.columns)[: len(SCORES) + 2] == [*SCORES, "region", "source"]
        assert list(table["region"].cat.categories) == list(REGIONS)
        assert table["region_metadata"].tolist() == ["x"] * N
        assert scores.table["region"].tolist() == ["x"] * N
        columns_are(table, memory, region="region", variance="variance")
        np.testing.assert_allclose(memory.error, scores.table["error"], rtol=1e-12)
    np.testing.assert_allclose(trace.variance, SCORES_OF_TASK.table["variance"], rtol=1e-12)
    units = torch.nn.functional.normalize(error)  # 0 where there is no error
    expected = torch.einsum("nc,ncd,nd->n", units, SCORES_OF_TASK.variance, units)
    torch.testing.assert_close(along.variance, expected)
    assert trace.variance_kind == "trace"
    assert along.variance_kind == "along_error"
    assert "along the error" in repr(along)
    assert "along" not in repr(trace)


def classes_of(targets: torch.Tensor) -> pd.DataFrame:
    losses = SimpleNamespace(losses=torch.arange(len(targets)), correct=None)
    return TABLES["ByClass"](SimpleNamespace(targets=targets, before=losses, after=losses))


def test_classes_before_and_after() -> None:
    result = blr.what_if(TASK, Q, remove=[0, 1], solver="posterior")
    table = result.by_class
    names = ["class", "n", "nll_before", "nll_after", "accuracy_before", "accuracy_after"]
    assert list(table.columns) == names
    assert table["class"].tolist() == [0, 1, 2]
    for row in table.to_dict("records"):
        in_class = row["class"] == Y
        assert row["n"] == in_class.sum()
        for when, part in (("before", result.before), ("after", result.after)):
            nll = float(part.losses[in_class].mean())
            assert row[f"nll_{when}"] == pytest.approx(nll, rel=1e-12)
            accuracy = part.correct[in_class].double().mean()
            assert row[f"accuracy_{when}"] == pytest.approx(float(accuracy), rel=1e-12)
    table = classes_of(torch.tensor([[7.0], [0.0], [7.0]]))
    assert table["class"].tolist() == [0, 7]
    assert table["nll_before"].tolist() == [1.0, 1.0]
    assert table["accuracy_before"].isna().to_numpy().all()


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


def test_a_failed_write_leaves_the_old_files(tmp_path: Path) -> None:
    old = pd.DataFrame({"a": [1]})
    csv, parquet = write_table(old, tmp_path, "t")
    with pytest.warns(match="mix types"), pytest.raises(pyarrow.ArrowException):
        write_table(old + 1j, tmp_path, "t")  # CSV takes complex numbers, Parquet does not
    with pytest.raises(StorageError, match="cannot write"):
        write_table(old, csv / "folder", "t")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.csv", "t.parquet"]
    for actual in (pd.read_csv(csv), pd.read_parquet(parquet)):
        pd.testing.assert_frame_equal(actual, old)


class Stranger(Tabular, Plottable):
    """A result that no table is known for: shown as text in a notebook."""


# The map itself


def scores_of(error: Any, variance: Any) -> SimpleNamespace:
    """Scores with C = 1 and given |e| and V."""
    e = torch.as_tensor(error, dtype=torch.float64).reshape(-1, 1)
    v = torch.as_tensor(variance, dtype=torch.float64).reshape(-1, 1, 1)
    return SimpleNamespace(error=e, variance=v, self_influence=(e * e * v[:, :, 0])[:, 0])


def test_regions_are_split_at_the_quantiles_and_the_memorable_sorted() -> None:
    error = [5.0, 0.0, 9.0, 6.0, 7.0, 0.1]
    variance = [5.0, 9.0, 3.0, 6.0, 0.0, 0.1]
    memory = blr.memory_map(scores_of(error, variance), quantile=0.3)
    assert memory.error_threshold == np.quantile(error, 0.3)
    assert memory.variance_threshold == np.quantile(variance, 0.3)
    actual = [REGIONS.index(region) for region in memory.region]
    assert actual == [3, 1, 3, 3, 2, 0]
    assert list(memory.counts().values()) == [1, 1, 1, 3]
    assert list(memory.counts()) == ["regular", "uncertain", "unpredictable", "memorable"]
    assert memory.memorable.tolist() == [3, 2, 0]  # error times variance 36, 27, 25
    assert memory.indices("uncertain").tolist() == [1]
    equal = blr.memory_map(scores_of([1e-300] * 7, [0.3] * 7))
    assert equal.counts()["regular"] == 7
    assert equal.memorable.tolist() == []
    rounded = blr.memory_map(scores_of([3e-30, 0.2], [1.0, -1e-9]))
    assert rounded.variance.tolist() == [1.0, 0.0]
    assert rounded.error[0] == 3e-30


ONE = scores_of([0.1], [0.1])


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: blr.memory_map(scores_of([0.1, float("nan")], [1.0, 1.0])), "finite"),
        (lambda: blr.memory_map(scores_of([0.1, 0.2], [float("inf"), 1.0])), "finite"),
        (lambda: blr.memory_map(scores_of([], [])), "one example or more"),
        (lambda: blr.memory_map(ONE, quantile=float("nan")), "quantile must be"),
        (lambda: blr.memory_map([1.0, 2.0]), "prediction error and variance"),
        (lambda: blr.memory_map(ONE).indices("memorised"), "'memorable', got"),
        (lambda: classes_of(torch.tensor([0.5, 1.0])), "whole-number target"),
        (lambda: classes_of(torch.zeros(2, 2)), "whole-number target"),
        (lambda: Stranger().table, "a Stranger has no table or picture"),
        (lambda: Stranger().plot(), "a Stranger has no table or picture"),
    ],
)
def test_what_is_not_shown(call: Any, word: str) -> None:
    with pytest.raises(InputError, match=word):
        call()
    assert Stranger()._repr_html_() is None
    assert Stranger()._repr_png_() is None

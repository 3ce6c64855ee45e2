from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from blr_analysis.errors import BLRError, DataError, InputError, StorageError
from blr_analysis.memory_map import REGIONS, memory_map
from blr_analysis.posterior import fit_laplace
from blr_analysis.sensitivity import influence, leave_one_out, sensitivity, what_if, what_if_each
from blr_analysis.tables import (
    groups_table,
    leave_one_out_table,
    scores_table,
    what_if_table,
    write_table,
)
from blr_analysis.task import Task
from blr_analysis.views import GroupRows, Plottable, Tabular, make_table

SCORES = ["index", "target", "prediction", "loss", "error", "variance", "deviation"]
SCORES += ["self_influence", "leverage"]


@dataclass(frozen=True, eq=False)
class Scores(Tabular):
    """The attributes of scores, without the analysis."""

    error: Tensor
    variance: Tensor | None
    deviation: Tensor | None
    self_influence: Tensor
    leverage: Tensor | None
    targets: Tensor
    losses: Tensor
    predictions: Tensor
    metadata: dict[str, Any] = field(default_factory=dict)


make_table.register(Scores, scores_table)


def some_scores(n: int = 5, c: int = 3, **changes: Any) -> Scores:
    generator = torch.Generator().manual_seed(0)
    error = torch.randn(n, c, generator=generator)
    root = torch.randn(n, c, c, generator=generator)
    values: dict[str, Any] = {
        "error": error,
        "variance": root @ root.mT,
        "deviation": torch.rand(n, generator=generator),
        "self_influence": torch.rand(n, generator=generator),
        "leverage": torch.rand(n, generator=generator),
        "targets": torch.randint(c, (n,), generator=generator),
        "losses": torch.rand(n, generator=generator),
        "predictions": torch.randint(c, (n,), generator=generator),
    }
    return Scores(**(values | changes))


def some_leave_one_out(n: int = 4, **changes: Any) -> SimpleNamespace:
    values = torch.rand(4, n, generator=torch.Generator().manual_seed(1))
    base: dict[str, Any] = {
        "targets": torch.tensor([0, 1, 2, 0]),
        "predictions": torch.tensor([0, 2, 2, 1]),
        "predictions_before": torch.tensor([0, 1, 2, 0]),
        "losses": values[0],
        "losses_before": values[1],
        "deviation": values[2],
        "leverage": values[3],
        "correction": ["cavity", "cavity", "first_order", "cavity"],
        "metadata": {},
    }
    return SimpleNamespace(**(base | changes))


def test_scores_column_by_column() -> None:
    scores = some_scores()
    table = scores.table
    assert list(table.columns) == SCORES
    assert table["index"].tolist() == [0, 1, 2, 3, 4]
    assert table["target"].tolist() == scores.targets.tolist()
    assert table["prediction"].tolist() == scores.predictions.tolist()
    assert table["loss"].tolist() == scores.losses.tolist()
    assert table["deviation"].tolist() == scores.deviation.tolist()  # type: ignore[union-attr]
    assert table["self_influence"].tolist() == scores.self_influence.tolist()
    assert table["leverage"].tolist() == scores.leverage.tolist()  # type: ignore[union-attr]
    error, variance = scores.error.double().numpy(), scores.variance.double().numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(table["error"], np.sqrt((error**2).sum(1)), rtol=1e-14)
    np.testing.assert_allclose(table["variance"], [np.trace(v) for v in variance], rtol=1e-14)


def test_what_was_not_computed_is_nan() -> None:
    table = some_scores(variance=None, deviation=None, leverage=None).table
    assert list(table.columns) == SCORES
    assert table[["variance", "deviation", "leverage"]].isna().to_numpy().all()
    assert table[["error", "self_influence", "loss"]].notna().to_numpy().all()


def test_several_targets_per_example_take_several_columns() -> None:
    targets = torch.arange(10.0).reshape(5, 2)
    table = some_scores(targets=targets, predictions=targets + 0.5).table
    assert list(table.columns)[:5] == ["index", "target_0", "target_1", "prediction_0",
                                       "prediction_1"]  # fmt: skip
    assert table["target_1"].tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert table["prediction_0"].tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]


def test_half_precision_becomes_float() -> None:
    table = some_scores(losses=torch.tensor([0.5, 1, 2, 3, 4], dtype=torch.bfloat16)).table
    assert table["loss"].dtype == np.float32
    assert table["loss"].tolist() == [0.5, 1, 2, 3, 4]


def test_metadata_follow_and_give_way_to_our_names() -> None:
    metadata = {
        "source": ["a", "b", "a", "b", "c"],
        "loss": [9, 8, 7, 6, 5],
        "loss_metadata": [1, 2, 3, 4, 5],
        "weight": torch.arange(5),
        "each": [torch.tensor(k) for k in range(5)],
        "box": np.arange(10).reshape(5, 2),
    }
    scores = some_scores(metadata=metadata)
    table = scores.table
    assert list(table.columns)[len(SCORES) :] == [
        "source", "loss_metadata", "loss_metadata_metadata", "weight", "each", "box"
    ]  # fmt: skip
    assert table["loss"].tolist() == scores.losses.tolist()
    assert table["loss_metadata"].tolist() == [9, 8, 7, 6, 5]
    assert table["loss_metadata_metadata"].tolist() == [1, 2, 3, 4, 5]
    assert table["weight"].tolist() == [0, 1, 2, 3, 4]
    assert table["each"].tolist() == [0, 1, 2, 3, 4]
    assert table["box"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_metadata_of_another_length() -> None:
    with pytest.raises(DataError, match="'source' holds 2 values for 5 examples"):
        _ = some_scores(metadata={"source": ["a", "b"]}).table


def test_leave_one_out_column_by_column() -> None:
    loo = some_leave_one_out(metadata={"source": list("abcd"), "correction": [1, 2, 3, 4]})
    table = leave_one_out_table(loo)
    assert list(table.columns) == [
        "index", "target", "prediction", "prediction_before", "loss", "loss_before",
        "deviation", "leverage", "correction", "source", "correction_metadata",
    ]  # fmt: skip
    for column, values in {
        "target": loo.targets,
        "prediction": loo.predictions,
        "prediction_before": loo.predictions_before,
        "loss": loo.losses,
        "loss_before": loo.losses_before,
        "deviation": loo.deviation,
        "leverage": loo.leverage,
    }.items():
        assert table[column].tolist() == values.tolist()
    assert table["correction"].tolist() == loo.correction
    assert table["source"].tolist() == list("abcd")


def test_memory_map_adds_the_region_to_the_scores() -> None:
    scores = some_scores(metadata={"region": list("abcde"), "source": list("vwxyz")})
    memory = memory_map(scores, quantile=0.5)
    table = memory.table
    assert list(table.columns) == [*SCORES, "region", "region_metadata", "source"]
    assert table["region"].tolist() == memory.region.tolist()
    assert list(table["region"].cat.categories) == list(REGIONS)
    assert table["region_metadata"].tolist() == list("abcde")
    assert list(scores.table.columns) == [*SCORES, "region", "source"]
    pd.testing.assert_frame_equal(table[SCORES], scores.table[SCORES])


def test_memory_map_shows_the_variance_it_was_drawn_with() -> None:
    scores = some_scores(variance=None)
    memory = memory_map(scores)
    assert memory.table["variance"].tolist() == memory.variance.tolist()
    assert memory.table["variance"].notna().to_numpy().all()
    assert scores.table["variance"].isna().to_numpy().all()


def result_of(targets: Any, *parts: tuple[Any, Any]) -> SimpleNamespace:
    """The attributes of a what-if that its table shows."""
    before, after = (SimpleNamespace(losses=losses, correct=right) for losses, right in parts)
    return SimpleNamespace(targets=targets, before=before, after=after)


def test_classes_before_and_after() -> None:
    generator = np.random.default_rng(0)
    targets = generator.choice([0, 3, 7], 50)
    before, after = generator.random((2, 50))
    right_before, right_after = generator.random((2, 50)) < 0.6
    table = what_if_table(result_of(targets, (before, right_before), (after, right_after)))
    assert list(table.columns) == [
        "class", "n", "nll_before", "nll_after", "accuracy_before", "accuracy_after"
    ]  # fmt: skip
    assert table["class"].tolist() == [0, 3, 7]
    for row, label in zip(table.to_dict("records"), (0, 3, 7), strict=True):
        here = [k for k in range(50) if targets[k] == label]
        assert row["n"] == len(here)
        assert row["nll_before"] == pytest.approx(sum(before[here]) / len(here), rel=1e-12)
        assert row["nll_after"] == pytest.approx(sum(after[here]) / len(here), rel=1e-12)
        assert row["accuracy_before"] == sum(right_before[here]) / len(here)
        assert row["accuracy_after"] == sum(right_after[here]) / len(here)


def test_classes_of_float_targets_and_without_accuracy() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0])
    targets = torch.tensor([[1.0], [0.0], [1.0]])
    table = what_if_table(result_of(targets, (losses, None), (losses, None)))
    assert table["class"].tolist() == [0, 1]
    assert table["nll_before"].tolist() == [2.0, 2.0]
    assert table["accuracy_before"].isna().to_numpy().all()


@pytest.mark.parametrize("targets", [torch.tensor([0.5, 1.0]), torch.zeros(2, 2)])
def test_what_is_no_class(targets: Tensor) -> None:
    with pytest.raises(InputError, match="whole-number target"):
        what_if_table(result_of(targets, *[(torch.zeros(2), None)] * 2))


def test_groups_taken_out() -> None:
    rows = [
        {"group": "b", "n": 10, "nll_before": 0.25, "nll_after": 0.5,
         "accuracy_before": 0.75, "accuracy_after": 0.5, "seconds": 3},
        {"group": "a", "n": 4, "nll_before": 0.25, "nll_after": 0.125,
         "accuracy_before": None, "accuracy_after": None, "seconds": 1},
    ]  # fmt: skip
    table = groups_table(GroupRows(rows))
    assert list(table.columns) == [
        "group", "n", "nll_before", "nll_after", "nll_change",
        "accuracy_before", "accuracy_after", "accuracy_change", "seconds",
    ]  # fmt: skip
    assert table["group"].tolist() == ["b", "a"]
    assert table["nll_change"].tolist() == [0.25, -0.125]
    np.testing.assert_array_equal(table["accuracy_change"], [-0.25, np.nan])
    pd.testing.assert_frame_equal(GroupRows(rows).table, table)


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    table = memory_map(
        some_scores(metadata={"text": ["1", "NA", "a,b", 'q"', "ü\n"], "flag": [True] * 5})
    ).table
    csv, parquet = write_table(table, tmp_path / "new" / "folder", "scores")
    assert (csv.name, parquet.name) == ("scores.csv", "scores.parquet")
    assert sorted(p.name for p in csv.parent.iterdir()) == ["scores.csv", "scores.parquet"]
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), table)
    from_csv = pd.read_csv(csv, engine="python", keep_default_na=False)
    assert list(from_csv.columns) == list(table.columns)
    assert from_csv["text"].tolist() == table["text"].tolist()
    assert from_csv["region"].tolist() == table["region"].tolist()
    assert from_csv["error"].tolist() == table["error"].tolist()


def test_missing_values_come_back_missing(tmp_path: Path) -> None:
    table = some_scores(variance=None).table
    csv, parquet = write_table(table, tmp_path, "scores")
    for read in (pd.read_csv(csv), pd.read_parquet(parquet)):
        assert read["variance"].isna().to_numpy().all()


def test_a_column_of_mixed_types_becomes_text(tmp_path: Path) -> None:
    table = pd.DataFrame({"index": [0, 1], "source": [3, "web"]})
    with pytest.warns(UserWarning, match="'source' mixes types"):
        _, parquet = write_table(table, tmp_path, "scores")
    assert pd.read_parquet(parquet)["source"].tolist() == ["3", "web"]
    assert table["source"].tolist() == [3, "web"]


def test_a_failed_write_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [2]})
    csv, parquet = write_table(old, tmp_path, "t")

    def fail(self: pd.DataFrame, path: str, **_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", fail)
    with pytest.raises(StorageError, match="No space left on device"):
        write_table(new, tmp_path, "t")
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.csv", "t.parquet"]
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), old)
    pd.testing.assert_frame_equal(pd.read_csv(csv), old)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write"):
        write_table(pd.DataFrame({"a": [1]}), tmp_path / "file" / "folder", "t")


@pytest.mark.parametrize("stem", ["", "a/b", "..", ".", "../t"])
def test_a_stem_that_is_a_path(tmp_path: Path, stem: str) -> None:
    with pytest.raises(InputError, match="stem"):
        write_table(pd.DataFrame({"a": [1]}), tmp_path, stem)


def test_what_the_analyses_return_has_these_tables() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 2, generator=generator), torch.arange(40) % 3
    source = ["left", "right"] * 20
    task = Task(torch.nn.Linear(2, 3), (x, y), metadata={"source": source})
    posterior = fit_laplace(task, structure="full", prior_precision=1.0)

    scores = sensitivity(task, posterior)
    assert list(scores.table.columns) == [*SCORES, "source"]
    assert scores.table["target"].tolist() == y.tolist()
    assert scores.table["source"].tolist() == source
    trace = torch.einsum("ncc->n", scores.variance.double())  # type: ignore[union-attr]
    np.testing.assert_allclose(scores.table["variance"], trace, rtol=1e-12)
    assert scores.table["leverage"].tolist() == scores.leverage.tolist()  # type: ignore[union-attr]
    assert list(memory_map(scores).table.columns) == [*SCORES, "region", "source"]

    loo = leave_one_out(task, posterior)
    assert loo.table["loss"].mean() == pytest.approx(loo.nll, rel=1e-6)
    assert (loo.table["prediction"] == y.numpy()).mean() == pytest.approx(loo.accuracy)
    assert loo.table["loss_before"].tolist() == scores.losses.tolist()
    assert set(loo.table["correction"]) <= {"cavity", "first_order"}

    result = what_if(task, posterior, remove=[0, 1])
    by_class = result.by_class
    assert by_class["n"].tolist() == [14, 13, 13]
    for when, value in (("before", result.before.nll), ("after", result.nll)):
        assert (by_class[f"nll_{when}"] * by_class["n"]).sum() / 40 == pytest.approx(value)
    for when, value in (("before", result.before.accuracy), ("after", result.accuracy)):
        assert (by_class[f"accuracy_{when}"] * by_class["n"]).sum() / 40 == pytest.approx(value)

    each = what_if_each(task, posterior, by="source")
    assert each["group"].tolist() == ["left", "right"]
    assert each["n"].tolist() == [20, 20]


class Stranger(Tabular, Plottable):
    """A result that nobody registered."""


def test_a_result_without_a_maker() -> None:
    with pytest.raises(InputError, match=r"no table is known for .*Stranger.*make_table"):
        _ = Stranger().table
    with pytest.raises(InputError, match=r"no picture is known for .*Stranger.*make_plot"):
        Stranger().plot()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'pandas'", name="pandas")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(BLRError, match=r"table needs .*pip install pandas"):
        _ = Stranger().table


def test_a_notebook_shows_a_line_and_the_first_rows() -> None:
    X, y = torch.randn(40, 2), torch.tensor([0, 1] * 20)
    task = Task(torch.nn.Linear(2, 2), (X, y), metadata={"note": ["<b>&"] * 40})
    posterior = fit_laplace(task, structure="kron", prior_precision=1.0)
    scores = sensitivity(task, posterior)
    shown = scores._repr_html_()
    assert shown is not None and "Scores(N=40" in shown and "40 rows" in shown
    assert shown.count("<tr") == 11 and "&lt;b&gt;&amp;" in shown and "<b>&" not in shown
    matrix = influence(task, posterior, task)
    assert "Influence(40 training × 40 test examples" in matrix._repr_html_()
    assert "tensor" not in repr(matrix)

"""Masks, indices and questions say which examples are meant."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from models import mlp

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.sensitivity.selection import Columns, groups_by, select
from blr_analysis.sensitivity.subjects import subject_of

N = 9


@pytest.fixture(scope="module")
def audit() -> tuple[blr.Task, blr.Posterior]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=g, dtype=torch.float64)
    y = torch.tensor([0, 1, 2] * 3)
    metadata = {
        "source": list("aabbccaab"),
        "flag": [0, 1, 0, 1, 1, 0, 0, 0, 0],
        "score": [0.5, float("nan"), 0.5, 1.5, float("nan"), 0.5, 0.5, 0.5, 0.5],
        "tags": [[1, 2]] * N,
        "loss": list(range(N)),
        "same": ["web"] * N,
    }
    task = blr.Task(mlp(), (x, y), metadata=metadata)
    return task, blr.fit_laplace(task, structure="diag", prior_precision=1.0)


MASK = [i in (1, 4, 8) for i in range(N)]


@pytest.mark.parametrize(
    "selection",
    [
        MASK,
        torch.tensor(MASK),
        np.array(MASK),
        pd.Series(MASK),
        [1, 4, 8],
        {4, 8, 1},
        torch.tensor([8, 4, 1], dtype=torch.uint8),
        [torch.tensor(1), torch.tensor(4), torch.tensor(8)],
        lambda row: row["index"] in (1, 4, 8),
        lambda row: torch.tensor([row["index"] in (1, 4, 8)]),
        lambda row: (row.flag and row.source != "b") or row.loss_metadata > 7,
        "index in (1, 4, 8)",
        "flag == 1 and target == 1 or index == 8",
    ],
)
def test_every_way_of_saying_one_four_eight(audit, selection: Any) -> None:
    assert subject_of(*audit).select(selection).tolist() == [1, 4, 8]


SHUFFLED = pd.DataFrame({"source": list("aabbccaab")}).sample(frac=1, random_state=0)
STRANGE = SHUFFLED.set_axis([f"row {i}" for i in SHUFFLED.index])
WAYS = {
    "metadata": lambda f, x, y: blr.Task(
        mlp(), (x, pd.Series(y.numpy(), index=f.index)), metadata={"source": f.source}
    ),
    "pair": lambda f, x, y: blr.Task(mlp(), (pd.DataFrame(x.numpy(), index=f.index), y)),
    "weights": lambda f, x, y: blr.Task(
        mlp(),
        (pd.DataFrame(x.numpy(), index=f.index), y),
        weights=pd.Series(1.0, index=f.index),
    ),
    "frame": lambda f, x, y: blr.Task(
        mlp(), pd.DataFrame(x.numpy(), index=f.index).assign(y=y.numpy()), target="y"
    ),
    "subset": lambda f, x, y: blr.Task(
        mlp(), (x.flip(0), pd.Series(y.numpy(), index=f.index)[::-1]), metadata=f[::-1]
    ).subset(range(N - 1, -1, -1)),
    "another model": lambda f, x, y: blr.Task(
        mlp(), (x, pd.Series(y.numpy(), index=f.index)), metadata=f
    ).with_model(blr.Task(mlp(), (x, y))),
}


@pytest.mark.parametrize("frame", [SHUFFLED, STRANGE], ids=["shuffled", "strange"])
@pytest.mark.parametrize("way", WAYS)
def test_labels_select_the_rows_that_they_name(way: str, frame: pd.DataFrame) -> None:
    x = torch.randn(N, 4)
    y = torch.arange(N) % 3
    task = WAYS[way](frame, x, y)
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    subject = subject_of(task, q)
    mask = frame.source == "b"
    places = np.flatnonzero(mask).tolist()
    assert subject.select(mask).tolist() == places
    assert subject.select(mask.astype("boolean")).tolist() == places
    assert subject.select(frame.index[mask]).tolist() == places
    labels = frame.index[mask][::-1]
    subset = task.subset(labels)
    assert subset.n_data == len(places)
    assert subset.examples.labels == tuple(labels)
    if frame is STRANGE:
        assert subject.select(mask.sort_index()).tolist() == places
    else:  # of rows, or of places?
        with pytest.raises(InputError, match="to_numpy"):
            subject.select(mask.sort_index())


@pytest.mark.parametrize("metadata", [None, {"source": list(SHUFFLED.source)}])
def test_labels_of_which_a_task_knows_none_are_refused(metadata: Any) -> None:
    x = torch.randn(N, 4)
    y = torch.arange(N) % 3
    task = blr.Task(mlp(), (x, y), metadata=metadata)
    mask = SHUFFLED.source == "b"
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    for chosen in (mask, SHUFFLED.index[mask]):
        for ask in (
            lambda rows: task.subset(rows),
            lambda rows: blr.what_if(task, q, remove=rows),
            lambda rows: blr.Monitor(task, examples=rows),
        ):
            with pytest.raises(InputError, match="to_numpy"):
                ask(chosen)
    reset = blr.Task(mlp(), (x, y), metadata={"source": SHUFFLED.source.reset_index(drop=True)})
    with pytest.raises(InputError, match="to_numpy"):
        reset.subset(mask)


@pytest.mark.parametrize("frame", [SHUFFLED, STRANGE], ids=["shuffled", "strange"])
def test_columns_with_another_index_than_the_data_are_refused(frame: pd.DataFrame) -> None:
    x = torch.randn(N, 4)
    y = torch.arange(N) % 3
    named = pd.DataFrame(x.numpy(), index=frame.index[::-1])
    listed = [(x[i], y[i]) for i in range(N)]
    named_targets = pd.Series(y.numpy(), index=named.index)
    for data in ((x, y), (named, y), (x, named_targets), listed):
        for column in (
            {"metadata": frame},
            {"metadata": {"source": frame.source}},
            {"weights": pd.Series(1.0, index=frame.index)},
        ):
            with pytest.raises(InputError, match=r"row index.*reset_index"):
                blr.Task(mlp(), data, **column)
        if data[0] is x:
            reset = frame.reset_index(drop=True)
            assert blr.Task(mlp(), (x, y), metadata=reset).metadata["source"] == list(frame.source)


@pytest.mark.parametrize("frame", [SHUFFLED, STRANGE], ids=["shuffled", "strange"])
@pytest.mark.parametrize("form", [torch.as_tensor, np.asarray])
def test_labels_of_y_beside_x_without_labels_are_warned_of(frame: pd.DataFrame, form: Any) -> None:
    x = form(torch.randn(N, 4))
    y = pd.Series(np.arange(N) % 3, index=frame.index)
    with pytest.warns(UserWarning, match=r"row labels.*y\.to_numpy") as warned:
        blr.Task(mlp(), (x, y))
    assert [warning.filename for warning in warned] == [__file__]  # the line that makes the task
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blr.Task(mlp(), (x, y.to_numpy()))
        blr.Task(mlp(), (x, y.reset_index(drop=True)))
        blr.Task(mlp(), (pd.DataFrame(np.asarray(x), index=frame.index), y))


def test_a_series_relabels_the_rows_that_it_names() -> None:
    task = WAYS["frame"](SHUFFLED, torch.randn(N, 4), torch.arange(N) % 3)
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    new = pd.Series([2, 0], index=[4, 7])
    by_place = {list(SHUFFLED.index).index(label): value for label, value in new.items()}
    ours, theirs = (
        blr.what_if(task, q, relabel=labels, solver="posterior") for labels in (new, by_place)
    )
    assert ours.nll == theirs.nll


def test_rows_hold_what_the_table_holds(audit) -> None:
    task, q = audit
    table = blr.sensitivity(task, q).table
    columns = Columns(subject_of(task, q))
    assert columns["target"] == table.target.tolist()  # before the whole table is made
    for name in table:
        pd.testing.assert_series_equal(pd.Series(columns[name], name=name), table[name])
    assert columns.names() == list(table)
    rows_by_index = {}

    def remember(row: Any) -> bool:
        rows_by_index[row["index"]] = dict(row)
        return True

    subject_of(task, q).select(remember)
    assert list(rows_by_index[0]) == list(rows_by_index[5]) == list(table)
    assert rows_by_index[5]["source"] == "c"


def test_several_outputs_have_the_tables_names() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=g, dtype=torch.float64)
    task = blr.Task(mlp(), (x, x[:, :3]), likelihood="gaussian")
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    above = x[:, 1] > 0
    assert (
        subject_of(task, q).select(lambda row: row.target_1 > 0).tolist()
        == above.nonzero()[:, 0].tolist()
    )
    with pytest.raises(InputError, match="target_0"):
        subject_of(task, q).select(lambda row: row.target > 0)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (MASK[:-1], "the mask remove has 8 entries for 9 examples"),
        ([0, 9], r"remove names example 9, but the examples are 0 … 8"),
        ([-1, 3], r"remove names example -1, but the examples are 0 … 8"),
        ([3, 2, 3], "remove names example 3 more than once"),
        ([], "remove selects none of the 9 examples"),
        (lambda row: False, "remove selects none of the 9 examples"),
        ([0.0, 1.0], r"hold booleans or integer indices, got \(2,\) float32"),
        (torch.zeros(3, 3, dtype=torch.bool), r"got \(3, 3\) bool"),
        ("nobody == 3", "remove='nobody == 3' is no query of"),
        ("source = 'a==b'", "remove=.* sets a value: compare with =="),
        (object(), "remove must be a boolean mask or integer indices: "),
        (pd.DataFrame({"target": [1, 2]}, index=[1, 4]), r"remove is a table.*table\.index"),
        (pd.DataFrame(MASK), r"remove is a table.*table\.index"),
        (lambda row: "no", "must answer True or False for a row, got 'no' for example 0"),
        (lambda row: row.loss, r"must answer True or False for a row, got 0\.|got 1\.|got 2\."),
        (lambda row: row.colour == "red", "the table has no column 'colour'; it has"),
        (lambda row: row.source > 3, "the function remove failed on the row of example 0: TypeE"),
    ],
)
def test_bad_selections(audit, selection: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        subject_of(*audit).select(selection)
    with pytest.raises(InputError, match=message):
        blr.what_if(*audit, remove=selection)


def test_groups_are_sorted_and_cover_everything(audit) -> None:
    groups = groups_by("source", subject_of(*audit))
    assert {k: v.tolist() for k, v in groups.items()} == {
        "a": [0, 1, 6, 7],
        "b": [2, 3, 8],
        "c": [4, 5],
    }
    assert list(groups_by("target", subject_of(*audit))) == [0, 1, 2]


def test_missing_values_make_one_group_at_the_end(audit) -> None:
    groups = groups_by("score", subject_of(*audit))
    keys = list(groups)
    assert keys[:2] == [0.5, 1.5]
    assert keys[2] != keys[2]
    assert len(keys) == 3
    assert groups[keys[2]].tolist() == [1, 4]


class Questioned:
    """A subject that knows its columns and fails where its scores are asked for."""

    n = 5
    metadata: ClassVar = {"source": list("abcab")}

    def cheap_columns(self) -> dict[str, torch.Tensor]:
        return {"target": torch.tensor([0, 1, 2, 0, 1])}


def test_questions_of_metadata_and_targets_need_no_scores() -> None:
    assert select(lambda r: r.source == "a", Questioned()).tolist() == [0, 3]
    assert select(lambda r: r.target == 1, Questioned()).tolist() == [1, 4]


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("tags", "column 'tags' holds several values per example"),
        ("same", "column 'same' has the same value everywhere"),
    ],
)
def test_bad_groups(audit, by: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        blr.what_if_each(*audit, by=by)

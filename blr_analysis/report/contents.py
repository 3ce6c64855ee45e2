"""The contents of the page as plain data for its script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from blr_analysis.audit import Findings
from blr_analysis.audit.section import two_digits
from blr_analysis.audit.trust import has_left_out_sizes, ranks_only
from blr_analysis.data.examples import evenly_spread
from blr_analysis.errors import InputError
from blr_analysis.plots._canvas import Names, name_of
from blr_analysis.posterior import Posterior
from blr_analysis.sensitivity import TopInfluence, influence
from blr_analysis.task import Task

MAX_ROWS = 10_000  # examples that have a point, a row and a thumbnail on the page
GALLERY = 60  # suspects in the gallery
CARDS = 10  # of the gallery, shown at first
WORST_TESTS = 35  # test examples on the page, those of the largest loss,
EVEN_TESTS = 15  # and further ones at even distances
NEIGHBOURS = 5  # of a test example, of either sign
MAX_COLUMNS = 24
MAX_INPUTS = 32
MIN_TEXT = 80  # characters of a text that are shown, whatever their number
MAX_TEXT = 400  # characters of a text that are shown
MAX_ALL_TEXTS = 1_500_000  # characters of all texts
MAX_WORD = 80  # characters of a cell
SENTENCE = 40  # characters; a column of longer words has the examples' texts
TEXT_PROBE = 200  # rows that are read to find the column of texts
MANY_DIGITS = 100  # from here on, two digits would hide what a prediction says
MAX_COLOURS = 50  # values of a column worth colouring by
FIRST = ("rank", "index", "target", "left_out_prediction", "kind", "region")
LAST = (
    "loss",
    "left_out_loss",
    "deviation",
    "leverage",
    "prediction",
    "error",
    "variance",
    "self_influence",
)
ESTIMATES = ("left_out_prediction", "left_out_loss")
OF_CLASSES = ("target", "prediction", "left_out_prediction", "proposed")


@dataclass(frozen=True)
class Shown:
    """The examples that have a row on the page, in the order of the dataset.

    Attributes:
        index: their places in the dataset.
        table: their rows of :attr:`blr_analysis.audit.Findings.table`.
        texts: their texts, shortened; None without texts.
        inputs: the names of the last columns of the table, which are the model's inputs.
    """

    index: np.ndarray
    table: pd.DataFrame
    texts: list[str] | None
    inputs: tuple[str, ...] = ()

    def place(self, index: Any) -> int:
        """The row of the example at this index of the dataset."""
        return int(np.searchsorted(self.index, int(index)))


@dataclass(frozen=True)
class Neighbours:
    """Test examples, and the training examples that help and harm each of them most.

    Attributes:
        test: the test data.
        chosen: the indices of the test examples on the page, the largest loss first, ``[K]``.
        top: their strongest training examples.
        losses: their losses, ``[K]``.
        posterior: that the influences are of.
    """

    test: Task
    chosen: torch.Tensor
    top: TopInfluence
    losses: torch.Tensor
    posterior: Posterior


def neighbours_of(findings: Findings) -> Neighbours | None:
    """The influences on some test examples; None without test data."""
    if findings.test is None or findings.on_test is None:
        return None
    losses = findings.on_test.losses
    order = losses.argsort(descending=True, stable=True)
    even = evenly_spread(len(order), EVEN_TESTS)
    chosen = torch.unique(torch.cat([order[:WORST_TESTS], order[even]]))
    chosen = chosen[losses[chosen].argsort(descending=True, stable=True)]
    k = min(NEIGHBOURS, findings.task.n_data)
    top: Any = influence(findings.task, findings.posterior, findings.test.subset(chosen), k=k)
    return Neighbours(findings.test, chosen, top, losses[chosen], findings.posterior)


def rows_of(
    findings: Findings, texts: Sequence[str] | None, neighbours: Neighbours | None
) -> Shown:
    """The examples that are shown: all if they are few, or the important ones and some others.

    Args:
        texts: of all training examples; None: a metadata column, if one has sentences.
    """
    index = _shown_indices(findings, neighbours)
    table = table_of(findings).iloc[index].reset_index(drop=True)
    inputs = pd.DataFrame([findings.task.examples.row(int(place)) for place in index])
    inputs = inputs.iloc[:, :MAX_INPUTS]
    inputs = inputs.rename(columns=lambda name: f"{name} (input)" if name in table else name)
    table = pd.concat([table, inputs], axis=1)
    column = text_column(table)
    if texts is not None:
        texts = [texts[int(place)] for place in index]
        if column is not None and list(table[column]) == texts:
            table = table.drop(columns=column)  # a card shows its text once
    elif column is not None:
        texts = list(table.pop(column))
    if texts is not None:
        share = MAX_ALL_TEXTS // max(len(index), 1)
        length = min(MAX_TEXT, max(MIN_TEXT, share))
        texts = [_short(str(text), length) for text in texts]
    return Shown(index, table, texts, tuple(str(name) for name in inputs if name in table))


def table_of(findings: Findings) -> pd.DataFrame:
    """One row per example, with its rank among the suspects.

    Left-out figures are missing where the page says that they are rough, and a column without any
    value is left out.
    """
    table = findings.table.copy()
    rank = np.empty(len(table), dtype=int)
    rank[findings.suspicions.order.numpy()] = np.arange(1, len(table) + 1)
    if "rank" in table:
        table = table.rename(columns={"rank": "rank_metadata"})
    table.insert(0, "rank", rank)
    leverage = findings.loo.leverage
    is_rough = np.full(len(table), not has_left_out_sizes(findings))
    if leverage is not None:
        is_rough |= (leverage >= 1).numpy()
    if is_rough.any():
        for column in ESTIMATES:
            if column in table:
                table[column] = table[column].astype(float).mask(is_rough)
    return table.dropna(axis="columns", how="all")


def _shown_indices(findings: Findings, neighbours: Neighbours | None) -> np.ndarray:
    """The examples with a row on the page, in the order of the dataset."""
    table = findings.table
    index = np.arange(len(table))
    if len(table) <= MAX_ROWS:
        return index
    important = [
        findings.suspects["index"].to_numpy()[:GALLERY],
        table.nlargest(MAX_ROWS // 2, findings.influence).index.to_numpy(),
    ]
    if neighbours is not None:
        important.append(neighbours.top.helpful.flatten().numpy())
        important.append(neighbours.top.harmful.flatten().numpy())
    chosen = np.unique(np.concatenate(important))
    remaining = np.setdiff1d(index, chosen)
    places = np.linspace(0, len(remaining) - 1, MAX_ROWS - len(chosen)).astype(int)
    return np.sort(np.concatenate([chosen, remaining[places]]))


def text_column(table: pd.DataFrame) -> str | None:
    """The column whose words are sentences; None without such a column."""
    for name in table:
        words = [value for value in table[name].head(TEXT_PROBE) if isinstance(value, str)]
        if words and np.median([len(word) for word in words]) > SENTENCE:
            return str(name)
    return None


def class_names(findings: Findings, classes: Sequence[str] | None) -> dict[int, str] | None:
    """The name of each class by its number; None where classes have no names.

    Args:
        classes: the user's names, in the order of the outputs; None: those of a Hugging Face
            model's configuration.

    Raises:
        InputError: fewer names than there are classes, or names of a regression.
    """
    task = findings.task
    table = findings.table
    class_columns = ["target", "left_out_prediction"]
    has_classes = task.likelihood.is_classification and set(class_columns) <= set(table)
    if not has_classes:
        if classes is not None:
            raise InputError("classes= is given, but the targets are no classes")
        return None
    count = 1 + int(table[class_columns].to_numpy().max())
    if classes is None:
        config = getattr(task.model, "config", None)
        labels = getattr(config, "id2label", None) or {}
    else:
        labels = dict(enumerate(classes))
    names = {i: str(labels[i]) or "(empty)" for i in range(len(labels)) if i in labels}
    are_too_few = len(names) < count
    if classes is not None and are_too_few:
        raise InputError(f"classes= names {len(names)} classes of {count}")
    are_placeholders = all(name == f"LABEL_{number}" for number, name in names.items())
    return None if are_too_few or are_placeholders else names


def columns_of(rows: Shown, names: Names | None = None) -> list[dict[str, Any]]:
    """Each column of the table: its name, whether it holds numbers, and its values.

    Args:
        names: of the classes, which then stand in place of their numbers.
    """
    first = [name for name in FIRST if name in rows.table]
    last = [name for name in LAST if name in rows.table]
    between = [name for name in rows.table if name not in (*first, *last, *rows.inputs)]
    ordered = [*first, *between, *last]
    columns = []
    for name in [*ordered[:MAX_COLUMNS], *rows.inputs]:
        values = rows.table[name]
        if names is not None and name in OF_CLASSES:
            values = values.map(lambda value: name_of(value, names), na_action="ignore")
        is_bool = pd.api.types.is_bool_dtype(values)
        is_number = pd.api.types.is_numeric_dtype(values) and not is_bool
        cells = [_cell(value) for value in values]
        columns.append({"name": str(name), "number": bool(is_number), "values": cells})
    return columns


def colours_of(rows: Shown) -> list[str]:
    """The columns that are worth colouring by: the region, the kind, classes, sources."""
    columns = ["region", "kind"]
    if "leverage" in rows.table:
        columns.append("leverage")
    for name in rows.table.drop(columns=[*rows.inputs, *columns, "index", "rank"]):
        values = rows.table[name]
        is_float = pd.api.types.is_float_dtype(values)
        n_values = len(set(values.map(str)))
        if not is_float and 2 <= n_values <= MAX_COLOURS:
            columns.append(str(name))
    return columns


def filters_of(rows: Shown, colours: Sequence[str]) -> list[str]:
    """The columns by which a reader filters the table: those with few values.

    The audit's own answers are left out.
    """
    answers = ("region", "prediction", "left_out_prediction", "leverage")
    return [name for name in colours if name not in answers and len({*rows.table[name]}) > 1]


def tests_of(
    rows: Shown, neighbours: Neighbours | None, names: Names | None
) -> list[dict[str, Any]]:
    """Each test example with its target, answer and loss, and its neighbours.

    The neighbours' influences are missing where the page says that only their order holds.
    """
    if neighbours is None:
        return []
    n = len(neighbours.chosen)
    has_sizes = not ranks_only(neighbours.posterior)
    answers = neighbours.top.pairs.described(torch.arange(n), test=True)
    records = []
    for k, index in enumerate(neighbours.chosen.tolist()):
        helps, harms = neighbours.top.sides(k)
        inputs = neighbours.test.examples.row(index)
        record = {
            "index": index,
            "loss": _cell(float(neighbours.losses[k])),
            "helpful": _links(rows, *helps, has_sizes=has_sizes),
            "harmful": _links(rows, *harms, has_sizes=has_sizes),
            "text": _text_of(neighbours.test, index),
            "inputs": [[name, _cell(value)] for name, value in inputs.items()],
        }
        if "target" in answers:
            record["target"] = _named(answers["target"][k].tolist(), names)
        if "prediction" in answers:
            record["prediction"] = _predicted(answers["prediction"][k].tolist(), names)
        records.append(record)
    return records


def _links(
    rows: Shown, indices: torch.Tensor, influences: torch.Tensor, *, has_sizes: bool
) -> list[list[Any]]:
    """The row of each neighbour, and its influence in units of the loss, or None without sizes."""
    pairs = zip(indices.tolist(), influences.tolist(), strict=True)
    return [[rows.place(index), _cell(rise) if has_sizes else None] for index, rise in pairs]


def _named(target: Any, names: Names | None) -> str:
    """The name of a target, or the names of several."""
    values = target if isinstance(target, list) else [target]
    return ", ".join(name_of(value, names) for value in values)


def _predicted(prediction: Any, names: Names | None) -> str:
    """The name of a predicted class, or the predicted numbers."""
    values = prediction if isinstance(prediction, list) else [prediction]
    are_numbers = any(isinstance(value, float) for value in values)
    return ", ".join(map(_predicted_number, values)) if are_numbers else _named(values, names)


def _predicted_number(value: float) -> str:
    """A predicted number: two digits, and all digits before the point, as of a year."""
    return two_digits(value) if abs(value) < MANY_DIGITS else f"{value:,.0f}"


def _text_of(test: Task, index: int) -> str | None:
    """The first long text in an example's metadata; None without one."""
    for column in test.metadata.values():
        value = column[index]
        if isinstance(value, str) and len(value) > SENTENCE:
            return _short(value, MAX_TEXT)
    return None


def suspects_of(findings: Findings, rows: Shown) -> list[dict[str, Any]]:
    """The gallery: the first rows of :func:`blr_analysis.suspicious`.

    A suspect has its row on the page, its kind, its twin, the chance that its label is wrong, and,
    if that is likely, the other label that fits best. For regression no target is proposed: the
    model's own prediction would only confirm the model.
    """
    records = []
    for suspect in findings.suspects.head(GALLERY).to_dict("records"):
        is_duplicate = suspect["kind"] == "duplicate"
        has_wrong_label = suspect["kind"] == "label"
        record = {
            "row": rows.place(suspect["index"]),
            "kind": str(suspect["kind"]),
            "proposed": _cell(suspect.get("proposed", np.nan)) if has_wrong_label else None,
            "twin": suspect["twin"] if is_duplicate else None,
            "wrong": _cell(suspect.get("wrong", np.nan)),
        }
        records.append(record)
    return records


def classes_of(findings: Findings, names: dict[int, str] | None = None) -> list[Any]:
    """The labels that examples have or that are proposed, each with its words on the page.

    The list is empty for regression and for several targets.
    """
    table = findings.suspicions.table
    if not findings.task.likelihood.is_classification or "target" not in table:
        return []
    values = table[["target", "proposed"]].to_numpy()
    labels = sorted({_cell(value) for value in values.flat} - {None})
    if names is None:
        return [[label, label] for label in labels]
    return [[label, names.get(label, label)] for label in labels]


def _short(text: str, limit: int) -> str:
    """The first ``limit`` characters of a text, with its length if it is longer."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} … ({len(text):,} characters)"


def _cell(value: Any) -> Any:
    """A value as JSON: numbers to four digits, None for NaN, words of bounded length."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        if not np.isfinite(value):
            return None
        is_whole = value == int(value) and abs(value) < 1e15
        return int(value) if is_whole else float(f"{value:.4g}")
    return None if value is None else _short(str(value), MAX_WORD)

"""What stands on the page: plain data for its script, and thumbnails of all examples on one sheet,
so that it carries one picture and not thousands."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from blr_analysis.audit import Findings
from blr_analysis.audit.new_data import ranks_only
from blr_analysis.audit.pictures import images_of
from blr_analysis.errors import InputError
from blr_analysis.plots import image_of
from blr_analysis.plots._canvas import Names, name_of
from blr_analysis.sensitivity import TopInfluence, influence
from blr_analysis.task import Task

MOST_SINGLE = 10_000  # examples with a point, a row and a thumbnail of their own
GALLERY = 60
CARDS = 10  # of the gallery, shown at first
TESTS = (35, 15)  # test examples on the page: of the largest loss, and at even distances
NEIGHBOURS = 5  # of either sign
MOST_COLUMNS = 24
MOST_INPUTS = 32
TEXT = (80, 400, 1_500_000)  # characters of a text: at least, at most, and of all together
FIRST = ("rank", "index", "target", "left_out_prediction", "kind", "region")
LAST = ("loss", "left_out_loss", "deviation", "leverage", "prediction", "error", "variance")
LAST += ("self_influence",)
ESTIMATES = ("left_out_prediction", "left_out_loss")
OF_CLASSES = ("target", "prediction", "left_out_prediction", "proposed")
WORD = 80  # characters of a cell
LONG = 40  # characters from which on a column of words is the examples' text
EDGE = 64  # pixels of a tile, at most
SHEET = 5_000_000  # pixels of all tiles; a whole page of 10,000 stays below 6 MB
EXACT = 300_000  # pixels that are kept as they are


@dataclass(frozen=True)
class Shown:
    """The examples that are shown one by one, in the order of the dataset.

    Attributes:
        index: their places in the dataset.
        table: their rows of :attr:`blr_analysis.audit.Findings.table`.
        texts: their texts, shortened; None where they have none.
        inputs: the last columns of the table, which are what the model sees of a row of data.
    """

    index: np.ndarray
    table: pd.DataFrame
    texts: list[str] | None
    inputs: tuple[str, ...] = ()

    def place(self, index: Any) -> int:
        """The row of an example."""
        return int(np.searchsorted(self.index, int(index)))


@dataclass(frozen=True)
class Neighbours:
    """Test examples, and the training examples that help and harm each of them most."""

    test: Task
    chosen: torch.Tensor
    top: TopInfluence
    losses: torch.Tensor


def neighbours_of(findings: Findings) -> Neighbours | None:
    """The influences on some test examples; None without test data."""
    if findings.test is None or findings.on_test is None:
        return None
    worst, spread = TESTS
    losses = findings.on_test.losses
    order = losses.argsort(descending=True, stable=True)
    even = torch.linspace(0, len(order) - 1, min(spread, len(order))).long()
    chosen = torch.unique(torch.cat([order[:worst], order[even]]))
    chosen = chosen[losses[chosen].argsort(descending=True, stable=True)]
    k = min(NEIGHBOURS, findings.task.n_data)
    top: Any = influence(findings.task, findings.posterior, findings.test.subset(chosen), k=k)
    return Neighbours(findings.test, chosen, top, losses[chosen])


def rows_of(
    findings: Findings, texts: Sequence[str] | None, neighbours: Neighbours | None
) -> Shown:
    """All examples where they are few; else the important ones and an even share of the others."""
    index = _shown_indices(findings, neighbours)
    table = table_of(findings).iloc[index].reset_index(drop=True)
    inputs = pd.DataFrame([findings.task.examples.row(int(i)) for i in index])
    inputs = inputs.iloc[:, :MOST_INPUTS]
    inputs = inputs.rename(columns=lambda name: f"{name} (input)" if name in table else name)
    table = pd.concat([table, inputs], axis=1)
    if texts is not None:
        texts = [texts[int(i)] for i in index]
    else:
        column = text_column(table)
        texts = None if column is None else list(table.pop(column))
    if texts is not None:
        shortest, longest, total = TEXT
        length = min(longest, max(shortest, total // max(len(index), 1)))
        texts = [_short(str(text), length) for text in texts]
    return Shown(index, table, texts, tuple(str(name) for name in inputs if name in table))


def table_of(findings: Findings) -> pd.DataFrame:
    """One row per example, with its rank among the suspects, and without left-out figures where
    the page says that they are rough."""
    table = findings.table.copy()
    rank = np.empty(len(table), dtype=int)
    rank[findings.suspicions.order.numpy()] = np.arange(1, len(table) + 1)
    name = "rank"
    if name in table:
        table = table.rename(columns={name: f"{name}_metadata"})
    table.insert(0, name, rank)
    leverage = findings.loo.leverage
    is_rough = np.full(len(table), ranks_only(findings))
    if leverage is not None:
        is_rough |= (leverage >= 1).numpy()
    if is_rough.any():
        for column in ESTIMATES:
            if column in table:
                table[column] = table[column].astype(float).mask(is_rough)
    return table


def _shown_indices(findings: Findings, neighbours: Neighbours | None) -> np.ndarray:
    """The examples with a row on the page, in the order of the dataset."""
    table = findings.table
    index = np.arange(len(table))
    if len(table) <= MOST_SINGLE:
        return index
    important = [
        findings.suspects["index"].to_numpy()[:GALLERY],
        table.nlargest(MOST_SINGLE // 2, findings.influence).index.to_numpy(),
    ]
    if neighbours is not None:
        important.append(neighbours.top.helpful.flatten().numpy())
        important.append(neighbours.top.harmful.flatten().numpy())
    chosen = np.unique(np.concatenate(important))
    remaining = np.setdiff1d(index, chosen)
    places = np.linspace(0, len(remaining) - 1, MOST_SINGLE - len(chosen)).astype(int)
    return np.sort(np.concatenate([chosen, remaining[places]]))


def text_column(table: pd.DataFrame) -> str | None:
    """The column whose words are sentences; None where there is none."""
    for name in table:
        words = [v for v in table[name].head(200) if isinstance(v, str)]
        if words and np.median([len(w) for w in words]) > LONG:
            return str(name)
    return None


def class_names(findings: Findings, given: Sequence[str] | None) -> dict[int, str] | None:
    """The classes' names from ``given`` or a Hugging Face model; None where there are none.

    Raises:
        InputError: fewer names than there are classes, or names of a regression.
    """
    task = findings.task
    table = findings.table
    class_columns = ["target", "left_out_prediction"]
    has_classes = task.likelihood.is_classification and set(class_columns) <= set(table)
    if not has_classes:
        if given is not None:
            raise InputError("classes= names classes, which these targets are not")
        return None
    count = 1 + int(table[class_columns].to_numpy().max())
    if given is None:
        config = getattr(task.model, "config", None)
        labels = getattr(config, "id2label", None) or {}
    else:
        labels = dict(enumerate(given))
    names = {i: str(labels[i]) or "(empty)" for i in range(len(labels)) if i in labels}
    are_too_few = len(names) < count
    if given is not None and are_too_few:
        raise InputError(f"classes= names {len(names)} classes of {count}")
    are_placeholders = all(name == f"LABEL_{i}" for i, name in names.items())
    return None if are_too_few or are_placeholders else names


def columns_of(rows: Shown, names: Names | None = None) -> list[dict[str, Any]]:
    """Each column of the table: its name, whether it holds numbers, and its values; classes by
    their names."""
    first = [name for name in FIRST if name in rows.table]
    last = [name for name in LAST if name in rows.table]
    between = [name for name in rows.table if name not in (*first, *last, *rows.inputs)]
    ordered = [*first, *between, *last]
    columns = []
    for name in [*ordered[:MOST_COLUMNS], *rows.inputs]:
        values = rows.table[name]
        if names is not None and name in OF_CLASSES:
            values = values.map(lambda value: name_of(value, names), na_action="ignore")
        is_bool = pd.api.types.is_bool_dtype(values)
        is_number = pd.api.types.is_numeric_dtype(values) and not is_bool
        cells = [_cell(value) for value in values]
        columns.append({"name": str(name), "number": bool(is_number), "values": cells})
    return columns


def colours_of(rows: Shown) -> list[str]:
    """The columns worth colouring by: the region, the kind, classes, sources."""
    columns = ["region", "kind"]
    if "leverage" in rows.table:
        columns.append("leverage")
    for name in rows.table.drop(columns=[*rows.inputs, *columns, "index", "rank"]):
        values = rows.table[name]
        is_float = pd.api.types.is_float_dtype(values)
        if not is_float and 2 <= len(set(values.map(str))) <= 50:
            columns.append(str(name))
    return columns


def filters_of(rows: Shown, colours: Sequence[str]) -> list[str]:
    """The columns by which a reader filters the table: few values, and no answers of the audit."""
    answers = ("region", "prediction", "left_out_prediction", "leverage")
    return [name for name in colours if name not in answers and len({*rows.table[name]}) > 1]


def tests_of(
    rows: Shown, neighbours: Neighbours | None, names: Names | None
) -> list[dict[str, Any]]:
    """Each test example with its target, answer and loss, and rows and nats of its neighbours."""
    if neighbours is None:
        return []
    n = len(neighbours.chosen)
    answers = neighbours.top.pairs.described(torch.arange(n), test=True)
    records = []
    for k, index in enumerate(neighbours.chosen.tolist()):
        helps, harms = neighbours.top.sides(k)
        inputs = neighbours.test.examples.row(index)
        record = {
            "index": index,
            "loss": _cell(float(neighbours.losses[k])),
            "helpful": _links(rows, *helps),
            "harmful": _links(rows, *harms),
            "text": _text_of(neighbours.test, index),
            "inputs": [[name, _cell(value)] for name, value in inputs.items()],
        }
        for name, values in answers.items():
            record[name] = _named(values[k].tolist(), names)
        records.append(record)
    return records


def _links(rows: Shown, indices: torch.Tensor, influences: torch.Tensor) -> list[list[Any]]:
    """The row and the influence of each neighbour."""
    pairs = zip(indices.tolist(), influences.tolist(), strict=True)
    return [[rows.place(index), _cell(nats)] for index, nats in pairs]


def _named(target: Any, names: Names | None) -> str:
    values = target if isinstance(target, list) else [target]
    return ", ".join(name_of(value, names) for value in values)


def _text_of(test: Task, index: int) -> str | None:
    """The first long text among an example's metadata; None where there is none."""
    for column in test.metadata.values():
        value = column[index]
        if isinstance(value, str) and len(value) > LONG:
            return _short(value, TEXT[1])
    return None


def suspects_of(findings: Findings, rows: Shown) -> list[dict[str, Any]]:
    """The gallery: the first rows of :func:`blr_analysis.suspicious`.

    A suspect has its row on the page, its kind, its twin, the chance that its label is wrong, and
    the label that fits best among the others. Of regression nothing is proposed: the model's own
    prediction would only confirm the model.
    """
    records = []
    for suspect in findings.suspects.head(GALLERY).to_dict("records"):
        is_duplicate = suspect["kind"] == "duplicate"
        record = {
            "row": rows.place(suspect["index"]),
            "kind": str(suspect["kind"]),
            "proposed": _cell(suspect.get("proposed", np.nan)),
            "twin": suspect["twin"] if is_duplicate else None,
            "wrong": _cell(suspect.get("wrong", np.nan)),
        }
        records.append(record)
    return records


def classes_of(findings: Findings, names: dict[int, str] | None = None) -> list[Any]:
    """The labels that an example has or would be given, and how they are shown; none for
    regression and several targets."""
    table = findings.suspicions.table
    if not findings.task.likelihood.is_classification or "target" not in table:
        return []
    values = table[["target", "proposed"]].to_numpy()
    labels = sorted({_cell(value) for value in values.flat} - {None})
    if names is None:
        return [[label, label] for label in labels]
    return [[label, names.get(label, label)] for label in labels]


def _short(text: str, limit: int) -> str:
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
    return None if value is None else _short(str(value), WORD)


@dataclass(frozen=True)
class Thumbnails:
    """Tiles of one size, row by row: example k is tile k.

    Attributes:
        uri: the picture as a ``data:`` URI.
        edge: pixels of a tile, both ways.
        across: tiles in a row.
        n: how many there are.
    """

    uri: str
    edge: int
    across: int
    n: int

    @property
    def down(self) -> int:
        return math.ceil(self.n / self.across)


def pictures_of(
    findings: Findings, rows: Shown, neighbours: Neighbours | None, images: Any
) -> list[np.ndarray] | None:
    """Thumbnails of the rows, then of the chosen test examples; None where there are no images."""
    if images is None:
        images = images_of(findings.task)
    if images is None:
        return None
    pictures = [picture_of(images, int(i)) for i in rows.index]
    if neighbours is None:
        return pictures
    test_images = images_of(neighbours.test)
    if test_images is not None:
        pictures += [picture_of(test_images, int(i)) for i in neighbours.chosen]
    return pictures


def sheet_of(pictures: Sequence[np.ndarray]) -> Thumbnails:
    """Pictures [H, W] or [H, W, 3] of bytes on one sheet. Very many pictures have smaller tiles,
    and only small sheets keep every pixel."""
    n = len(pictures)
    largest = max(max(picture.shape[:2]) for picture in pictures)
    edge = min(largest, EDGE, max(8, math.isqrt(SHEET // n)))
    across = min(math.ceil(math.sqrt(n)), 16383 // edge)
    mode = "RGB" if any(picture.ndim == 3 for picture in pictures) else "L"
    sheet = Image.new(mode, (across * edge, math.ceil(n / across) * edge), 128)
    for k, picture in enumerate(pictures):
        tile = Image.fromarray(picture)
        tile.thumbnail((edge, edge), Image.Resampling.BOX)
        row, column = divmod(k, across)
        left = (edge - tile.width) // 2
        top = (edge - tile.height) // 2
        sheet.paste(tile, (column * edge + left, row * edge + top))
    file = io.BytesIO()
    is_lossless = n * edge**2 <= EXACT
    sheet.save(file, "WEBP", method=2, lossless=is_lossless, quality=80 if is_lossless else 50)
    uri = "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
    return Thumbnails(uri, edge, across, n)


def picture_of(images: Any, index: int) -> np.ndarray:
    """Example ``index`` as bytes [H, W] or [H, W, 3], whatever shape and range it comes in.

    Raises:
        InputError: it is no image.
    """
    picture = image_of(images, index)
    if picture.ndim == 3 and picture.shape[-1] == 4:
        alpha = picture[..., 3:]
        picture = picture[..., :3] * alpha + (1 - alpha)
    return np.round(255 * picture).clip(0, 255).astype(np.uint8)

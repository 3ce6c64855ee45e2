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
from blr_analysis.audit.pictures import images_of
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import Poisson
from blr_analysis.plots import image_of
from blr_analysis.plots._canvas import Names, name_of
from blr_analysis.sensitivity import TopInfluence, influence
from blr_analysis.task import Task

MOST_SINGLE = 10_000  # examples with a point, a row and a thumbnail of their own
GALLERY = 60
TESTS = (35, 15)  # test examples asked about: of the largest loss, and at even distances
NEIGHBOURS = 5  # of either sign
MOST_COLUMNS, MOST_INPUTS = 24, 32
TEXT = (80, 400, 1_500_000)  # characters of a text: at least, at most, and of all together
FIRST = ("index", "target", "left_out_prediction", "kind", "region")
LAST = ("loss", "left_out_loss", "deviation", "leverage", "prediction", "error", "variance")
LAST += ("self_influence",)
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
    """All examples where they are few; else the telling ones and an even share of the others."""
    table, n = findings.table, len(findings.table)
    index = np.arange(n)
    if n > MOST_SINGLE:
        told = [findings.suspects["index"].to_numpy()[:GALLERY]]
        told += [table.nlargest(MOST_SINGLE // 2, findings.influence).index.to_numpy()]
        if neighbours is not None:
            told += [neighbours.top.helpful.flatten().numpy()]
            told += [neighbours.top.harmful.flatten().numpy()]
        telling = np.unique(np.concatenate(told))
        others = np.setdiff1d(index, telling)
        even = np.linspace(0, len(others) - 1, MOST_SINGLE - len(telling)).astype(int)
        index = np.sort(np.concatenate([telling, others[even]]))
    shown = table.iloc[index].reset_index(drop=True)
    rows = pd.DataFrame([findings.task.examples.row(int(i)) for i in index])
    rows = rows.iloc[:, :MOST_INPUTS].rename(columns=lambda n: f"{n} (input)" if n in shown else n)
    shown = pd.concat([shown, rows], axis=1)
    if texts is not None:
        texts = [texts[int(i)] for i in index]
    elif (column := text_column(shown)) is not None:
        texts = list(shown.pop(column))
    least, most, together = TEXT
    length = min(most, max(least, together // max(len(index), 1)))
    told_texts = None if texts is None else [_short(str(text), length) for text in texts]
    return Shown(index, shown, told_texts, tuple(str(name) for name in rows if name in shown))


def text_column(table: pd.DataFrame) -> str | None:
    """The column whose words are sentences; None where there is none."""
    for name in table:
        words = [v for v in table[name].head(200) if isinstance(v, str)]
        if words and np.median([len(w) for w in words]) > LONG:
            return str(name)
    return None


def class_names(findings: Findings, given: Sequence[str] | None) -> dict[int, str] | None:
    """The classes' names: those given, or a Hugging Face model's; None where there are none.

    Raises:
        InputError: fewer names than there are classes, or names of a regression.
    """
    task, table = findings.task, findings.table
    if not (task.likelihood.is_classification and {"target", "left_out_prediction"} <= {*table}):
        if given is not None:
            raise InputError("classes= names classes, which these targets are not")
        return None
    count = 1 + int(table[["target", "left_out_prediction"]].to_numpy().max())
    known = getattr(getattr(task.model, "config", None), "id2label", None) or {}
    known = known if given is None else dict(enumerate(given))
    names = {i: str(known[i]) or "(empty)" for i in range(len(known)) if i in known}
    if given is not None and len(names) < count:
        raise InputError(f"classes= names {len(names)} classes of {count}")
    unnamed = len(names) < count or all(n == f"LABEL_{i}" for i, n in names.items())
    return None if unnamed else names


def columns_of(rows: Shown, names: Names | None = None) -> list[dict[str, Any]]:
    """Each column of the table: its name, whether it holds numbers, and its values; classes by
    their names."""
    first, last = ([name for name in side if name in rows.table] for side in (FIRST, LAST))
    between = [name for name in rows.table if name not in (*first, *last, *rows.inputs)]
    columns = []
    for name in [*[*first, *between, *last][:MOST_COLUMNS], *rows.inputs]:
        values = rows.table[name]
        if names is not None and name in OF_CLASSES:
            values = values.map(lambda v: name_of(v, names))
        numbers = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
        shown = [_cell(v) for v in values]
        columns.append({"name": str(name), "number": bool(numbers), "values": shown})
    return columns


def colours_of(rows: Shown) -> list[str]:
    """The columns worth colouring by: the region, the kind, classes, sources."""
    found = ["region", "kind", *(["leverage"] if "leverage" in rows.table else [])]
    for name in rows.table.drop(columns=[*rows.inputs, *found, "index"]):
        values = rows.table[name]
        if not pd.api.types.is_float_dtype(values) and 2 <= len({*values.map(str)}) <= 50:
            found.append(str(name))
    return found


def filters_of(rows: Shown, colours: Sequence[str]) -> list[str]:
    """The columns to choose a value of: few values, and what somebody would ask for."""
    answers = ("region", "prediction", "left_out_prediction", "leverage")
    return [name for name in colours if name not in answers and len({*rows.table[name]}) > 1]


def tests_of(
    rows: Shown, neighbours: Neighbours | None, names: Names | None
) -> list[dict[str, Any]]:
    """Each test example with its target, answer and loss, and rows and nats of its neighbours."""
    if neighbours is None:
        return []
    top, chosen, told = neighbours.top, neighbours.chosen, []
    known = top.pairs.described(torch.arange(len(chosen)), test=True)
    for k, index in enumerate(chosen.tolist()):
        one: dict[str, Any] = {"index": index, "loss": _cell(float(neighbours.losses[k]))}
        for side, (at, by) in zip(("helpful", "harmful"), top.sides(k), strict=True):
            pairs = zip(at.tolist(), by.tolist(), strict=True)
            one[side] = [[rows.place(i), _cell(v)] for i, v in pairs]
        for name, values in known.items():
            value = values[k].tolist()
            several = value if isinstance(value, list) else [value]
            one[name] = ", ".join(name_of(v, names) for v in several)
        words = (v[index] for v in neighbours.test.metadata.values())
        texts = [w for w in words if isinstance(w, str) and len(w) > LONG]
        one["text"] = _short(texts[0], TEXT[1]) if texts else None
        one["inputs"] = [[n, _cell(v)] for n, v in neighbours.test.examples.row(index).items()]
        told.append(one)
    return told


def suspects_of(findings: Findings, rows: Shown) -> list[dict[str, Any]]:
    """The gallery: the first rows of :func:`blr_analysis.suspicious`, each with its row here, its
    kind, twin and a new target, as :func:`blr_analysis.what_if` takes it: the best other label,
    else what the model says without the example, of counts the nearest one."""
    told, counts = [], isinstance(findings.task.likelihood.kind, Poisson)
    for suspect in findings.suspects.head(GALLERY).to_dict("records"):
        place, other = rows.place(suspect["index"]), suspect.get("proposed", np.nan)
        if other != other and "left_out_prediction" in rows.table:
            other = rows.table["left_out_prediction"].iloc[place]
            other = round(other) if counts else other
        one = {"row": place, "kind": str(suspect["kind"]), "proposed": _cell(other)}
        one["twin"] = suspect["twin"] if suspect["kind"] == "duplicate" else None
        told.append(one | {"loss": _cell(suspect["loss"])})
    return told


def classes_of(findings: Findings, names: dict[int, str] | None = None) -> list[Any]:
    """The labels that an example has or would be given, and how they are shown; none for
    regression and several targets."""
    table = findings.suspicions.table
    if not findings.task.likelihood.is_classification or "target" not in table:
        return []
    labels = sorted({_cell(v) for v in table[["target", "proposed"]].to_numpy().flat} - {None})
    return [[v, (names or {}).get(v, v)] for v in labels]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"


def _cell(value: Any) -> Any:
    """A value as JSON: numbers to four digits, None for NaN, words of bounded length."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        if not np.isfinite(value):
            return None
        return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.4g}")
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
    """Thumbnails of the rows, then of the test examples asked about; None where there are none."""
    images = images_of(findings.task) if images is None else images
    if images is None:
        return None
    pictures = [picture_of(images, int(i)) for i in rows.index]
    if neighbours is not None and (theirs := images_of(neighbours.test)) is not None:
        pictures += [picture_of(theirs, int(i)) for i in neighbours.chosen]
    return pictures


def sheet_of(pictures: Sequence[np.ndarray]) -> Thumbnails:
    """Pictures [H, W] or [H, W, 3] of bytes on one sheet; where there are very many, tiles become
    smaller, and only small sheets keep every pixel."""
    n, largest = len(pictures), max(max(p.shape[:2]) for p in pictures)
    edge = min(largest, EDGE, max(8, math.isqrt(SHEET // n)))
    across = min(math.ceil(math.sqrt(n)), 16383 // edge)
    mode = "RGB" if any(p.ndim == 3 for p in pictures) else "L"
    sheet = Image.new(mode, (across * edge, math.ceil(n / across) * edge), 128)
    for k, picture in enumerate(pictures):
        tile = Image.fromarray(picture)
        tile.thumbnail((edge, edge), Image.Resampling.BOX)
        left, top = (edge - tile.size[0]) // 2, (edge - tile.size[1]) // 2
        sheet.paste(tile, (k % across * edge + left, k // across * edge + top))
    file, exact = io.BytesIO(), n * edge**2 <= EXACT
    sheet.save(file, "WEBP", method=2, lossless=exact, quality=80 if exact else 50)
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

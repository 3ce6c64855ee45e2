"""What stands on the page: plain data for its script, and thumbnails of all examples on one sheet,
so that it carries one picture and not thousands."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from blr_analysis.audit import Findings, most_suspicious
from blr_analysis.audit.findings import influence_column
from blr_analysis.audit.pictures import images_of, plain
from blr_analysis.audit.summary import REGION_MEANS
from blr_analysis.errors import DataError, InputError
from blr_analysis.likelihoods import Poisson
from blr_analysis.plots import image_of
from blr_analysis.sensitivity import TopInfluence, influence
from blr_analysis.task import Task

MOST_SINGLE = 10_000  # examples with a point, a row and a thumbnail of their own
GALLERY = 60
TESTS = (35, 15)  # test examples asked about: of the largest loss, and at even distances
NEIGHBOURS = 5  # of either sign
MOST_COLUMNS, MOST_INPUTS = 24, 32
TEXT = (80, 400, 1_500_000)  # characters of a text: at least, at most, and of all together
FIRST = ("index", "target", "left_out_prediction", "region", "suspicious", "label_quality")
LAST = ("loss", "left_out_loss", "deviation", "leverage", "prediction", "error", "variance")
LAST += ("self_influence",)
OF_CLASSES = ("target", "prediction", "left_out_prediction")
WORD = 80  # characters of a cell
LONG = 40  # characters from which on a column of words is the examples' text
BUDGET = 2_400_000  # bytes of a sheet before base64; the whole page stays below 6 MB
EDGES = (48, 32, 24, 16)  # pixels of a tile, tried in turn until the sheet fits
WAYS: tuple[dict[str, Any], ...] = (  # of writing a sheet, the finest first
    {"lossless": True, "quality": 40},
    {"quality": 80},
    {"quality": 50},
    {"quality": 25},
)
SAMPLE = 300  # pictures that tell how large the sheet will be


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


def neighbours_of(findings: Findings, progress: bool | None) -> Neighbours | None:
    """The influences on some test examples; None without test data."""
    if findings.test is None or findings.on_test is None:
        return None
    worst, spread = TESTS
    losses = findings.on_test.losses
    order = losses.argsort(descending=True, stable=True)
    even = torch.linspace(0, len(order) - 1, min(spread, len(order))).long()
    chosen = torch.unique(torch.cat([order[:worst], even]))
    chosen = chosen[losses[chosen].argsort(descending=True, stable=True)]
    top = influence(
        findings.task,
        findings.posterior,
        findings.test.subset(chosen),
        k=min(NEIGHBOURS, findings.task.n_data),
    )
    assert isinstance(top, TopInfluence)
    return Neighbours(findings.test, chosen, top, losses[chosen])


def rows_of(
    findings: Findings, texts: Sequence[str] | None, neighbours: Neighbours | None
) -> Shown:
    """All examples where they are few; else the telling ones and an even share of the others."""
    table = findings.table
    n = len(table)
    index = np.arange(n)
    if n > MOST_SINGLE:
        told = [most_suspicious(table, GALLERY)["index"].to_numpy()]
        if neighbours is not None:
            top = neighbours.top
            told += [side.flatten().numpy() for side in (top.helpful, top.harmful)]
        measure = table[influence_column(table)].to_numpy(float)
        told.append(np.argsort(-measure, kind="stable")[: MOST_SINGLE // 2])
        index = np.unique(np.concatenate(told))
        others = np.setdiff1d(np.arange(n), index)
        even = np.linspace(0, len(others) - 1, MOST_SINGLE - len(index)).astype(int)
        index = np.sort(np.concatenate([index, others[even]]))
    shown = table.iloc[index].reset_index(drop=True)
    rows = pd.DataFrame([findings.task.examples.row(int(i)) for i in index])
    rows = rows.iloc[:, :MOST_INPUTS].rename(columns=lambda n: f"{n} (input)" if n in shown else n)
    shown = pd.concat([shown, rows], axis=1)
    if texts is None and (column := text_column(shown)) is not None:
        texts = list(shown.pop(column))
    elif texts is not None:
        texts = [texts[int(i)] for i in index]
    inputs = tuple(str(name) for name in rows if name in shown)
    return Shown(index, shown, None if texts is None else shortened(texts, len(index)), inputs)


def text_column(table: pd.DataFrame) -> str | None:
    """The column whose words are sentences; None where there is none."""
    for name in table:
        words = [v for v in table[name].head(200) if isinstance(v, str)]
        if words and np.median([len(w) for w in words]) > LONG:
            return str(name)
    return None


def shortened(texts: Sequence[Any], n: int) -> list[str]:
    """Each text as long as all of them together allow; what was cut off is said."""
    least, most, together = TEXT
    length = min(most, max(least, together // max(n, 1)))
    return [_short(str(text), length) for text in texts]


def class_names(findings: Findings, given: Sequence[str] | None) -> list[str] | None:
    """The classes' names: those given, or a Hugging Face model's; None where there are none.

    Raises:
        InputError: fewer names than there are classes, or names of a regression.
    """
    if "suspicious" not in findings.table or "target" not in findings.table:
        if given is not None and not label_names(findings, given):
            raise InputError("classes= names classes or labels, which these targets are not")
        return None
    count = 1 + int(findings.table[["target", "left_out_prediction"]].to_numpy().max())
    config = getattr(findings.task.model, "config", None)
    known = getattr(config, "id2label", None) if given is None else dict(enumerate(given))
    names = [str(known[i]) or "(empty)" for i in range(len(known)) if i in known] if known else []
    if given is not None and len(names) < count:
        raise InputError(f"classes= names {len(names)} classes of {count}")
    unnamed = len(names) < count or all(n == f"LABEL_{i}" for i, n in enumerate(names))
    return None if unnamed else names


def label_names(findings: Findings, given: Sequence[str] | None) -> dict[str, str]:
    """The columns of each label, where an example has several, by the names given; else none.

    Raises:
        InputError: another number of names than there are labels.
    """
    kind, columns = findings.task.likelihood, list(findings.table)
    if given is None or not kind.is_classification or "target_0" not in columns:
        return {}
    count = sum(re.fullmatch(r"target_\d+", c) is not None for c in columns)
    if len(given) != count:
        raise InputError(f"classes= names {len(given)} labels of {count}")
    matches = [re.fullmatch(r"(.*(?:target|prediction).*)_(\d+)", c) for c in columns]
    return {m[0]: f"{m[1]} {given[int(m[2])] or '(empty)'}" for m in matches if m}


def named(value: Any, names: Sequence[str] | None) -> str:
    """A class by its name, where it has one; 1 for 1.0."""
    if names is not None and int(value) < len(names):
        return names[int(value)]
    whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value) if whole else value)


def columns_of(rows: Shown, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Each column of the table: its name, whether it holds numbers, and its values; classes by
    their names."""
    first = [name for name in FIRST if name in rows.table]
    last = [name for name in LAST if name in rows.table]
    between = [name for name in rows.table if name not in (*first, *last, *rows.inputs)]
    columns = []
    for name in [*[*first, *between, *last][:MOST_COLUMNS], *rows.inputs]:
        values = rows.table[name]
        if names is not None and name in OF_CLASSES:
            values = values.map(lambda v: named(v, names))
        numbers = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
        shown = [_cell(v) for v in values]
        columns.append({"name": str(name), "number": bool(numbers), "values": shown})
    return columns


def colours_of(rows: Shown) -> list[str]:
    """The columns worth colouring by: the region, classes, sources, and a few numbers."""
    first = ["region", *(c for c in ("suspicious", "leverage") if c in rows.table)]
    for name in rows.table.drop(columns=list(rows.inputs)):
        distinct = len(set(rows.table[name].map(str))) if name not in first else 0
        words = not pd.api.types.is_float_dtype(rows.table[name])
        if words and name != "index" and 2 <= distinct <= 50:
            first.append(str(name))
    return first


def filters_of(rows: Shown, colours: Sequence[str]) -> list[str]:
    """The columns to choose a value of: few values, and what somebody would ask for."""
    answers = ("region", "prediction", "left_out_prediction", "leverage")
    return [name for name in colours if name not in answers and len(set(rows.table[name])) > 1]


def pictures_of(
    findings: Findings, rows: Shown, neighbours: Neighbours | None, images: Any
) -> list[np.ndarray] | None:
    """Thumbnails of the rows, then of the test examples asked about; None where there are none.

    Raises:
        InputError, DataError: something among ``images`` is no image.
    """
    images = images_of(findings.task) if images is None else images
    if images is None:
        return None
    pictures = [picture_of(images, int(i)) for i in rows.index]
    if neighbours is not None and (theirs := images_of(neighbours.test)) is not None:
        pictures += [picture_of(theirs, int(i)) for i in neighbours.chosen]
    return pictures


def tests_of(
    rows: Shown, neighbours: Neighbours | None, names: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Each test example with its target, answer and loss, and rows and nats of its neighbours."""
    if neighbours is None:
        return []
    top, chosen = neighbours.top, neighbours.chosen
    known = top.pairs.described(torch.arange(len(chosen)), test=True)
    told = []
    for k, index in enumerate(chosen.tolist()):
        sides = {}
        for side, (at, by) in zip(("helpful", "harmful"), top.sides(k), strict=True):
            told_of = zip(at.tolist(), by.tolist(), strict=True)
            sides[side] = [[rows.place(i), _cell(v)] for i, v in told_of]
        about = {
            name: named(values[k].item(), names)
            if names is not None and name in OF_CLASSES
            else _words(values[k].tolist())
            for name, values in known.items()
        }
        loss = _cell(float(neighbours.losses[k]))
        text = _text_of(neighbours.test, index)
        inputs = [[n, _cell(v)] for n, v in neighbours.test.examples.row(index).items()]
        told.append(
            {"index": index, "loss": loss, "text": text, "inputs": inputs, **about, **sides}
        )
    return told


def suspects_of(findings: Findings, rows: Shown) -> list[int]:
    """Rows of the gallery, the most suspicious first."""
    return [rows.place(i) for i in most_suspicious(findings.table, GALLERY)["index"]]


def proposals_of(findings: Findings, rows: Shown, suspects: Sequence[int]) -> list[Any]:
    """The new target of each suspect, as :func:`blr_analysis.what_if` takes it: its left-out
    prediction, of counts the nearest one; None for several targets."""
    if "left_out_prediction" not in rows.table:
        return [None] * len(suspects)
    counts = isinstance(findings.task.likelihood.kind, Poisson)
    said = rows.table["left_out_prediction"].to_numpy()[list(suspects)]
    return [_cell(v) for v in (said.round() if counts else said)]


def classes_of(findings: Findings, names: Sequence[str] | None = None) -> list[Any]:
    """The labels that an example has or would be given, and how they are shown; none for
    regression and several targets."""
    table = findings.table
    if "suspicious" not in table or "target" not in table:
        return []
    labels = sorted({_cell(v) for v in table[["target", "left_out_prediction"]].to_numpy().flat})
    return [[v, v if names is None else names[int(v)]] for v in labels]


def regions_of(findings: Findings) -> list[dict[str, Any]]:
    """Every region with its size and meaning."""
    counts = findings.memory.counts()
    return [{"name": r, "n": n, "means": REGION_MEANS[r]} for r, n in counts.items()]


def _text_of(task: Task, index: int) -> str | None:
    words = (v[index] for v in task.metadata.values())
    return next((_short(w, TEXT[1]) for w in words if isinstance(w, str) and len(w) > LONG), None)


def _words(value: Any) -> str:
    return ", ".join(map(plain, value)) if isinstance(value, list) else plain(value)


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


def sheet_of(pictures: Sequence[np.ndarray], budget: int = BUDGET) -> Thumbnails:
    """Pictures [H, W] or [H, W, 3] of bytes on one sheet of at most ``budget`` bytes.

    Small pictures are kept to the pixel while they fit; larger ones shrink, and where there are
    very many, tiles become smaller and coarser.
    """
    largest = max(max(p.shape[:2]) for p in pictures)
    edges = [e for e in EDGES if e < largest] or [EDGES[-1]]
    edges = [largest, *edges] if largest <= EDGES[0] else edges
    some = pictures[:: math.ceil(len(pictures) / SAMPLE)]
    share = budget * len(some) / len(pictures)
    *ways, last = [(e, o) for e in edges for o in WAYS]
    for edge, options in ways:
        if len(some) < len(pictures) and len(_written(some, edge, options)[0]) > share:
            continue
        written, across = _written(pictures, edge, options)
        if len(written) <= budget:
            return Thumbnails(_uri(written), edge, across, len(pictures))
    written, across = _written(pictures, *last)
    return Thumbnails(_uri(written), last[0], across, len(pictures))


def picture_of(images: Any, index: int) -> np.ndarray:
    """Example ``index`` as bytes [H, W] or [H, W, 3], whatever shape and range it comes in.

    Raises:
        InputError: it is no image.
        DataError: bytes that no image format knows.
    """
    item = images[index] if isinstance(images, Sequence) and index < len(images) else None
    if isinstance(item, bytes | bytearray):
        try:
            item = Image.open(io.BytesIO(item))
            item.load()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"images[{index}] holds bytes that are no image") from error
    if isinstance(item, Image.Image):
        images = {index: np.asarray(item.convert("L" if item.mode in ("1", "L") else "RGB"))}
    picture = image_of(images, index)
    if picture.ndim == 3 and picture.shape[-1] == 4:
        alpha = picture[..., 3:]
        picture = picture[..., :3] * alpha + (1 - alpha)
    return np.round(255 * picture).clip(0, 255).astype(np.uint8)


def _written(
    pictures: Sequence[np.ndarray], edge: int, options: dict[str, Any]
) -> tuple[bytes, int]:
    """The sheet's bytes, and how many tiles stand in a row."""
    sheet, across = _laid_out(pictures, edge)
    file = io.BytesIO()
    sheet.save(file, "WEBP", method=2, **options)
    return file.getvalue(), across


def _laid_out(pictures: Sequence[np.ndarray], edge: int) -> tuple[Image.Image, int]:
    across = min(math.ceil(math.sqrt(len(pictures))), 16383 // edge)
    mode = "RGB" if any(p.ndim == 3 for p in pictures) else "L"
    sheet = Image.new(mode, (across * edge, math.ceil(len(pictures) / across) * edge), 128)
    for k, picture in enumerate(pictures):
        tile = Image.fromarray(picture)
        scale = edge / max(tile.size)
        if scale != 1:
            size = max(1, round(scale * tile.width)), max(1, round(scale * tile.height))
            smooth = Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST
            tile = tile.resize(size, smooth)
        left, top = (edge - tile.size[0]) // 2, (edge - tile.size[1]) // 2
        sheet.paste(tile, (k % across * edge + left, k // across * edge + top))
    return sheet, across


def _uri(written: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(written).decode()

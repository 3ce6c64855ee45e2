"""Texts and their labels from a file: .jsonl, .csv, .tsv, .parquet or .txt, and nothing guessed.

A file is read for the columns that are asked for; those that are not named are looked for under
the names that datasets commonly give them, and where several or none are there, the error says
which columns the file has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blr_analysis.checks import path_of, some
from blr_analysis.errors import DataError
from blr_analysis.huggingface.formats import READERS, readable

TEXT_NAMES = (
    ("text",),
    ("sentence",),
    ("content",),
    ("review",),
    ("document",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
)
LABEL_NAMES = ("label", "labels", "target", "class")


@dataclass(frozen=True)
class Texts:
    """What a file says.

    Attributes:
        path: the file.
        texts: one text, or a pair, per example.
        labels: as they stand in the file; None where none were asked for.
        columns: the names of the text columns and, where asked for, of the label.
        places: where each example stands, in words ("line 3").
    """

    path: Path
    texts: list[tuple[str, ...]]
    labels: list[Any] | None
    columns: tuple[str, ...]
    places: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.texts)


def read_texts(
    path: str | os.PathLike[str],
    *,
    text: Sequence[str] | None = None,
    label: str | None = None,
    labelled: bool = False,
) -> Texts:
    """The texts of a file in UTF-8, and their labels if ``labelled``.

    ``.jsonl``: an object per line. ``.csv``: a header, commas, double quotes around fields.
    ``.tsv``: a header, tabs, no quotes. ``.parquet``. ``.txt``: a text per line, without labels;
    blank lines are passed over.

    Args:
        text: the text's column, or the two columns of a pair; None: by its usual names.
        label: the label's column; None: by its usual names.
        labelled: whether labels are needed.

    Raises:
        StorageError: the file is not there or cannot be read.
        DataError: another ending, no examples, no such column or several that could be meant,
            something that is not text, broken lines, other encodings than UTF-8.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write('sentence,label\\n"a, b",pos\\nc,neg\\n')
        ...     file.flush()
        ...     found = read_texts(file.name, labelled=True)
        >>> found.texts, found.labels
        ([('a, b',), ('c',)], ['pos', 'neg'])
    """
    place = Path(path_of(path)).expanduser()
    read = READERS.get(place.suffix.lower())
    if read is None:
        raise DataError(
            f"{str(place)!r} ends in none of {', '.join(READERS)}: convert it, a .jsonl file of "
            '{"text": …, "label": …} lines for example'
        )
    names, columns = read
    with readable(place):
        held = names(place)
        chosen = _chosen_text(place, held, text)
        if labelled:
            chosen = (*chosen, _chosen_label(place, held, label))
        found, numbers = columns(place, chosen)
    values = [found[name] for name in chosen]
    labels = values.pop() if labelled else None
    unit = "row" if place.suffix.lower() == ".parquet" else "line"

    def where(i: int) -> str:
        return f"{unit} {numbers[i]} of {str(place)!r}"

    if not numbers:
        raise DataError(f"{str(place)!r} holds no examples")
    texts = [tuple(row) for row in zip(*values, strict=True)]
    for i, row in enumerate(texts):
        for value in row:
            if not isinstance(value, str):
                raise DataError(f"{where(i)} has {value!r} where its text should be; mend it")
    return Texts(place, texts, labels, chosen, where)


def class_indices(texts: Texts, label2id: Mapping[str, int], classes: int) -> list[int]:
    """Each label as a class of the model: a name that it knows, or a number 0 … classes − 1.

    Raises:
        DataError: a label that is neither; the line and the names that the model knows are said.
    """
    assert texts.labels is not None
    known: dict[Any, int] = {}
    found = []
    for i, label in enumerate(texts.labels):
        key = (type(label), str(label))
        if key not in known:
            index = _class_index(label, label2id)
            if index is None or not 0 <= index < classes:
                raise DataError(
                    f"{texts.places(i)} has the label {label!r}: expected 0 … {classes - 1} or "
                    f"a name that the model's config.label2id knows ({some(list(label2id))})"
                )
            known[key] = index
        found.append(known[key])
    return found


def _class_index(label: Any, label2id: Mapping[str, int]) -> int | None:
    if isinstance(label, str):
        if label in label2id:
            return int(label2id[label])
        text = label.strip()
        return int(text) if text.isascii() and text.isdigit() else None
    if isinstance(label, bool) or not isinstance(label, (int, float)):
        return None
    return int(label) if float(label).is_integer() else None


def _chosen_text(
    path: Path, held: Sequence[str], text: Sequence[str] | str | None
) -> tuple[str, ...]:
    if text is not None:
        named = (text,) if isinstance(text, str) else tuple(text)
        if not 1 <= len(named) <= 2:
            raise DataError(f"a text has one column, or two for a pair, got {list(named)}")
        _check_held(path, held, named)
        return named
    if path.suffix.lower() == ".txt":
        return ("text",)
    matches = [names for names in TEXT_NAMES if set(names) <= set(held)]
    # A pair that contains a lone name (question + sentence) is what is meant.
    matches = [m for m in matches if not any(set(m) < set(other) for other in matches)]
    if len(matches) == 1:
        return matches[0]
    if not held:
        raise DataError(f"{str(path)!r} holds no examples")
    what = "several columns that could be the text" if matches else "no column of a usual name"
    raise DataError(
        f"{str(path)!r} has {what}; its columns are {some(list(held), 12)}: name the text's "
        "with text= (--text), two for a pair"
    )


def _chosen_label(path: Path, held: Sequence[str], label: str | None) -> str:
    if path.suffix.lower() == ".txt":
        raise DataError(
            f"{str(path)!r} is plain text without labels, which are needed here; give a .jsonl or "
            ".csv file, or ask for the Fisher with sampled labels, which needs none (kind='mc')"
        )
    if label is not None:
        _check_held(path, held, (label,))
        return label
    matches = [name for name in LABEL_NAMES if name in held]
    if len(matches) == 1:
        return matches[0]
    what = "several columns that could be" if matches else "no column of a usual name for"
    raise DataError(
        f"{str(path)!r} has {what} the label; its columns are {some(list(held), 12)}: name it "
        "with label= (--label)"
    )


def _check_held(path: Path, held: Sequence[str], asked: Sequence[str]) -> None:
    missing = [name for name in asked if name not in held]
    if missing:
        raise DataError(
            f"{str(path)!r} has no column {some(missing)}; its columns are {some(list(held), 12)}"
        )

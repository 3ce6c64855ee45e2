"""Texts as what a model takes: token ids, truncated, padded batch by batch, sorted by length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from blr_analysis.checks import positive_int
from blr_analysis.errors import DataError, InputError
from blr_analysis.huggingface.data import Texts
from blr_analysis.huggingface.models import LONGEST, Pretrained
from blr_analysis.task import Task

IGNORED = -100
AT_ONCE = 1000  # texts that the tokenizer is given together
Item = tuple[dict[str, list[int]], int | None]  # a model's inputs as lists of ids, and a label


@dataclass(frozen=True)
class Encoded:
    """Texts as token ids, in the order of their lengths.

    Attributes:
        rows: the model's inputs of each example, as lists of ids.
        labels: a class per example, or None for language models, whose labels are in the rows, or
            else the ids.
        truncated: how many texts were longer than ``max_length``.
    """

    rows: list[dict[str, list[int]]]
    labels: list[int] | None
    pad_id: int
    max_length: int
    truncated: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Item:
        return self.rows[i], None if self.labels is None else self.labels[i]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each example."""
        return [len(row["input_ids"]) for row in self.rows]

    def collate(
        self, items: Sequence[tuple[dict[str, list[int]], int | None]]
    ) -> dict[str, Tensor]:
        """A batch padded on the right to its longest text, with ``labels``.

        >>> rows = [{"input_ids": [5, 6]}, {"input_ids": [7]}]
        >>> Encoded(rows, None, 0, 8, 0).collate([(row, None) for row in rows])["labels"]
        tensor([[   5,    6],
                [   7, -100]])
        """
        rows = [row for row, _ in items]
        longest = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, fill: int) -> Tensor:
            return torch.tensor([r[name] + [fill] * (longest - len(r[name])) for r in rows])

        fills = {"input_ids": self.pad_id, "labels": IGNORED}
        batch = {name: padded(name, fills.get(name, 0)) for name in rows[0]}
        if self.labels is None:
            batch.setdefault("labels", padded("input_ids", IGNORED))
        else:
            batch["labels"] = torch.tensor([label for _, label in items])
        return batch


def encode(
    texts: Texts,
    loaded: Pretrained,
    labels: Sequence[int] | None = None,
    *,
    max_length: int | None = None,
    chosen: Sequence[int] | None = None,
) -> Encoded:
    """Token ids of the texts (or of the ``chosen`` ones), sorted by length.

    Sorted, so that batches of neighbours are padded little; the sums over examples that are asked
    for do not depend on the order.

    Args:
        labels: a class per text for classifiers; None where none are needed.
        max_length: tokens that are kept of a text (of a pair: of both); default: what the model
            reads, at most 512.

    Raises:
        InputError: a ``max_length`` that the model cannot read.
        DataError: a pair for a language model; a text of less than two tokens for one.
    """
    most = read_length(loaded, max_length)
    causal = loaded.task == "causal_lm"
    if causal and len(texts.texts[0]) > 1:
        raise DataError(
            f"a language model reads one text, not {', '.join(texts.columns)}: name one with "
            "text= (--text)"
        )
    order = list(range(len(texts))) if chosen is None else list(chosen)
    rows, truncated = _tokenised(texts, loaded, order, most)
    for i, row in zip(order, rows, strict=True):
        count = len(row["input_ids"])
        if count < 1 + causal:
            raise DataError(
                f"{texts.place(i)} has {count} token(s), which leaves nothing to predict; drop it"
            )
    if not causal and labels is None:
        labels = [0] * len(texts)  # stands where a label must; whoever asks for none uses none
    by_length = sorted(range(len(order)), key=lambda k: len(rows[k]["input_ids"]))
    return Encoded(
        [rows[k] for k in by_length],
        None if causal or labels is None else [labels[order[k]] for k in by_length],
        loaded.pad_id,
        most,
        truncated,
    )


def read_length(loaded: Pretrained, max_length: int | None) -> int:
    """Tokens that are read of a text.

    Raises:
        InputError: more than the model reads.
    """
    if max_length is not None and positive_int("max_length", max_length) > loaded.longest:
        raise InputError(
            f"max_length={max_length} is more than the {loaded.longest} tokens that "
            f"{str(loaded.folder)!r} reads"
        )
    return max_length or min(loaded.longest, LONGEST)


def _tokenised(
    texts: Texts, loaded: Pretrained, order: Sequence[int], most: int
) -> tuple[list[dict[str, list[int]]], int]:
    rows: list[dict[str, list[int]]] = []
    truncated = 0
    for start in range(0, len(order), AT_ONCE):
        part = [texts.texts[i] for i in order[start : start + AT_ONCE]]
        encoded = _ids(loaded, part, truncation=False)
        long = [k for k, row in enumerate(encoded) if len(row["input_ids"]) > most]
        if long:
            cut = _ids(loaded, [part[k] for k in long], truncation=True, max_length=most)
            for k, row in zip(long, cut, strict=True):
                encoded[k] = row
        truncated += len(long)
        rows += encoded
    return rows, truncated


def _ids(loaded: Pretrained, part: list[tuple[str, ...]], **how: Any) -> list[dict[str, list[int]]]:
    columns = [list(column) for column in zip(*part, strict=True)]
    encoded = loaded.tokenizer(*columns, verbose=False, **how)
    names = [n for n in loaded.inputs if n in encoded]
    return [{n: list(encoded[n][k]) for n in names} for k in range(len(part))]


def task_of(encoded: Encoded, loaded: Pretrained, *, batch_size: int = 8) -> Task:
    """The task of these texts under their model."""
    loader = DataLoader(encoded, batch_size=batch_size, collate_fn=encoded.collate)  # type: ignore[arg-type]
    return Task(loaded.model, loader, likelihood=loaded.likelihood, batch_size=batch_size)

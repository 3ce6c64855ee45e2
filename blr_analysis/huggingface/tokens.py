"""Examples as token ids: a dataset whose batches are padded to their longest row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from blr_analysis.checks import positive_int
from blr_analysis.errors import DataError, InputError
from blr_analysis.huggingface.models import LONGEST, Pretrained
from blr_analysis.task import Task

IGNORED = -100
BATCH = 8
KNOWN_BY = 256  # texts whose ids tell tokenizers apart


@dataclass(frozen=True)
class Tokens:
    """Examples as token ids: a dataset whose batches are padded on the right.

    Attributes:
        rows: the model's inputs of each example as lists of ids, and "labels": a list as well, or
            a class.
        pad_id: what fills up short rows.
        max_length: tokens that are kept of a row; None: all.
        cut: how many rows were longer.
        tokenizer: what made the ids.
    """

    rows: list[dict[str, Any]]
    pad_id: int
    max_length: int | None = None
    cut: int = 0
    tokenizer: Any = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch padded to its longest row.

        >>> rows = [{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}]
        >>> Tokens(rows, 0).collate(rows)["labels"]
        tensor([[-100,    6],
                [   7, -100]])
        """
        longest = max(len(row["input_ids"]) for row in rows)
        fills = {"input_ids": self.pad_id, "labels": IGNORED}

        def column(name: str) -> Tensor:
            values = [row[name] for row in rows]
            if isinstance(values[0], list):
                fill = fills.get(name, 0)
                values = [ids + [fill] * (longest - len(ids)) for ids in values]
            return torch.tensor(values)

        return {name: column(name) for name in rows[0]}

    def task(self, loaded: Pretrained, **about: Any) -> Task:
        """These examples under their model; what else its :class:`~blr_analysis.Task` is told."""
        how: Any = {"batch_size": BATCH, "collate_fn": self.collate}
        loader = DataLoader(self, **how)  # type: ignore[arg-type]
        about = {"likelihood": loaded.likelihood, "batch_size": BATCH, **about}
        return Task(loaded.model, loader, **about)


def ids_known_by(
    tokenizer: Any, texts: Sequence[str], size: int | None = None
) -> dict[str, int | str]:
    """What tells a tokenizer from another: the sha256 of its first ``size`` tokens (None: of all)
    and of the ids of some texts. Tokens that are added later count for nothing."""
    size = len(tokenizer) if size is None else size
    ids = tokenizer(list(texts[:KNOWN_BY]), verbose=False)["input_ids"] if texts else []
    names = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    digest = hashlib.sha256(json.dumps([names, ids]).encode()).hexdigest()
    return {"tokens": size, "sha256": digest}


def check_known(loaded: Pretrained, ids: Sequence[int], place: str) -> None:
    """Raise :class:`DataError` where the model has no such token."""
    words = len(loaded.model.get_input_embeddings().weight)  # type: ignore[operator]
    if max(ids) >= words:
        raise DataError(
            f"{place} has token {max(ids)}, the model {words}: the tokenizer is another's"
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

"""Texts, and questions with their answers, as the task of a language model, in the file's order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from blr_analysis.checks import path_of
from blr_analysis.errors import DataError, InputError
from blr_analysis.huggingface.data import read_file, read_texts
from blr_analysis.huggingface.models import LONGEST, Pretrained
from blr_analysis.huggingface.tokens import IGNORED
from blr_analysis.task import Task

PROMPTS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "completion", "response", "output")
SHOWN = 200  # characters of a text that are kept beside its example


@dataclass(frozen=True)
class Tokens:
    """Rows of token ids and labels, padded batch by batch."""

    rows: list[dict[str, list[int]]]
    pad_id: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return self.rows[i]

    def collate(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
        """A batch padded on the right.

        >>> rows = [{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}]
        >>> Tokens(rows, 0).collate(rows)["labels"]
        tensor([[-100,    6],
                [   7, -100]])
        """
        longest = max(len(row["input_ids"]) for row in rows)
        fills = {"input_ids": self.pad_id, "labels": IGNORED}
        return {
            name: torch.tensor(
                [r[name] + [fills.get(name, 0)] * (longest - len(r[name])) for r in rows]
            )
            for name in rows[0]
        }


def language_task(
    loaded: Pretrained,
    path: str | os.PathLike[str],
    *,
    text: str | None = None,
    max_length: int | None = None,
    batch_size: int = 8,
) -> Task:
    """A file of texts, or of prompts and answers, whose loss is that of the answer alone.

    Columns "prompt" (question, instruction) and "answer" (completion, response, output) make pairs;
    otherwise the texts are read as :func:`blr_analysis.huggingface.data.read_texts` does.

    Args:
        text: the column of the texts.
        max_length: tokens that are kept; None: what the model reads, at most 512.

    Raises:
        InputError: the model is no language model; a ``max_length`` that it cannot read.
        DataError: the file, its columns; an empty text or answer; a prompt that leaves no room for
            its answer.
        StorageError: the file is not there.
    """
    if loaded.task != "causal_lm":
        raise InputError(f"{str(loaded.folder)!r} is no causal language model: give its Task")
    most = max_length or min(loaded.longest, LONGEST)
    if most > loaded.longest:
        raise InputError(f"max_length={most} is more than the {loaded.longest} that it reads")
    pairs = None if text is not None else _pairs(Path(path_of(path)).expanduser())
    if pairs is None:
        texts = read_texts(path, text=text)
        pairs = [("", row[0]) for row in texts.texts]
    rows = [_row(loaded, *pair, most, place=f"row {i}") for i, pair in enumerate(pairs, start=1)]
    tokens = Tokens(rows, loaded.pad_id)
    loader = DataLoader(tokens, batch_size=batch_size, collate_fn=tokens.collate)  # type: ignore[arg-type]
    shown = {"text": [" ".join((a + b).split())[:SHOWN] for a, b in pairs]}
    return Task(loaded.model, loader, likelihood="causal_lm", batch_size=batch_size, metadata=shown)


def _pairs(path: Path) -> list[tuple[str, str]] | None:
    table = read_file(path)
    names = [next((n for n in usual if n in table), None) for usual in (PROMPTS, ANSWERS)]
    if None in names:
        return None
    rows = list(zip(*(table[name].tolist() for name in names), strict=True))
    for i, row in enumerate(rows, start=1):
        if not all(isinstance(value, str) and value.strip() for value in row):
            raise DataError(f"row {i} of {str(path)!r} has an empty {names[0]} or {names[1]}")
    return rows


def _row(
    loaded: Pretrained, prompt: str, answer: str, most: int, *, place: str
) -> dict[str, list[int]]:
    """Ids of prompt and answer together, and labels of the answer alone."""
    encoded: Any = loaded.tokenizer(prompt + answer, verbose=False)
    ids = list(encoded["input_ids"])
    start = 0
    if prompt:
        before = list(loaded.tokenizer(prompt, verbose=False)["input_ids"])
        start = next((k for k, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), 0)
        start = start or min(len(before), len(ids))
    if len(ids) < 2 or start >= min(len(ids), most):
        raise DataError(f"{place} leaves nothing to predict in {most} tokens; drop or shorten it")
    if max(ids) >= loaded.config.vocab_size:
        raise DataError(f"{place} has token {max(ids)}, which the model does not have")
    row = {n: list(encoded[n])[:most] for n in loaded.inputs if n in encoded}
    return {**row, "labels": ([IGNORED] * start + ids[start:])[:most]}

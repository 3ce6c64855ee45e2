"""Rows of token ids: checked, labelled, and padded into batches of their model's task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from blr_analysis.errors import DataError
from blr_analysis.huggingface.chats import (
    IGNORED,
    Ids,
    common_start,
    ids_of,
    labelled,
)
from blr_analysis.huggingface.models import Pretrained
from blr_analysis.task import Task

SHOWN = 200  # characters of a text that become metadata of its example
BATCH = 8  # examples of a batch


@dataclass(frozen=True)
class Tokens:
    """Examples as token ids: a dataset whose batches are padded.

    Attributes:
        rows: the model's inputs of each example as lists of ids, and "labels": a list of ids, or
            a class.
        pad_id: the token that fills up short rows.
        max_length: the number of tokens that rows were cut to; None: no row was cut.
        cut: the number of rows that were cut.
        tokenizer: the tokenizer of the ids.
        side: the side on which short rows are filled up, "right" or "left".
        mark: tells the data and how they were read from others; None where no mark does. See
            :mod:`~blr_analysis.huggingface.recognised`.
    """

    rows: Sequence[dict[str, Any]]
    pad_id: int
    max_length: int | None = None
    cut: int = 0
    tokenizer: Any = None
    side: str = "right"
    mark: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]

    def length_of_example(self, i: int) -> int:
        """The ids of an example, those of all its inputs and labels together."""
        return sum(len(ids) for ids in self.rows[i].values() if isinstance(ids, Sequence))

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch padded to its longest row.

        >>> rows = [{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}]
        >>> Tokens(rows, 0).collate(rows)["labels"]
        tensor([[-100,    6],
                [   7, -100]])
        """
        return {name: self._column(name, [row[name] for row in rows]) for name in rows[0]}

    def _column(self, name: str, values: Sequence[Any]) -> Tensor:
        """One input of a batch, padded; classes are stacked."""
        tensors = [torch.tensor(value) for value in values]
        are_classes = tensors[0].ndim == 0
        if are_classes:
            return torch.stack(tensors)
        fill = {"input_ids": self.pad_id, "labels": IGNORED}.get(name, 0)
        return pad_sequence(tensors, batch_first=True, padding_value=fill, padding_side=self.side)

    def task(self, loaded: Pretrained, **settings: Any) -> Task:
        """The task of a model on these examples.

        Args:
            settings: further arguments of :class:`~blr_analysis.Task`.
        """
        padded: Any = replace(self, side=padding_side(loaded, self))
        loader: Any = DataLoader(padded, batch_size=BATCH, collate_fn=padded.collate)
        settings.setdefault("likelihood", loaded.likelihood)
        task = Task(loaded.model, loader, batch_size=BATCH, **settings)
        task.chunk_size = None  # gradients of as many texts as the memory for a chunk holds
        return task


def padding_side(loaded: Pretrained, tokens: Tokens) -> str:
    """The side on which short rows are filled up.

    It is "right", unless the tokenizer says "left" and filling up on the right changes the model's
    outputs (XLNet reads the last position of a text).
    """
    side = getattr(loaded.tokenizer, "padding_side", "right")
    if side == "right" or loaded.task == "causal_lm":
        return "right"  # in causal models, later tokens do not change a text's outputs
    by_length = sorted(tokens.rows, key=lambda row: len(row["input_ids"]))
    shortest = by_length[0]
    longest = by_length[-1]
    if len(shortest["input_ids"]) == len(longest["input_ids"]):
        return "right"
    alone = _logits(loaded, tokens, [shortest])
    padded = _logits(loaded, tokens, [shortest, longest])
    return "right" if torch.allclose(alone[0], padded[0], rtol=1e-3, atol=1e-5) else side


def _logits(loaded: Pretrained, tokens: Tokens, rows: Sequence[dict[str, Any]]) -> Tensor:
    """The model's outputs for some rows, as one batch."""
    device = next(loaded.model.parameters()).device
    batch = {name: column.to(device) for name, column in tokens.collate(rows).items()}
    batch.pop("labels")
    with torch.no_grad():
        return loaded.model(**batch).logits


def metadata_of(table: Any, columns: Sequence[str], words: Sequence[str]) -> dict[str, list[Any]]:
    """The starts of the texts, and the columns of words and numbers that are no texts."""
    metadata = {"text": [" ".join(text.split())[:SHOWN] for text in words]}
    for name in table:
        values = table[name].tolist()
        is_plain = all(isinstance(value, str | int | float) for value in values)
        if name not in {*columns, "text"} and is_plain:
            metadata[str(name)] = values
    return metadata


def words_of_turns(turns: Sequence[Mapping[str, Any]]) -> str:
    """The text of a conversation."""
    return " ".join(str(turn.get("content") or "") for turn in turns)


def encoded_answer(loaded: Pretrained, prompt: str, answer: str) -> dict[str, Ids]:
    """The ids of a prompt with its answer; the answer's tokens are the labels."""
    row = ids_of(loaded, prompt + answer)
    is_closed = row["input_ids"][-1:] == [loaded.tokenizer.eos_token_id]
    if loaded.closing and not is_closed:
        row = ids_of(loaded, prompt + answer + loaded.closing)
    start = common_start(ids_of(loaded, prompt)["input_ids"], row["input_ids"])
    return labelled(row, [(start, len(row["input_ids"]))])


def check_ids(loaded: Pretrained, row: dict[str, Ids], max_length: int | None, place: str) -> None:
    """Raise :class:`DataError` where the model cannot read a row, or no token of it counts."""
    ids = row["input_ids"]
    if max_length is None and len(ids) > loaded.longest:
        raise DataError(
            f"{place} has {len(ids):,} tokens, the model reads {loaded.longest:,}: cut with "
            "max_length (--max-length)"
        )
    predicted_labels = row["labels"][1:max_length]  # the first token is not predicted
    if set(predicted_labels) <= {IGNORED}:
        raise DataError(f"{place} leaves nothing to predict; drop or shorten it")
    vocabulary = len(loaded.model.get_input_embeddings().weight)  # type: ignore[operator]
    if max(ids) >= vocabulary:
        raise DataError(
            f"{place} has token {max(ids)}, but the model has {vocabulary} tokens: use the "
            "model's own tokenizer"
        )

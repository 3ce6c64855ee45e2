"""Texts, questions with their answers, and conversations as token ids, in the order of their rows.

What has an answer is scored on the answer alone, as trainers mask prompts: the tokens of
"prompt" + "answer" after those of "prompt"; of "messages", written by the tokenizer's chat
template, those of every assistant's turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from blr_analysis.checks import positive_int
from blr_analysis.errors import DataError, InputError
from blr_analysis.huggingface.chats import (
    IGNORED,
    Ids,
    common_start,
    encoded_chat,
    ids_of,
    labelled,
    turns_of,
)
from blr_analysis.huggingface.data import places_of, read_rows, text_columns
from blr_analysis.huggingface.models import Pretrained
from blr_analysis.runs import training_of
from blr_analysis.task import Task

MESSAGES = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "completion", "response", "output")
SHOWN = 200  # characters of a text that are kept beside its example
LONGEST = 512  # tokens that are read of a text at most, unless more are asked for
BATCH = 8
N_RECOGNISED = 256  # texts whose ids tell tokenizers apart


@dataclass(frozen=True)
class Tokens:
    """Examples as token ids: a dataset whose batches are padded.

    Attributes:
        rows: the model's inputs of each example as lists of ids, and "labels": a list as well, or
            a class.
        pad_id: what fills up short rows.
        max_length: tokens that are kept of a row; None: all.
        cut: how many rows were longer.
        tokenizer: what made the ids.
        side: where short rows are filled up, "right" or "left".
    """

    rows: list[dict[str, Any]]
    pad_id: int
    max_length: int | None = None
    cut: int = 0
    tokenizer: Any = None
    side: str = "right"

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
        return {name: self._column(name, [row[name] for row in rows]) for name in rows[0]}

    def _column(self, name: str, values: Sequence[Any]) -> Tensor:
        tensors = [torch.tensor(value) for value in values]
        if not tensors[0].ndim:
            return torch.stack(tensors)
        fill = {"input_ids": self.pad_id, "labels": IGNORED}.get(name, 0)
        return pad_sequence(tensors, batch_first=True, padding_value=fill, padding_side=self.side)

    def task(self, loaded: Pretrained, **settings: Any) -> Task:
        """These examples under their model.

        Args:
            settings: what else :class:`~blr_analysis.Task` takes.
        """
        padded: Any = replace(self, side=padding_side(loaded, self))
        loader: Any = DataLoader(padded, batch_size=BATCH, collate_fn=padded.collate)
        settings.setdefault("likelihood", loaded.likelihood)
        return Task(loaded.model, loader, batch_size=BATCH, **settings)


def padding_side(loaded: Pretrained, tokens: Tokens) -> str:
    """Where a short row is filled up: on the right, unless its output changes there and the
    tokenizer says left (XLNet reads a text's last position)."""
    by_length = sorted(tokens.rows, key=lambda row: len(row["input_ids"]))
    shortest = by_length[0]
    longest = by_length[-1]
    lengths_differ = len(shortest["input_ids"]) < len(longest["input_ids"])
    side = getattr(loaded.tokenizer, "padding_side", "right")
    if side == "right" or loaded.task == "causal_lm" or not lengths_differ:
        return "right"  # in causal models nothing behind a text changes its outputs
    alone = _logits(loaded, tokens, [shortest])
    padded = _logits(loaded, tokens, [shortest, longest])
    return "right" if torch.allclose(alone[0], padded[0], rtol=1e-3, atol=1e-5) else side


def _logits(loaded: Pretrained, tokens: Tokens, rows: Sequence[dict[str, Any]]) -> Tensor:
    device = next(loaded.model.parameters()).device
    batch = {name: column.to(device) for name, column in tokens.collate(rows).items()}
    batch.pop("labels")
    with torch.no_grad():
        return loaded.model(**batch).logits


def ids_known_by(
    tokenizer: Any, texts: Sequence[str], size: int | None = None
) -> dict[str, int | str]:
    """What tells a tokenizer from another: the sha256 of its first ``size`` tokens (None: of all)
    and of the ids of some texts. Tokens that are added later count for nothing."""
    size = len(tokenizer) if size is None else size
    texts = list(texts[:N_RECOGNISED])
    ids = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    names = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    digest = hashlib.sha256(json.dumps([names, ids]).encode()).hexdigest()
    return {"tokens": size, "sha256": digest}


def read_length(loaded: Pretrained, max_length: int | None) -> int:
    """Tokens that are read of a text.

    Raises:
        InputError: more than the model reads.
    """
    if max_length is None:
        return min(loaded.longest, LONGEST)
    if positive_int("max_length", max_length) > loaded.longest:
        raise InputError(f"max_length={max_length}, but the model reads {loaded.longest} tokens")
    return max_length


def language_task(
    loaded: Pretrained,
    data: Any,
    *,
    text: str | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    max_length: int | None = None,
    online: bool = False,
) -> Task:
    """Texts, prompts with answers, or conversations; of the last two the answers' loss alone.

    Columns "messages" (conversations) hold lists of {"role": …, "content": …}, or of {"from": …,
    "value": …}; "prompt" (question, instruction) and "answer" (completion, response, output) are
    texts, or both such lists; an "instruction" is followed by a blank line and its "input", where
    that is not empty, unless the rows have a "text" of their own, which is read then; otherwise the
    texts are those of the one column with a usual name. Rows of "chosen" and "rejected" are
    preference pairs, see :mod:`~blr_analysis.huggingface.preferences`. Other columns of words and
    numbers are the task's metadata.

    Args:
        data: a file, a folder of ``Dataset.save_to_disk``, a ``datasets.Dataset``, or what else
            :mod:`~blr_analysis.huggingface.data` reads, such as "org/dataset:train[:500]".
        text: the column of the texts.
        prompt, answer: the columns of both, under other names.
        max_length: tokens that are kept of longer rows; None: all, and a row that is longer than
            what the model reads is an error.
        online: fetch data from the Hub, where their name is no file or folder here.

    Raises:
        InputError: the model is no language model; a ``max_length`` that it cannot read.
        DataError: the file, its columns; an empty text or answer; a row that is too long, or whose
            prompt leaves no room for its answer; ids that the model does not have; messages that
            the chat template does not take.
        StorageError: the file is not there.
    """
    from blr_analysis.huggingface.preferences import PAIR, preference_task

    if loaded.task != "causal_lm":
        raise InputError(f"{str(loaded.folder)!r} is no causal language model: give its Task")
    if max_length is not None:
        read_length(loaded, max_length)
    table, place = read_rows(data, online=online)
    if (prompt is None) != (answer is None):
        raise InputError("prompt= and answer= (--prompt, --answer) go together")
    if text is None and prompt is None and set(PAIR) <= set(table):
        return preference_task(loaded, table, place, max_length=max_length)
    names = text
    if prompt is not None and answer is not None:
        table = _with_usual_names(table, place, prompt, answer)
    columns, tokens, words = read_tokens(loaded, table, place, names, max_length)
    metadata = metadata_of(table, columns, words)
    return tokens.task(loaded, metadata=metadata, **training_of(loaded.folder))


def _with_usual_names(table: Any, place: str, prompt: str, answer: str) -> Any:
    """The table with the columns that somebody named for prompts and answers."""
    for name in (prompt, answer):
        if name not in table:
            raise DataError(f"{place} has no column {name!r}, of {list(table)[:12]}")
    usual = {*MESSAGES, *PROMPTS, *ANSWERS} - {prompt, answer}
    others = [name for name in table if name in usual]
    return table.drop(columns=others).rename(columns={prompt: PROMPTS[0], answer: ANSWERS[0]})


def metadata_of(table: Any, columns: Sequence[str], words: Sequence[str]) -> dict[str, list[Any]]:
    """The texts in short, and the columns of words and numbers that are not read as texts."""
    metadata = {"text": [" ".join(text.split())[:SHOWN] for text in words]}
    for name in table:
        values = table[name].tolist()
        is_plain = all(isinstance(value, str | int | float) for value in values)
        if name not in {*columns, "text"} and is_plain:
            metadata[str(name)] = values
    return metadata


def read_tokens(
    loaded: Pretrained,
    table: Any,
    place: str,
    text: str | Sequence[str] | None,
    max_length: int | None,
    labels: Sequence[int] | None = None,
) -> tuple[tuple[str, ...], Tokens, list[str]]:
    """The columns that are read; every row's ids and labels, and words.

    Args:
        labels: of a classifier, a class per row; None where none are needed.
    """
    is_causal = loaded.task == "causal_lm"
    columns = answer_columns(table) if is_causal and text is None else ()
    if not columns:
        columns = text_columns(table, place, text)
        if is_causal and len(columns) > 1:
            raise DataError(
                f"a language model reads one text, not {columns}: name it, text= (--text)"
            )
    cells = table[[*columns]].astype(object)
    values_of_rows = cells.where(cells.notna(), None).itertuples(index=False, name=None)
    places = places_of(table, place)
    rows: list[dict[str, Any]] = []
    words: list[str] = []
    n_cut = 0
    for k, values in enumerate(values_of_rows):
        if is_causal:
            words_of_row, row = _sequence(loaded, columns, values, places[k])
            check_ids(loaded, row, max_length, places[k])
            shortened = {name: ids[:max_length] for name, ids in row.items()}
        else:
            texts = [v if isinstance(v, str) else _words(v, "text", places[k]) for v in values]
            words_of_row = " ".join(texts)
            row = ids_of(loaded, *texts)
            is_cut = max_length is not None
            shortened = ids_of(loaded, *texts, truncation=is_cut, max_length=max_length)
            shortened["labels"] = 0 if labels is None else labels[k]
        n_cut += len(shortened["input_ids"]) < len(row["input_ids"])
        rows.append(shortened)
        words.append(words_of_row)
    return columns, Tokens(rows, loaded.pad_id, max_length, n_cut, loaded.tokenizer), words


def answer_columns(table: Any) -> tuple[str, ...]:
    """The columns of messages, or of prompts (and inputs) and answers; none: the rows are texts."""
    for name in MESSAGES:
        if name in table:
            return (name,)
    prompt = next((name for name in PROMPTS if name in table), None)
    answer = next((name for name in ANSWERS if name in table), None)
    if prompt is None or answer is None:
        return ()
    if prompt == "instruction" and "input" in table:
        return () if "text" in table else (prompt, "input", answer)
    return (prompt, answer)


Encoded = tuple[str, dict[str, Ids]]  # a row's words, and its ids with labels


def _sequence(
    loaded: Pretrained, columns: Sequence[str], values: Sequence[Any], place: str
) -> Encoded:
    """A text, an answer after its prompt, or messages."""
    are_lists = all(isinstance(v, Iterable) and not isinstance(v, str) for v in values)
    if are_lists or columns[0] in MESSAGES:
        parts = [turns_of(v, name, place) for v, name in zip(values, columns, strict=True)]
        first_answer = 0 if len(parts) == 1 else len(parts[0])
        turns = [turn for part in parts for turn in part]
        return encoded_turns(loaded, turns, first_answer, place)
    texts = [
        _words(value, name, place)
        for value, name in zip(values, columns, strict=True)
        if name != "input" or str(value or "").strip()
    ]
    prompt = "\n\n".join(texts[:-1])
    return prompt + texts[-1], encoded_answer(loaded, prompt, texts[-1])


def encoded_turns(
    loaded: Pretrained, turns: list[dict[str, Any]], first_answer: int, place: str
) -> Encoded:
    """The words and ids of a conversation, whose answers count from that turn on."""
    words = " ".join(str(turn.get("content") or "") for turn in turns)
    return words, encoded_chat(loaded, turns, first_answer, place)


def encoded_answer(loaded: Pretrained, prompt: str, answer: str) -> dict[str, Ids]:
    """The ids of both; the labels are those of the answer."""
    row = ids_of(loaded, prompt + answer)
    start = common_start(ids_of(loaded, prompt)["input_ids"], row["input_ids"])
    return labelled(row, [(start, len(row["input_ids"]))])


def _words(value: Any, name: str, place: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise DataError(f"{place} has {value!r} for its {name}: write it as text, or drop it")


def check_ids(loaded: Pretrained, row: dict[str, Ids], max_length: int | None, place: str) -> None:
    """Raise :class:`DataError` of a row that the model cannot read, or without an answer."""
    ids = row["input_ids"]
    if max_length is None and len(ids) > loaded.longest:
        raise DataError(
            f"{place} has {len(ids):,} tokens, the model reads {loaded.longest:,}: cut with "
            "max_length (--max-length)"
        )
    if set(row["labels"][1:max_length]) <= {IGNORED}:
        raise DataError(f"{place} leaves nothing to predict; drop or shorten it")
    vocabulary = len(loaded.model.get_input_embeddings().weight)  # type: ignore[operator]
    if max(ids) >= vocabulary:
        raise DataError(
            f"{place} has token {max(ids)}, the model {vocabulary}: the tokenizer is another's"
        )

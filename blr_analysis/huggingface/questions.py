"""Texts, questions with their answers, and conversations as token ids, in the order of their rows.

What has an answer is scored on the answer alone, as trainers mask prompts: the tokens of
"prompt" + "answer" after those of "prompt"; of "messages", written by the tokenizer's chat
template, those of every assistant's turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from blr_analysis.checks import positive_int
from blr_analysis.errors import DataError, InputError, told_as
from blr_analysis.huggingface.data import places_of, read_rows, text_columns
from blr_analysis.huggingface.models import Pretrained
from blr_analysis.runs import training_of
from blr_analysis.task import Task

MESSAGES = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "completion", "response", "output")
SHOWN = 200  # characters of a text that are kept beside its example
LONGEST = 512  # tokens that are read of a text at most, unless more are asked for
IGNORED = -100
BATCH = 8
KNOWN_BY = 256  # texts whose ids tell tokenizers apart
Ids = list[int]


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
        fills = {"input_ids": self.pad_id, "labels": IGNORED}
        columns = {name: [torch.tensor(row[name]) for row in rows] for name in rows[0]}
        return {
            name: pad_sequence(
                column, batch_first=True, padding_value=fills.get(name, 0), padding_side=self.side
            )
            if column[0].ndim
            else torch.stack(column)
            for name, column in columns.items()
        }

    def task(self, loaded: Pretrained, **about: Any) -> Task:
        """These examples under their model; what else its :class:`~blr_analysis.Task` is told."""
        padded: Any = replace(self, side=padding_side(loaded, self))
        loader: Any = DataLoader(padded, batch_size=BATCH, collate_fn=padded.collate)
        about = {"likelihood": loaded.likelihood, "batch_size": BATCH, **about}
        return Task(loaded.model, loader, **about)


def padding_side(loaded: Pretrained, tokens: Tokens) -> str:
    """Where a short row is filled up: on the right, unless its output changes there and the
    tokenizer says left (XLNet reads a text's last position)."""
    by_length = sorted(tokens.rows, key=lambda row: len(row["input_ids"]))
    short, long = by_length[0], by_length[-1]
    lengths_differ = len(short["input_ids"]) < len(long["input_ids"])
    said = getattr(loaded.tokenizer, "padding_side", "right")
    if said == "right" or loaded.task == "causal_lm" or not lengths_differ:
        return "right"  # of causal models, what stands behind a text changes nothing
    alone = _logits(loaded, tokens, [short])
    padded = _logits(loaded, tokens, [short, long])
    return "right" if torch.allclose(alone[0], padded[0], rtol=1e-3, atol=1e-5) else said


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
    ids = tokenizer(list(texts[:KNOWN_BY]), verbose=False)["input_ids"] if texts else []
    names = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    digest = hashlib.sha256(json.dumps([names, ids]).encode()).hexdigest()
    return {"tokens": size, "sha256": digest}


def read_length(loaded: Pretrained, max_length: int | None) -> int:
    """Tokens that are read of a text.

    Raises:
        InputError: more than the model reads.
    """
    if max_length is not None and positive_int("max_length", max_length) > loaded.longest:
        raise InputError(f"max_length={max_length}, but the model reads {loaded.longest} tokens")
    return max_length or min(loaded.longest, LONGEST)


def language_task(
    loaded: Pretrained, data: Any, *, text: str | None = None, max_length: int | None = None
) -> Task:
    """Texts, prompts with answers, or conversations; of the last two the answers' loss alone.

    Columns "messages" (conversations) hold lists of {"role": …, "content": …}; "prompt" (question,
    instruction) and "answer" (completion, response, output) are texts, or both such lists; an
    "instruction" is followed by a blank line and its "input", where that is not empty, unless the
    rows have a "text" of their own, which is read then; otherwise the texts are those of the one
    column with a usual name. Other columns of words and numbers are the task's metadata.

    Args:
        data: a file, a folder of ``Dataset.save_to_disk``, or a ``datasets.Dataset``.
        text: the column of the texts.
        max_length: tokens that are kept of longer rows; None: all, and a row that is longer than
            what the model reads is an error.

    Raises:
        InputError: the model is no language model; a ``max_length`` that it cannot read.
        DataError: the file, its columns; an empty text or answer; a row that is too long, or whose
            prompt leaves no room for its answer; ids that the model does not have; messages that
            the chat template does not take.
        StorageError: the file is not there.
    """
    if loaded.task != "causal_lm":
        raise InputError(f"{str(loaded.folder)!r} is no causal language model: give its Task")
    if max_length is not None:
        read_length(loaded, max_length)
    table, where = read_rows(data)
    columns, tokens, words = read_tokens(loaded, table, where, text, max_length)
    about = {"text": [" ".join(each.split())[:SHOWN] for each in words]}
    others = {str(n): table[n].tolist() for n in table if n not in {*columns, "text"}}
    about |= {n: v for n, v in others.items() if all(isinstance(x, str | int | float) for x in v)}
    return tokens.task(loaded, metadata=about, **training_of(loaded.folder))


def read_tokens(
    loaded: Pretrained,
    table: Any,
    where: str,
    text: str | Sequence[str] | None,
    max_length: int | None,
    labels: Sequence[int] | None = None,
) -> tuple[tuple[str, ...], Tokens, list[str]]:
    """The columns that are read; every row's ids and labels, and words.

    Args:
        labels: of a classifier, a class per row; None where none are needed.
    """
    causal = loaded.task == "causal_lm"
    answered = answer_columns(table) if causal and text is None else ()
    columns = tuple(answered or text_columns(table, where, text))
    if causal and not answered and len(columns) > 1:
        raise DataError(f"a language model reads one text, not {columns}: name it, text= (--text)")
    held = table[[*columns]].astype(object)
    each = held.where(held.notna(), None).itertuples(index=False, name=None)
    rows, shown, cut = [], [], 0
    for k, (place, values) in enumerate(zip(places_of(table, where), each, strict=True)):
        if causal:
            words, row = _sequence(loaded, columns, values, place)
            _check(loaded, row, max_length, place)
            kept = {n: ids[:max_length] for n, ids in row.items()}
        else:  # a text, which may be empty, or a pair
            texts = [v if isinstance(v, str) else _words(v, "text", place) for v in values]
            words, row = " ".join(texts), _ids(loaded, *texts)
            kept = _ids(loaded, *texts, truncation=max_length is not None, max_length=max_length)
            kept["labels"] = 0 if labels is None else labels[k]
        cut += len(kept["input_ids"]) < len(row["input_ids"])
        rows.append(kept)
        shown.append(words)
    return columns, Tokens(rows, loaded.pad_id, max_length, cut, loaded.tokenizer), shown


def answer_columns(table: Any) -> tuple[str, ...]:
    """Those of messages, or of prompts (and inputs) and answers; none: the rows are texts."""
    if held := next((name for name in MESSAGES if name in table), None):
        return (held,)
    prompt, answer = (next((n for n in usual if n in table), "") for usual in (PROMPTS, ANSWERS))
    instructed = prompt == "instruction" and "input" in table
    if not (prompt and answer) or (instructed and "text" in table):
        return ()
    return (prompt, "input", answer) if instructed else (prompt, answer)


Encoded = tuple[str, dict[str, Any]]  # a row's words and ids, of language models with labels


def _sequence(
    loaded: Pretrained, columns: tuple[str, ...], values: tuple[Any, ...], place: str
) -> Encoded:
    """A text, an answer after its prompt, or messages."""
    listed = all(isinstance(v, Iterable) and not isinstance(v, str) for v in values)
    if listed or columns[0] in MESSAGES:
        turns = [_turns(value, columns[0], place) for value in values]
        first = 0 if len(turns) == 1 else len(turns[0])
        return _chat(loaded, [turn for some in turns for turn in some], first, place)
    named = zip(values, columns, strict=True)
    given = [(v, n) for v, n in named if n != "input" or str(v or "").strip()]
    *asked, answer = (_words(v, n, place) for v, n in given)
    prompt = "\n\n".join(asked)
    row = _ids(loaded, prompt + answer)
    start = _common(_ids(loaded, prompt)["input_ids"], row["input_ids"])
    return prompt + answer, _labelled(row, [(start, len(row["input_ids"]))])


def _ids(loaded: Pretrained, *words: str, **how: Any) -> dict[str, Any]:
    encoded: Any = loaded.tokenizer(*words, verbose=False, **how)
    return {n: list(encoded[n]) for n in loaded.inputs if n in encoded}


def _words(value: Any, name: str, place: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise DataError(f"{place} has {value!r} for its {name}: write it as text, or drop it")


def _turns(value: Any, name: str, place: str) -> list[dict[str, Any]]:
    """The messages of a row, as JSON or Parquet give them."""
    turns = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
    if not turns or not all(isinstance(t, Mapping) and "role" in t for t in turns):
        raise DataError(f"{place} has no list of messages, with role and content, in its {name}")
    return [dict(turn) for turn in turns]


def _chat(loaded: Pretrained, turns: list[dict[str, Any]], first: int, place: str) -> Encoded:
    """Every assistant's turn from ``first`` on counts, from its header to its end."""
    if not getattr(loaded.tokenizer, "chat_template", None):
        raise InputError("the tokenizer has no chat template: give prompt and answer, or text")

    def text(upto: int, prompt: bool = False) -> str:
        with told_as(DataError, f"{place}: the chat template does not take it"):
            return loaded.tokenizer.apply_chat_template(
                turns[:upto], add_generation_prompt=prompt, tokenize=False
            )

    def row(words: str) -> dict[str, Ids]:
        return _ids(loaded, words, add_special_tokens=False)

    written, spans = text(len(turns)), []
    whole = row(written)
    contents = [str(turn.get("content") or "") for turn in turns]
    for k in range(first, len(turns)):
        if turns[k]["role"] == "assistant":
            _words(contents[k], "answer", place)
            before, after = text(k, prompt=True), text(k + 1)
            if not written.startswith(after) or not after.startswith(before):
                raise DataError(f"{place}: the chat template rewrites earlier turns; give the text")
            ends = (row(part)["input_ids"] for part in (before, after))
            spans.append(tuple(_common(ids, whole["input_ids"]) for ids in ends))
    return " ".join(contents), _labelled(whole, spans)


def _labelled(row: dict[str, Ids], spans: Iterable[tuple[int, ...]]) -> dict[str, Ids]:
    """With labels, which are the ids in these spans."""
    labels = [IGNORED] * len(row["input_ids"])
    for start, stop in spans:
        labels[start:stop] = row["input_ids"][start:stop]
    return {**row, "labels": labels}


def _common(one: Ids, two: Ids) -> int:
    """How many ids at the start are the same."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(one), len(two)))


def _check(loaded: Pretrained, row: dict[str, Ids], most: int | None, place: str) -> None:
    ids, words = row["input_ids"], len(loaded.model.get_input_embeddings().weight)  # type: ignore[operator]
    if most is None and len(ids) > loaded.longest:
        count = f"{len(ids):,} tokens, the model reads {loaded.longest:,}"
        raise DataError(f"{place} has {count}: cut with max_length (--max-length)")
    if set(row["labels"][1:most]) <= {IGNORED}:
        raise DataError(f"{place} leaves nothing to predict; drop or shorten it")
    if max(ids) >= words:
        wrong = f"token {max(ids)}, the model {words}"
        raise DataError(f"{place} has {wrong}: the tokenizer is another's")

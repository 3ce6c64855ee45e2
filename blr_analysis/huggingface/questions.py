"""Texts, questions with their answers, and conversations as token ids, in the order of their rows.

What has an answer is scored on the answer alone, as trainers mask prompts: the tokens of
"prompt" + "answer" after those of "prompt"; of "messages", written by the tokenizer's chat
template, those of every assistant's turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from blr_analysis.checks import positive_int
from blr_analysis.errors import DataError, InputError
from blr_analysis.huggingface.chats import ids_of, turns_of
from blr_analysis.huggingface.data import places_of, read_rows, text_columns
from blr_analysis.huggingface.models import Pretrained
from blr_analysis.huggingface.preferences import PAIR, preference_task
from blr_analysis.huggingface.tokens import (
    Encoded,
    Tokens,
    check_ids,
    encoded_answer,
    encoded_turns,
    metadata_of,
)
from blr_analysis.runs import training_of
from blr_analysis.task import Task

MESSAGES = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "completion", "response", "output")
LONGEST = 512  # tokens that are read of a text at most, unless more are asked for
N_RECOGNISED = 256  # texts whose ids tell tokenizers apart


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


def _words(value: Any, name: str, place: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise DataError(f"{place} has {value!r} for its {name}: write it as text, or drop it")

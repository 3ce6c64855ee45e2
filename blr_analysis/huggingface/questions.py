"""Texts, questions with their answers, and conversations as token ids, in the order of their rows.

What has an answer is scored on the answer alone, as trainers mask prompts: the tokens of
"prompt" + "answer" after those of "prompt"; of "messages", written by the tokenizer's chat
template, those of every assistant's turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from blr_analysis.errors import DataError, InputError, told_as
from blr_analysis.huggingface.data import places_of, read_rows, text_columns
from blr_analysis.huggingface.models import Pretrained
from blr_analysis.huggingface.recording import training_of
from blr_analysis.huggingface.tokens import IGNORED, Tokens, check_known, read_length
from blr_analysis.task import Task

MESSAGES = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "completion", "response", "output")
SHOWN = 200  # characters of a text that are kept beside its example
Ids = list[int]


def language_task(
    loaded: Pretrained,
    data: Any,
    *,
    text: str | None = None,
    max_length: int | None = None,
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
    shown = [" ".join(each.split())[:SHOWN] for each in words]
    about = {"text": shown, **_others(table, {*columns, "text"})}
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
    columns, encode = _reader(loaded, table, where, text)
    rows, shown, cut = [], [], 0
    each = zip(*(table[c].tolist() for c in columns), strict=True)
    for k, (place, values) in enumerate(zip(places_of(table, where), each, strict=True)):
        words, row, start = encode(values, place)
        longer = max_length is not None and len(row["input_ids"]) > max_length
        cut += longer
        if start is None:
            if longer:
                row = _ids(loaded, *values, truncation=True, max_length=max_length)
            row["labels"] = 0 if labels is None else labels[k]
        else:
            _check(loaded, row, start, max_length, place)
            row = {n: ids[:max_length] for n, ids in row.items()}
        rows.append(row)
        shown.append(words)
    return columns, Tokens(rows, loaded.pad_id, max_length, cut, loaded.tokenizer), shown


def answer_columns(table: Any) -> tuple[str, ...]:
    """Those of messages, or of prompts and answers (and inputs); none: the rows are texts."""
    held = next((name for name in MESSAGES if name in table), None)
    if held is not None:
        return (held,)
    pair = tuple(next((n for n in usual if n in table), "") for usual in (PROMPTS, ANSWERS))
    instructed = pair[0] == "instruction" and "input" in table
    if not all(pair) or (instructed and "text" in table):
        return ()
    return (*pair, "input") if instructed else pair


# The words, ids (of language models with labels), where labels begin (None: of classifiers)
Encoded = tuple[str, dict[str, Any], int | None]


def _reader(
    loaded: Pretrained, table: Any, where: str, text: str | Sequence[str] | None
) -> tuple[tuple[str, ...], Callable[[tuple[Any, ...], str], Encoded]]:
    """The columns that are read, and what makes ids of a row of them."""
    causal = loaded.task == "causal_lm"
    columns = answer_columns(table) if causal and text is None else ()
    if len(columns) == 1:
        return columns, lambda row, place: _chat(loaded, _turns(row[0], place), 0, place)
    if columns:
        return columns, lambda row, place: _answered(
            loaded, _joined(row, place), columns[:2], place
        )
    named = text_columns(table, where, text)
    first = named[0]
    if causal and len(named) > 1:
        raise DataError(
            f"a language model reads one text, not {', '.join(named)}: name it, text= (--text)"
        )

    def plain(row: tuple[Any, ...], place: str) -> Encoded:
        if causal:
            words = _words(row[0], first, place)
            return words, *_labelled(loaded, words, "")
        words = [v if isinstance(v, str) else _words(v, first, place) for v in row]
        return " ".join(words), _ids(loaded, *words), None

    return named, plain


def _ids(loaded: Pretrained, *words: str, **how: Any) -> dict[str, Any]:
    encoded: Any = loaded.tokenizer(*words, verbose=False, **how)
    return {n: list(encoded[n]) for n in loaded.inputs if n in encoded}


def _words(value: Any, name: str, place: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if _empty(value):
        raise DataError(f"{place} has no {name}, or an empty one: drop it")
    raise DataError(f"{place} has {value!r} for its {name}: write it as text, in quotes")


def _empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def _joined(row: tuple[Any, ...], place: str) -> tuple[Any, Any]:
    """Prompt and answer; after an instruction its input, where that is there and not empty."""
    prompt, answer, *more = row
    given = [_words(value, "input", place) for value in more if not _empty(value)]
    return "\n\n".join((_words(prompt, "instruction", place), *given)) if given else prompt, answer


def _answered(
    loaded: Pretrained, row: tuple[Any, ...], names: tuple[str, ...], place: str
) -> Encoded:
    if any(isinstance(value, str) or not isinstance(value, Iterable) for value in row):
        asked, answer = (_words(*pair, place) for pair in zip(row, names, strict=True))
        return asked + answer, *_labelled(loaded, asked + answer, asked)
    asked, answers = (_turns(value, place) for value in row)
    return _chat(loaded, [*asked, *answers], len(asked), place)


def _labelled(loaded: Pretrained, whole: str, prompt: str) -> tuple[dict[str, Ids], int]:
    """Ids of the whole text; labels after what it has in common with the prompt's ids."""
    row = _ids(loaded, whole)
    before = list(loaded.tokenizer(prompt, verbose=False)["input_ids"]) if prompt else []
    start = _common(before, row["input_ids"])
    return _with_labels(row, [(start, len(row["input_ids"]))]), start


def _turns(value: Any, place: str) -> list[dict[str, Any]]:
    """The messages of a row, as JSON or Parquet give them."""
    turns = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
    if not turns or not all(isinstance(t, Mapping) and "role" in t for t in turns):
        raise DataError(f"{place} holds no list of messages with role and content")
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

    def ids(words: str) -> Ids:
        given: Any = loaded.tokenizer(words, add_special_tokens=False, verbose=False)
        return list(given["input_ids"])

    written = text(len(turns))
    whole = ids(written)
    spans = []
    for k, turn in enumerate(turns):
        if turn["role"] == "assistant" and k >= first:
            if not str(turn.get("content") or "").strip():
                raise DataError(f"{place} has an empty answer")
            before, after = text(k, prompt=True), text(k + 1)
            if not written.startswith(after) or not after.startswith(before):
                raise DataError(f"{place}: the chat template rewrites earlier turns; give the text")
            spans.append((_common(ids(before), whole), _common(ids(after), whole)))
    row = {"input_ids": whole, "attention_mask": [1] * len(whole)}
    words = " ".join(str(turn.get("content") or "") for turn in turns)
    start = spans[0][0] if spans else len(whole)
    return words, _with_labels({n: row[n] for n in row if n in loaded.inputs}, spans), start


def _with_labels(row: dict[str, Ids], spans: Sequence[tuple[int, int]]) -> dict[str, Ids]:
    labels = [IGNORED] * len(row["input_ids"])
    for start, stop in spans:
        labels[start:stop] = row["input_ids"][start:stop]
    return {**row, "labels": labels}


def _common(one: Ids, two: Ids) -> int:
    """How many ids at the start are the same."""
    pairs = zip(one, two, strict=False)
    same = min(len(one), len(two))
    return next((k for k, (a, b) in enumerate(pairs) if a != b), same)


def _check(
    loaded: Pretrained, row: dict[str, Ids], start: int, most: int | None, place: str
) -> None:
    ids = row["input_ids"]
    if most is None and len(ids) > loaded.longest:
        raise DataError(
            f"{place} has {len(ids):,} tokens, the model reads {loaded.longest:,}: cut with "
            "max_length (--max-length)"
        )
    if len(ids) < 2 or max(start, 1) >= min(len(ids), most or len(ids)):
        kept = f" in {most} tokens" if most else ""
        raise DataError(f"{place} leaves nothing to predict{kept}; drop or shorten it")
    check_known(loaded, ids, place)


def _others(table: Any, used: set[str]) -> dict[str, list[Any]]:
    """Columns of words and numbers that describe the rows."""
    plain = (str, int, float, bool)
    return {
        str(name): table[name].tolist()
        for name in table
        if name not in used and all(isinstance(v, plain) for v in table[name].tolist())
    }

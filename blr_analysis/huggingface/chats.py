"""Conversations as token ids, written by the chat template; the assistant's turns count.

Some templates mark these turns with ``{% generation %}``; the marks are used. With other templates,
a turn counts from the end of its header to the start of the next turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blr_analysis.errors import DataError, InputError, told_as
from blr_analysis.huggingface.models import Pretrained

IGNORED = -100  # the label of tokens that do not count, as in transformers
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The roles of ShareGPT's turns, which have "from" and "value".
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function": "tool",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
Ids = list[int]
Turn = dict[str, Any]


def turns_of(value: Any, column: str, place: str) -> list[Turn]:
    """The messages of a row, as JSON or Parquet give them, with "role" and "content".

    Raises:
        DataError: the value is no list of messages, or a turn has an unknown role.

    >>> turns_of([{"from": "human", "value": "hello"}], "conversations", "row 1")
    [{'role': 'user', 'content': 'hello'}]
    """
    turns: list[Any] = []
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        turns = list(value)
    are_messages = bool(turns) and all(isinstance(turn, Mapping) for turn in turns)
    if are_messages and all("role" in turn for turn in turns):
        return [dict(turn) for turn in turns]
    if are_messages and all({"from", "value"} <= turn.keys() for turn in turns):
        return [_of_sharegpt(turn, place) for turn in turns]
    raise DataError(
        f"{place} has no list of messages, with role and content (or from and value), in its "
        f"{column}"
    )


def _of_sharegpt(turn: Mapping[str, Any], place: str) -> Turn:
    """A turn of ShareGPT's form as a message with role and content."""
    speaker = str(turn["from"])
    if speaker not in ROLES:
        raise DataError(f"{place} has a turn of {speaker!r}: write one of {', '.join(ROLES)}")
    return {"role": ROLES[speaker], "content": turn["value"]}


def encoded_chat(loaded: Pretrained, turns: list[Turn], first: int, place: str) -> dict[str, Ids]:
    """The ids of a conversation and their labels.

    Args:
        first: the assistant's turns from this one on count.

    Raises:
        InputError: the tokenizer has no chat template.
        DataError: an empty answer, or messages that the template does not take.
    """
    template = getattr(loaded.tokenizer, "chat_template", None)
    if not template:
        raise InputError("the tokenizer has no chat template: give prompt and answer, or text")
    for turn in turns[first:]:
        content = turn.get("content")
        is_empty = not isinstance(content, str) or not content.strip()
        if turn["role"] == "assistant" and is_empty:
            raise DataError(f"{place} has {content!r} for its answer: write it as text, or drop it")
    if MARKS.search(str(template)):
        return _with_marks(loaded, turns, first, place)
    return _by_turns(loaded, turns, first, place)


def labelled(row: Mapping[str, Ids], spans: Iterable[tuple[int, int]]) -> dict[str, Ids]:
    """The row with "labels": the ids themselves within the spans, and IGNORED elsewhere."""
    labels = [IGNORED] * len(row["input_ids"])
    for start, stop in spans:
        labels[start:stop] = row["input_ids"][start:stop]
    return {**row, "labels": labels}


def ids_of(loaded: Pretrained, *texts: str, **settings: Any) -> dict[str, Any]:
    """The inputs that the model takes of a text, or of a pair of texts, as lists by name."""
    encoded: Any = loaded.tokenizer(*texts, verbose=False, **settings)
    return {name: list(encoded[name]) for name in loaded.inputs if name in encoded}


def common_start(left: Ids, right: Ids) -> int:
    """The number of ids at the start that are the same."""
    for k, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return k
    return min(len(left), len(right))


def _written(loaded: Pretrained, turns: Sequence[Turn], place: str, **settings: Any) -> Any:
    """The turns as the chat template writes them."""
    with told_as(DataError, f"{place}: the chat template does not take it"):
        return loaded.tokenizer.apply_chat_template(list(turns), **settings)


def _with_marks(
    loaded: Pretrained, turns: Sequence[Turn], first: int, place: str
) -> dict[str, Ids]:
    """The ids and labels of a template with marks: tokens between the marks count."""
    encoded = _written(
        loaded, turns, place, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    row = {name: list(encoded[name]) for name in loaded.inputs if name in encoded}
    start = 0
    if first:
        before = _written(loaded, turns[:first], place, tokenize=True, return_dict=True)
        start = common_start(list(before["input_ids"]), row["input_ids"])
    is_answer = encoded["assistant_masks"]
    row["labels"] = [
        token if is_answer[k] and k >= start else IGNORED
        for k, token in enumerate(row["input_ids"])
    ]
    return row


def _by_turns(loaded: Pretrained, turns: Sequence[Turn], first: int, place: str) -> dict[str, Ids]:
    """The ids and labels of a template without marks: turns count from header to end.

    A turn begins where the text with the header of an answer ends, and ends where the text with the
    turn ends.
    """

    def text_of(n_turns: int, *, with_header: bool = False) -> str:
        written = turns[:n_turns]
        return _written(loaded, written, place, add_generation_prompt=with_header, tokenize=False)

    def encoded(text: str) -> dict[str, Ids]:
        return ids_of(loaded, text, add_special_tokens=False)

    whole_text = text_of(len(turns))
    row = encoded(whole_text)
    spans = []
    for k in range(first, len(turns)):
        if turns[k]["role"] != "assistant":
            continue
        before = text_of(k, with_header=True)
        after = text_of(k + 1)
        if not whole_text.startswith(after) or not after.startswith(before):
            raise DataError(f"{place}: the chat template rewrites earlier turns; give the text")
        start = common_start(encoded(before)["input_ids"], row["input_ids"])
        stop = common_start(encoded(after)["input_ids"], row["input_ids"])
        spans.append((start, stop))
    return labelled(row, spans)

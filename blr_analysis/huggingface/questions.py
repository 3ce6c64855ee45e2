"""Texts, questions with their answers, and conversations as token ids, in the order of their rows.

A row with an answer is scored on the answer alone, as trainers mask prompts. A prompt and its
answer are tokenized together; the tokens after the prompt's count. Messages are written by the
tokenizer's chat template; the tokens of every assistant's turn count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from blr_analysis.checks import positive_int, positive_number
from blr_analysis.errors import DataError, InputError
from blr_analysis.huggingface.chats import Ids, encoded_chat, ids_of, turns_of
from blr_analysis.huggingface.data import places_of, read_rows, text_columns
from blr_analysis.huggingface.models import Pretrained
from blr_analysis.huggingface.preferences import BETA, PAIR, preference_task
from blr_analysis.huggingface.recognised import RowsOnDemand, mark_of_texts
from blr_analysis.huggingface.tokens import (
    Tokens,
    check_ids,
    encoded_answer,
    metadata_of,
    words_of_turns,
)
from blr_analysis.runs import reading_in, training_of
from blr_analysis.task import Task

MESSAGES = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "completion", "response", "output")
LONGEST = 512  # tokens of a text that are read where no max_length is given
N_RECOGNISED = 256  # texts whose ids are compared to recognise a tokenizer


def ids_known_by(
    tokenizer: Any, texts: Sequence[str], size: int | None = None
) -> dict[str, int | str]:
    """A digest by which a tokenizer is recognised.

    Args:
        texts: their ids are part of the digest (those of the first 256).
        size: so many of the tokenizer's tokens are part of the digest, so that tokens which are
            added later change nothing; None: all of them.

    Returns:
        "tokens", the size, and "sha256", the digest.
    """
    if size is None:
        size = len(tokenizer)
    ids = []
    if texts:
        ids = tokenizer(list(texts[:N_RECOGNISED]), verbose=False)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    digest = hashlib.sha256(json.dumps([tokens, ids]).encode()).hexdigest()
    return {"tokens": size, "sha256": digest}


def read_length(loaded: Pretrained, max_length: int | None) -> int:
    """The number of tokens that are read of a text, at most.

    Raises:
        InputError: ``max_length`` is more than the model reads.
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
    eos: bool | None = None,
    beta: float | None = None,
    online: bool = False,
    mark: str | None = None,
) -> Task:
    """The task of a language model on texts, prompts with answers, or conversations.

    The loss is that of the whole text, or of the answers alone. The columns of the data decide:

    * "messages" (or "conversations") hold lists of {"role": …, "content": …}, or of {"from": …,
      "value": …};
    * "prompt" (or question, instruction) and "answer" (or completion, response, output) hold texts,
      or lists of messages. An "instruction" is followed by a blank line and its "input", where that
      is not empty. Rows with a "text" beside instruction and input are read as texts;
    * "chosen" and "rejected" hold preference pairs, see
      :mod:`~blr_analysis.huggingface.preferences`;
    * otherwise one column with a usual name holds the texts.

    Other columns of words and numbers become the task's metadata.

    Args:
        data: a file, a folder of ``Dataset.save_to_disk``, a ``datasets.Dataset``, or an address
            that :mod:`~blr_analysis.huggingface.data` reads, such as "org/dataset:train[:500]".
        text: the column of the texts.
        prompt, answer: the columns of prompts and of answers, where they have other names.
        max_length: longer rows are cut to so many tokens; None: no row is cut, and a row that is
            longer than the model reads is an error.
        eos: put the tokenizer's end token behind every text and answer, as TRL's trainers do; None:
            if the training did so, as its ``CheckpointsCallback`` recorded. Messages end as the
            chat template ends them.
        beta: β of the loss of preference pairs; None: the training's, where it is recorded, or
            else 0.1, as in TRL.
        online: fetch data from the Hub where no file or folder of their name is on this machine.
        mark: the ``mark`` of the dataset when the same data were read before. If the data, the
            tokenizer and these arguments have it still, a text is tokenized when it is first asked
            for; else all are, now.

    Raises:
        InputError: the model is no causal language model, or reads fewer tokens than
            ``max_length``; ``eos`` is asked for, and the tokenizer has no end token; ``beta``
            is not positive, or given for rows that are no pairs.
        DataError: the file or its columns cannot be read; a text or answer is empty; a row is too
            long, or its prompt leaves no room for its answer; the model lacks a token; the chat
            template refuses the messages.
        StorageError: the file does not exist.
    """
    if loaded.task != "causal_lm":
        raise InputError(f"{str(loaded.folder)!r} is no causal language model: give its Task")
    if max_length is not None:
        read_length(loaded, max_length)
    if beta is not None:
        positive_number("beta", beta)
    reading = reading_in(loaded.folder, loaded.model)
    if eos is None:
        eos = reading.get("eos", False)
    if eos:
        loaded = with_end_token(loaded)
    current_mark = mark_of_texts(
        data, loaded, text=text, prompt=prompt, answer=answer, max_length=max_length
    )
    table, place = read_rows(data, online=online)
    if (prompt is None) != (answer is None):
        raise InputError("prompt= and answer= (--prompt, --answer) go together")
    has_preference_pairs = set(PAIR) <= set(table)
    names_columns = text is not None or prompt is not None
    if has_preference_pairs and not names_columns:
        strength = float(reading.get("beta", BETA)) if beta is None else beta
        return preference_task(loaded, table, place, max_length=max_length, beta=strength)
    if beta is not None:
        raise InputError(f"beta (--beta) belongs to pairs, {place} has no chosen and rejected")
    if prompt is not None and answer is not None:
        table = _with_usual_names(table, place, prompt, answer)
    is_unchanged = mark is not None and mark == current_mark
    texts = read_tokens(loaded, table, place, text, max_length, on_demand=is_unchanged)
    tokens = replace(texts.tokens, mark=current_mark)
    metadata = metadata_of(table, texts.columns, texts.words)
    return tokens.task(loaded, metadata=metadata, **training_of(loaded.folder, loaded.model))


def with_end_token(loaded: Pretrained) -> Pretrained:
    """The same model, whose texts and answers end with the tokenizer's end token."""
    end_token = loaded.tokenizer.eos_token
    if end_token is None:
        raise InputError("the tokenizer has no end token: set eos_token, or leave eos (--eos) out")
    return replace(loaded, closing=end_token)


def _with_usual_names(table: Any, place: str, prompt: str, answer: str) -> Any:
    """The table with the user's columns of prompts and answers under their usual names."""
    for name in (prompt, answer):
        if name not in table:
            raise DataError(f"{place} has no column {name!r}, of {list(table)[:12]}")
    usual_names = {*MESSAGES, *PROMPTS, *ANSWERS}
    unused = [name for name in table if name in usual_names - {prompt, answer}]
    return table.drop(columns=unused).rename(columns={prompt: PROMPTS[0], answer: ANSWERS[0]})


class Texts(NamedTuple):
    """The texts of a table.

    Attributes:
        columns: the columns that were read.
        tokens: the ids and labels of every row.
        words: the text of every row.
    """

    columns: tuple[str, ...]
    tokens: Tokens
    words: list[str]


def read_tokens(
    loaded: Pretrained,
    table: Any,
    place: str,
    text: str | Sequence[str] | None,
    max_length: int | None,
    labels: Sequence[int] | None = None,
    *,
    on_demand: bool = False,
) -> Texts:
    """The rows of a table as token ids, cut to ``max_length``.

    Args:
        place: the name of the data in errors.
        text: the column, or the two columns of pairs; None: found by their usual names.
        labels: of a classifier, the class of every row; None: all are class 0.
        on_demand: make the ids of a language model's text when they are first asked for. They
            were made before, so that the rows that are cut are not counted again.

    Raises:
        DataError: no such columns, or a row that cannot be read.
    """
    columns = _columns(loaded, table, place, text)
    cells = table[[*columns]].astype(object)
    values_of_rows = list(cells.where(cells.notna(), None).itertuples(index=False, name=None))
    places = places_of(table, place)
    if loaded.task == "causal_lm":
        texts = [
            _text_of(columns, values, place)
            for values, place in zip(values_of_rows, places, strict=True)
        ]
        words = [text.words for text in texts]
        tokens = _tokens_of_language(loaded, texts, max_length, on_demand=on_demand)
        return Texts(columns, tokens, words)
    texts_of_rows = _texts_of_rows(values_of_rows, places)
    words = [" ".join(texts) for texts in texts_of_rows]
    rows = [ids_of(loaded, *texts) for texts in texts_of_rows]
    shortened = _rows_to_classify(loaded, texts_of_rows, max_length, labels)
    n_cut = _count_of_cut(rows, shortened)
    tokens = Tokens(shortened, loaded.pad_id, max_length, n_cut, loaded.tokenizer)
    return Texts(columns, tokens, words)


def _count_of_cut(rows: Sequence[Mapping[str, Ids]], shortened: Sequence[Mapping[str, Ids]]) -> int:
    """How many rows were cut."""
    return sum(
        len(short["input_ids"]) < len(row["input_ids"])
        for short, row in zip(shortened, rows, strict=True)
    )


def _columns(
    loaded: Pretrained, table: Any, place: str, text: str | Sequence[str] | None
) -> tuple[str, ...]:
    """The columns of messages, of prompts and answers, or of texts."""
    is_causal = loaded.task == "causal_lm"
    if is_causal and text is None:
        columns = answer_columns(table)
        if columns:
            return columns
    columns = text_columns(table, place, text)
    if is_causal and len(columns) > 1:
        raise DataError(f"a language model reads one text, not {columns}: name it, text= (--text)")
    return columns


def _tokens_of_language(
    loaded: Pretrained,
    texts: Sequence[Answered | Conversation],
    max_length: int | None,
    *,
    on_demand: bool,
) -> Tokens:
    """The ids and labels of a language model's texts, checked and cut."""

    def whole(index: int) -> dict[str, Ids]:
        text = texts[index]
        row = text.encoded(loaded)
        check_ids(loaded, row, max_length, text.place)
        return row

    def shortened(row: dict[str, Ids]) -> dict[str, Ids]:
        return {name: ids[:max_length] for name, ids in row.items()}

    if on_demand:
        rows = RowsOnDemand(len(texts), lambda index: shortened(whole(index)))
        return Tokens(rows, loaded.pad_id, max_length, tokenizer=loaded.tokenizer)
    whole_rows = [whole(index) for index in range(len(texts))]
    rows = [shortened(row) for row in whole_rows]
    n_cut = _count_of_cut(whole_rows, rows)
    return Tokens(rows, loaded.pad_id, max_length, n_cut, loaded.tokenizer)


def _texts_of_rows(
    values_of_rows: Sequence[Sequence[Any]], places: Sequence[str]
) -> list[list[str]]:
    """The text, or the two texts of a pair, of every row; empty ones are allowed.

    Raises:
        DataError: a value that is no text.
    """
    return [
        [value if isinstance(value, str) else _words(value, "text", place) for value in values]
        for values, place in zip(values_of_rows, places, strict=True)
    ]


def _rows_to_classify(
    loaded: Pretrained,
    texts_of_rows: Sequence[Sequence[str]],
    max_length: int | None,
    labels: Sequence[int] | None,
) -> list[dict[str, Any]]:
    """The ids of every row, cut by the tokenizer, which keeps its closing token; and its class."""
    if labels is None:
        labels = [0] * len(texts_of_rows)
    is_cut = max_length is not None
    rows = []
    for texts, label in zip(texts_of_rows, labels, strict=True):
        ids = ids_of(loaded, *texts, truncation=is_cut, max_length=max_length)
        rows.append({**ids, "labels": label})
    return rows


def answer_columns(table: Any) -> tuple[str, ...]:
    """The columns of messages, or of prompts (and inputs) and answers.

    Empty where the rows are texts.
    """
    for name in MESSAGES:
        if name in table:
            return (name,)
    prompt = next((name for name in PROMPTS if name in table), None)
    answer = next((name for name in ANSWERS if name in table), None)
    if prompt is None or answer is None:
        return ()
    has_inputs = prompt == "instruction" and "input" in table
    if has_inputs and "text" in table:  # which holds all three, in the form of the training
        return ()
    if has_inputs:
        return (prompt, "input", answer)
    return (prompt, answer)


@dataclass(frozen=True)
class Answered:
    """A prompt and its answer; of a text that counts whole the prompt is "".

    Attributes:
        place: the name of the row in errors.
    """

    prompt: str
    answer: str
    place: str

    @property
    def words(self) -> str:
        return self.prompt + self.answer

    def encoded(self, loaded: Pretrained) -> dict[str, Ids]:
        """The ids and labels."""
        return encoded_answer(loaded, self.prompt, self.answer)


@dataclass(frozen=True)
class Conversation:
    """Messages; the assistant's turns from ``first_answer`` on are answers.

    Attributes:
        place: the name of the row in errors.
    """

    turns: list[dict[str, Any]]
    first_answer: int
    place: str

    @property
    def words(self) -> str:
        return words_of_turns(self.turns)

    def encoded(self, loaded: Pretrained) -> dict[str, Ids]:
        """The ids and labels."""
        return encoded_chat(loaded, self.turns, self.first_answer, self.place)


def _text_of(columns: Sequence[str], values: Sequence[Any], place: str) -> Answered | Conversation:
    """A text, a prompt with its answer, or messages, from the values of these columns."""
    are_lists = all(isinstance(value, Iterable) and not isinstance(value, str) for value in values)
    if are_lists or columns[0] in MESSAGES:
        conversations = [
            turns_of(value, name, place) for value, name in zip(values, columns, strict=True)
        ]
        turns = [turn for conversation in conversations for turn in conversation]
        first_answer = 0  # of one conversation, every assistant's turn is an answer
        if len(conversations) > 1:
            first_answer = len(conversations[0])  # the prompt's turns stand before it
        return Conversation(turns, first_answer, place)
    texts = [
        _words(value, name, place)
        for value, name in zip(values, columns, strict=True)
        if name != "input" or str(value or "").strip()
    ]
    return Answered("\n\n".join(texts[:-1]), texts[-1], place)


def _words(value: Any, name: str, place: str) -> str:
    """The value, which must be a text that is not empty."""
    if isinstance(value, str) and value.strip():
        return value
    raise DataError(f"{place} has {value!r} for its {name}: write it as text, or drop it")

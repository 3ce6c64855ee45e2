"""The words of models' token tables, compared: which word does each row stand for?

Models are merged row by row, so that a row must stand for the same word in all models. A model may
have more words at the end than another; that one then borrows the rows that it lacks. Other
differences are refused: a word with two numbers, or a number with two words. Where the user names
no tokenizer, rows are merged by their number, and a note says what differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blr_analysis.adapters import is_adapter
from blr_analysis.checks import some
from blr_analysis.errors import InputError, StorageError, told_as
from blr_analysis.files import Source
from blr_analysis.merging.sources import is_place, table_lengths

READ_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
ADDED_FILE = "added_tokens.json"
SETTINGS_FILE = "tokenizer_config.json"
# Files that show that there is a tokenizer, even if they cannot be read here.
FOREIGN_FILES = ("*.model", "*.tiktoken", "*.spm", SETTINGS_FILE, *READ_FILES)
BY_NUMBER = "leave tokenizer_source out to merge rows by number (mergekit may support this)"

Words = Mapping[str, int]


@dataclass(frozen=True)
class Tokens:
    """The tokenizer and the token tables of a merge.

    Attributes:
        folder: where the tokenizer is copied from; None: no model is a folder.
        rows: the number of rows of the result's tables; None where no model borrows rows.
        counts: the number of words of each model; empty where no model borrows rows.
        notes: remarks for the user.
    """

    folder: Path | None = None
    rows: int | None = None
    counts: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tokenizer:
    """The words of one model, and the numbers of rows of its token tables.

    Attributes:
        folder: the model's folder.
        words: the number of every word; empty where they cannot be read.
        lengths: the numbers of rows of the tables with a row for each token.
    """

    folder: Path
    words: Words
    lengths: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """The folder's name, for messages."""
        return self.folder.name

    @property
    def count(self) -> int:
        """The number of rows that the words need."""
        return 1 + max(self.words.values(), default=-1)

    @property
    def rows(self) -> int:
        """The number of rows of the longest table."""
        return max(self.lengths, default=0)

    @property
    def rowless(self) -> list[str]:
        """The words whose number is beyond the rows of the tables."""
        if not self.lengths:
            return []
        return [word for word, number in self.words.items() if number >= self.rows]

    @property
    def is_foreign(self) -> bool:
        """Whether the folder has a tokenizer that cannot be read here."""
        if self.words:
            return False
        return any(any(self.folder.glob(pattern)) for pattern in FOREIGN_FILES)


def tokens_of(
    models: Sequence[Any], sources: Sequence[Source], tokenizer_source: str | Path | None
) -> Tokens:
    """Compare the tokenizers of models that are folders.

    Args:
        models: folders, adapters, state dicts and modules; the base is the first, if there is one.
        sources: the same models, opened.
        tokenizer_source: "base", "union" or the folder of a tokenizer: rows are merged by their
            words. None: rows are merged by their number.

    Returns:
        The tokenizer of the result, and the rows that models borrow.

    Raises:
        InputError: the rows of the models cannot be matched by their words.
        StorageError: a tokenizer is damaged.
    """
    tokenizers = _tokenizers(models, sources)
    if tokenizer_source is not None and len(tokenizers) < len(models):
        raise InputError("tokenizer_source is for models in folders: leave it out")
    if not tokenizers:
        return Tokens()
    result = _chosen(tokenizers, tokenizer_source)
    for tokenizer in tokenizers:
        _refuse_moved(tokenizer, result)
    notes = [*_unread_notes(tokenizers), *_rowless_notes(tokenizers)]
    if tokenizer_source is None:
        for tokenizer in tokenizers:
            notes += _difference_notes(tokenizer, result)
        return Tokens(result.folder, notes=tuple(notes))
    for tokenizer in tokenizers:
        _refuse_other_words(tokenizer, result)
        if tokenizer_source == "union":
            _refuse_lost(tokenizer, result)
    if not _must_borrow(tokenizers, result):
        return Tokens(result.folder, notes=tuple(notes))
    rows = _rows_of_result(tokenizers, result)
    counts = tuple(tokenizer.count for tokenizer in tokenizers)
    return Tokens(result.folder, rows, counts, tuple(notes))


def _tokenizers(models: Sequence[Any], sources: Sequence[Source]) -> list[Tokenizer]:
    """The tokenizers of the models in folders; an adapter without one has its base's words."""
    tokenizers: list[Tokenizer] = []
    for model, source in zip(models, sources, strict=True):
        if not is_place(model):
            continue
        folder = Path(model).expanduser()
        words: Words = vocabulary(folder)
        if is_adapter(folder) and not words and tokenizers:
            words = tokenizers[0].words
        tokenizers.append(Tokenizer(folder, words, table_lengths(source)))
    return tokenizers


def _chosen(tokenizers: Sequence[Tokenizer], tokenizer_source: str | Path | None) -> Tokenizer:
    """The tokenizer of the result."""
    models = [tokenizer for tokenizer in tokenizers if not is_adapter(tokenizer.folder)]
    models = models or list(tokenizers)
    if tokenizer_source in (None, "base"):
        return models[0]
    if tokenizer_source == "union":
        unread = [tokenizer.name for tokenizer in models if not tokenizer.words]
        if unread:
            raise InputError(f"tokenizer_source: union needs a tokenizer.json in {some(unread)}")
        # An adapter counts too if its table has a row for each of its words.
        candidates = [one for one in tokenizers if one in models or not one.rowless]
        return max(candidates, key=lambda tokenizer: len(tokenizer.words))
    folder = Path(str(tokenizer_source)).expanduser()
    for tokenizer in models:
        if tokenizer.folder.resolve() == folder.resolve():
            return tokenizer
    words = vocabulary(folder)
    if not words:
        raise InputError(f"tokenizer_source {str(folder)!r} holds none of {', '.join(READ_FILES)}")
    return Tokenizer(folder, words)


def _refuse_moved(tokenizer: Tokenizer, result: Tokenizer) -> None:
    """Raise where a word has another number than in the result."""
    moved = [
        word for word, number in tokenizer.words.items() if result.words.get(word, number) != number
    ]
    if moved:
        raise InputError(
            f"{tokenizer.name!r} and {result.name!r} number {len(moved):,} tokens differently, "
            f"such as {moved[0]!r}: try mergekit"
        )


def _refuse_other_words(tokenizer: Tokenizer, result: Tokenizer) -> None:
    """Raise where one number stands for two words, or a model lacks a word before its last one."""
    word_at = {number: word for word, number in result.words.items()}
    for word, number in tokenizer.words.items():
        if word_at.get(number, word) != word:
            raise InputError(
                f"tokenizer_source: one number stands for two tokens: {number} is {word!r} in "
                f"{tokenizer.name!r} and {word_at[number]!r} in {result.name!r}: {BY_NUMBER}"
            )
    between = [
        word
        for word, number in result.words.items()
        if number < tokenizer.count and word not in tokenizer.words
    ]
    if between:
        raise InputError(
            f"tokenizer_source: {tokenizer.name!r} lacks {between[0]!r} and has tokens behind it: "
            f"{BY_NUMBER}"
        )


def _refuse_lost(tokenizer: Tokenizer, result: Tokenizer) -> None:
    """Raise where the longest vocabulary lacks a word of this model."""
    lost = [word for word in tokenizer.words if word not in result.words]
    if lost:
        raise InputError(
            f"tokenizer_source: union: {result.name!r} lacks {lost[0]!r} of {tokenizer.name!r}: "
            f"{BY_NUMBER}"
        )


def _must_borrow(tokenizers: Sequence[Tokenizer], result: Tokenizer) -> bool:
    """Whether tables differ in length, or a model lacks words of the result."""
    lengths = {tokenizer.lengths for tokenizer in tokenizers}
    counts = [tokenizer.count for tokenizer in tokenizers if tokenizer.words]
    return len(lengths) > 1 or any(count < result.count for count in counts)


def _rows_of_result(tokenizers: Sequence[Tokenizer], result: Tokenizer) -> int:
    """The number of rows of the result: that of all models if it is the same, else of its words.

    Raises:
        InputError: a tokenizer cannot be read, or a word of the result has no row in any model.
    """
    unread = [tokenizer.name for tokenizer in [*tokenizers, result] if not tokenizer.words]
    if unread:
        raise InputError(f"tokenizer_source: borrowed rows need a tokenizer.json in {some(unread)}")
    last = max(min(tokenizer.count, tokenizer.rows) for tokenizer in tokenizers)
    rowless = [word for word, number in result.words.items() if number >= last]
    if rowless:
        raise InputError(
            f"no model has a row for {rowless[0]!r} of {result.name!r}: resize its embeddings, or "
            "name another tokenizer_source"
        )
    lengths = {tokenizer.lengths for tokenizer in tokenizers}
    return tokenizers[0].rows if len(lengths) == 1 else result.count


def _unread_notes(tokenizers: Sequence[Tokenizer]) -> list[str]:
    """Notes on models whose tokenizer cannot be read, although it exists or others' can."""
    any_read = any(tokenizer.words for tokenizer in tokenizers)
    return [
        f"the tokenizer of {tokenizer.name!r} is not read: its rows are merged by their number"
        for tokenizer in tokenizers
        if tokenizer.is_foreign or (any_read and not tokenizer.words)
    ]


def _rowless_notes(tokenizers: Sequence[Tokenizer]) -> list[str]:
    """Notes on models that have words without a row."""
    return [
        f"{len(tokenizer.rowless):,} tokens of {tokenizer.name!r} have none of its "
        f"{tokenizer.rows:,} rows, such as {tokenizer.rowless[0]!r}: resize its embeddings"
        for tokenizer in tokenizers
        if tokenizer.rowless
    ]


def _difference_notes(tokenizer: Tokenizer, result: Tokenizer) -> list[str]:
    """Notes on the words of a model that the result's tokenizer lacks."""
    if not result.words:
        return []
    word_at = {number: word for word, number in result.words.items()}
    unknown = [word for word in tokenizer.words if word not in result.words]
    renamed = [word for word in unknown if tokenizer.words[word] in word_at]
    lost = [word for word in unknown if tokenizer.words[word] not in word_at]
    notes = []
    if renamed:
        word_of_result = word_at[tokenizer.words[renamed[0]]]
        notes.append(
            f"{len(renamed):,} rows stand for other tokens in {tokenizer.name!r} than in "
            f"{result.name!r}, such as {renamed[0]!r} and {word_of_result!r}: they are merged by "
            "number"
        )
    if lost:
        notes.append(
            f"the result lacks {len(lost):,} tokens of {tokenizer.name!r}, such as {lost[0]!r}: "
            "set tokenizer_source: union"
        )
    return notes


def vocabulary(folder: Path) -> dict[str, int]:
    """The number of every token of a model's folder; empty where no file holds them.

    Added tokens are in ``tokenizer.json``, ``added_tokens.json`` or ``tokenizer_config.json``; it
    depends on the version of transformers that wrote them.

    Raises:
        StorageError: one of these files is damaged.
    """
    file = next((folder / name for name in READ_FILES if (folder / name).is_file()), None)
    if file is None:
        return {}
    with told_as(StorageError, f"the tokenizer {str(file)!r} cannot be read"):
        words = _numbered(_main_words(file))
    if not words:
        return {}
    for name in (ADDED_FILE, SETTINGS_FILE):
        if not (folder / name).is_file():
            continue
        with told_as(StorageError, f"the tokenizer's {str(folder / name)!r} cannot be read"):
            for word, number in _numbered(_added_words(folder / name)).items():
                words.setdefault(word, number)
    return words


def _main_words(file: Path) -> Iterable[tuple[str, int]]:
    """The words and numbers of one of :data:`READ_FILES`."""
    text = file.read_text("utf-8")
    if file.name == "vocab.txt":
        lines = text.removesuffix("\n").split("\n")
        return [(word, number) for number, word in enumerate(lines)]
    document = json.loads(text)
    if file.name == "vocab.json":
        return document.items()
    words = document.get("model", {}).get("vocab", {})
    if isinstance(words, list):  # pairs of a word and its score; the position is the number
        words = {word: number for number, (word, _) in enumerate(words)}
    added = {token["content"]: token["id"] for token in document.get("added_tokens") or ()}
    return (words | added).items()


def _added_words(file: Path) -> Iterable[tuple[str, int]]:
    """The words and numbers of a file with added tokens."""
    document = json.loads(file.read_text("utf-8"))
    if file.name == ADDED_FILE:
        return document.items()
    added = document.get("added_tokens_decoder") or {}
    return [(token["content"], int(number)) for number, token in added.items()]


def _numbered(words: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Words with their numbers; ValueError where a number is none."""
    numbers = dict(words)
    for word, number in numbers.items():
        if not isinstance(word, str) or type(number) is not int or number < 0:
            raise ValueError(f"{word!r} has the number {number!r}")
    return numbers

"""Tensors of models under the names that they get in the result, and models of different
vocabularies brought to the tokens of one: rows of embeddings and heads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import install
from blr_analysis.errors import InputError, told_as
from blr_analysis.files import Owned, Scratch, Source, Spec
from blr_analysis.files.headers import read_json
from blr_analysis.merging.matching import INPUTS, OUTPUTS, same_bytes

Tokens = Mapping[str, int]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of the result.

    Attributes:
        tokens: their rows.
        size: the number of rows; those without a token are 0.
        known: the rows of the tokens in each model.
        base: whose row stands in models that lack a token.
        tokenizer: ``tokenizer.json`` of the result; None: that of the tokenizer's folder.
    """

    tokens: Tokens
    size: int
    known: Mapping[Path, Tokens]
    base: Path | None
    tokenizer: Mapping[str, Any] | None = None

    def alone(self, model: Path) -> Vocabulary:
        """The same where no other model lends its rows."""
        return replace(self, known={model: self.known[model]}, base=None)

    def rows(self, model: Path, lengths: Mapping[Path, int]) -> list[list[tuple[Path, int]]]:
        """By row of the result, the rows whose mean stands there: the model's own, else the base's,
        else those of all models that know the token."""
        result: list[list[tuple[Path, int]]] = [[] for _ in range(self.size)]

        def own(place: Path, token: str) -> list[tuple[Path, int]]:
            row = self.known[place].get(token)
            return [] if row is None or row >= lengths[place] else [(place, row)]

        for token, at in self.tokens.items():
            there = own(model, token)
            if not there:
                there = own(self.base, token) if self.base is not None else []
                there = there or [pair for place in self.known for pair in own(place, token)]
            result[at] = there
        return result


@dataclass(frozen=True)
class Place:
    """Where a tensor of the result is read; ``words``: how it comes about, if not as there."""

    source: Source
    name: str
    words: str = ""


class Arranged(Source):
    """Tensors of other sources under new names."""

    def __init__(
        self,
        name: str,
        places: Mapping[str, Place],
        notes: tuple[str, ...] = (),
        whole: Source | None = None,
    ) -> None:
        self.name, self.notes, self.whole, self._places = name, notes, whole, places
        self.specs = {n: p.source.specs[p.name] for n, p in places.items()}

    def words(self, name: str) -> str:
        """How a tensor comes about in the source."""
        place = self._places[name]
        return place.words or place.source.words(place.name)

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """The same elements of the tensor that it is."""
        place = self._places[name]
        return place.source.read(place.name, start, stop, Owned(scratch, self))


class Retokenized(Source):
    """A model with the rows of its embeddings and heads in the order of a vocabulary; ``empty``:
    by tensor, what stands where no model has a row, if not 0."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        model: Path,
        sources: Mapping[Path, Source],
        empty: Mapping[str, float] | None = None,
    ) -> None:
        own = sources[model]
        self.name, self.notes, self._own, self._sources = own.name, own.notes, own, sources
        self.whole, self._empty = own.whole or own, empty or {}
        most = 1 + max(vocabulary.known[model].values(), default=-1)
        self._rows: dict[str, list[list[tuple[Path, int]]]] = {}
        self.specs = dict(own.specs)
        for name, spec in own.specs.items():
            if not is_vocabulary(name) or not spec.shape or spec.shape[0] < min(most, 2):
                continue
            lengths = {p: s.specs[name].shape[0] for p, s in sources.items() if name in s.specs}
            if lengths.keys() != sources.keys():
                continue
            self._rows[name] = vocabulary.rows(model, lengths)
            self.specs[name] = Spec((vocabulary.size, *spec.shape[1:]), spec.dtype)

    def words(self, name: str) -> str:
        """How a tensor comes about in the model."""
        return self._own.words(name)

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """Rows that follow each other are read together."""
        if name not in self._rows:
            return self._own.read(name, start, stop, scratch)
        spec, rows = self.piece(name, start, stop), self._rows[name]
        width = max(1, spec.numel // max(spec.shape[0], 1))
        low, high = start // width, -(-stop // width)
        own = Owned(scratch, self)
        out = own.array("rows", (high - low) * width, spec.dtype).view(-1, width)
        at = low
        while at < high:
            parts, end = rows[at], at + 1
            if len(parts) == 1:
                place, first = parts[0]
                while end < high and rows[end] == [(place, first + end - at)]:
                    end += 1
                span = (first * width, (first + end - at) * width)
                values = self._sources[place].read(name, *span, own)
                out[at - low : end - low] = values.view(-1, width)
            else:
                mean = torch.full((width,), 0.0 if parts else self._empty.get(name, 0.0))
                for place, row in parts:
                    values = self._sources[place].read(name, row * width, (row + 1) * width, own)
                    mean += values.float() / len(parts)
                out[at - low] = mean
            at = end
        return out.view(-1)[start - low * width : stop - low * width]


def untied(sources: Mapping[Path, Source]) -> dict[Path, Source]:
    """The same models, all with a head where one of them has a head of its own."""
    result = dict(sources)
    for other in sources.values():
        for head in other.specs:
            if _layer(head) not in OUTPUTS or not head.endswith(".weight"):
                continue
            alone = [
                n for n in other.specs
                if _layer(n) in INPUTS and other.specs[n].shape[1:] == other.specs[head].shape[1:]
            ]  # fmt: skip
            if len(alone) != 1 or same_bytes(other, head, other, alone[0]):
                continue
            for place, source in result.items():
                if head not in source.specs and alone[0] in source.specs:
                    places = {n: Place(source, n) for n in source.specs}
                    places[head] = Place(source, alone[0], f"tied to {alone[0]}")
                    result[place] = Arranged(
                        source.name, places, source.notes, source.whole or source
                    )
    return result


def is_vocabulary(name: str) -> bool:
    """Whether a tensor has a row for each token."""
    return _layer(name) in INPUTS | OUTPUTS


def table_lengths(specs: Mapping[str, Spec]) -> dict[str, int]:
    """The rows of each tensor that has one for each token."""
    return {n: spec.shape[0] for n, spec in specs.items() if is_vocabulary(n) and spec.shape}


def _layer(name: str) -> str:
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", "bias") else ""


def union(folders: Sequence[Path], known: Mapping[Path, Tokens]) -> tuple[Tokens, dict[str, Any]]:
    """All tokens of several tokenizers and the ``tokenizer.json`` that has them: the first one's
    keep their numbers, those that others add follow.

    ``tokenizers`` numbers added tokens behind the model's own unless the model's ``vocab`` has them
    too: where that grows, it holds all tokens.

    Raises:
        InputError: a tokenizer is stored in another form, or the library reads other numbers.
    """
    files = [folder / "tokenizer.json" for folder in folders]
    for file in files:
        if not file.is_file():
            raise InputError(f"a union needs {str(file)!r}: save that tokenizer as a fast one")
    document = read_json(files[0])
    inside = document["model"].get("vocab")
    plain = len(inside or ())
    tokens = dict(known[folders[0]])
    document.setdefault("added_tokens", [])
    for folder, file in zip(folders[1:], files[1:], strict=True):
        theirs = read_json(file)
        new = [t for t, _ in sorted(known[folder].items(), key=lambda item: item[1])]
        new = [token for token in new if token not in tokens]
        added = {t["content"]: t for t in theirs.get("added_tokens", [])}
        first = 1 + max(tokens.values(), default=-1)
        tokens |= {token: first + k for k, token in enumerate(new)}
        for token in new:
            if token in added:
                document["added_tokens"].append({**added[token], "id": tokens[token]})
            elif isinstance(inside, dict) and document["model"]["type"] == theirs["model"]["type"]:
                inside[token] = tokens[token]
            else:
                raise InputError(f"{str(file)!r} cannot be added to {str(files[0])!r}: name one")
        have = {json.dumps(m) for m in document["model"].get("merges", ())}
        more = [m for m in theirs["model"].get("merges", ()) if json.dumps(m) not in have]
        if more and any(token not in added for token in new):
            document["model"]["merges"] += more
    if len(inside or ()) > plain:
        inside |= tokens
    if _as_read(document) != tokens:
        raise InputError("the union's tokens would get other numbers: name a model in its place")
    return tokens, document


def _as_read(document: Mapping[str, Any]) -> Tokens:
    """The numbers that the library gives to the tokens of a ``tokenizer.json``."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as fault:
        raise InputError(f"a union of tokenizers is read once more: {install('hf')}") from fault
    with (
        told_as(InputError, "the union is no tokenizer", "name a model"),
        TemporaryDirectory() as folder,
    ):
        file = Path(folder) / "tokenizer.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        return PreTrainedTokenizerFast(tokenizer_file=str(file)).get_vocab()

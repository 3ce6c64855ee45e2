"""What a recipe may say: its keys, the kind of value of each, and on which line each stands.

The keys are mergekit's, as far as whole models are merged with the methods that are here, and
this package's own beside them (``precision``, ``base_precision``, ``n_data``, ``data``, ``delta``,
``missing_precision``). No tag of the YAML is ever acted upon.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    ValidationError,
)
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError

from blr_analysis.errors import BLRError, InputError, StorageError

MOST_BYTES = 200_000
MOST_COMPLAINTS = 5
# What methods of mergekit take that are not here, or that are fixed here.
FOREIGN = (
    "epsilon", "gamma", "select_topk", "normalize_weights", "filter_wise", "max_iter", "tol", "eps",
)  # fmt: skip

Way = tuple[str | int, ...]


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a finite number")
    return value


def _plain_dtype(value: Any) -> Any:
    return value.removeprefix("torch.") if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _form(value: Any) -> str:
    """In which of its forms a weight is written."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "rules"
    return "rule" if isinstance(value, dict) else "values"


Text = Annotated[str, Field(pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")]
Number = Annotated[float, BeforeValidator(_no_flag), Field(allow_inf_nan=False)]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"], BeforeValidator(_plain_dtype)
]
Values = Annotated[tuple[Number, ...], BeforeValidator(_listed), Field(min_length=1)]


def _filled(value: Any) -> Any:
    return {} if value is None else value


class Section(BaseModel):
    """A mapping of the recipe; a key that is not here is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WrittenRule(Section):
    """A value for the tensors whose name contains ``filter``."""

    value: Values
    filter: Annotated[str, Field(min_length=1)] | None = None


WrittenWeight = Annotated[
    Annotated[Values, Tag("values")]
    | Annotated[WrittenRule, Tag("rule")]
    | Annotated[list[WrittenRule], Tag("rules")],
    Discriminator(_form),
]


class ModelParameters(Section):
    """``parameters`` of one model."""

    weight: WrittenWeight | None = None
    lambda_: WrittenWeight | None = Field(default=None, alias="lambda")
    normalize: bool | None = None
    density: WrittenWeight | None = None
    t: WrittenWeight | None = None
    rescale: bool | None = None
    int8_mask: Any = None
    epsilon: Any = None
    gamma: Any = None
    select_topk: Any = None
    normalize_weights: Any = None
    filter_wise: Any = None
    max_iter: Any = None
    tol: Any = None
    eps: Any = None
    embed_slerp: Any = None


class Parameters(ModelParameters):
    """``parameters`` of the whole recipe."""

    delta: Annotated[Number, Field(ge=0)] | None = None
    missing_precision: Literal["error", "base", "zero"] | None = None
    shrink: Annotated[Number, Field(ge=0, le=1)] | None = None
    power: Annotated[Number, Field(ge=0, le=1)] | None = None
    damping: Annotated[Number, Field(ge=0)] | None = None
    seed: Annotated[StrictInt, Field(ge=0)] | None = None


class Entry(Section):
    """One of ``models``."""

    model: Text
    precision: Text | None = None
    n_data: Annotated[StrictInt, Field(gt=0)] | None = None
    data: Text | None = None
    parameters: Annotated[ModelParameters, BeforeValidator(_filled)] = ModelParameters()


class Tokenizer(Section):
    """``tokenizer``, mergekit's longer form of ``tokenizer_source``."""

    source: Text = "base"


class RecipeText(Section):
    """A recipe as it is written."""

    merge_method: Text
    base_model: Text | None = None
    base_precision: Text | None = None
    models: Annotated[list[Entry], Field(min_length=1)] | None = None
    slices: Any = None
    modules: Any = None
    parameters: Annotated[Parameters, BeforeValidator(_filled)] = Parameters()
    dtype: Dtype | None = None
    out_dtype: Dtype | None = None
    tokenizer_source: Text | None = None
    tokenizer: Tokenizer | None = None
    chat_template: Any = None
    adapter_rank: Annotated[Number, Field(gt=0)] | None = None
    name: Any = None
    model_name: Any = None
    random_seed: Any = None


PLACES: dict[str, type[Section]] = {
    "": RecipeText,
    "parameters": Parameters,
    "models": Entry,
    "models.parameters": ModelParameters,
    "tokenizer": Tokenizer,
}


@dataclass
class Page:
    """A recipe that is being read: where everything stands, and what the user should know of it.

    Attributes:
        name: of the file.
        folder: where relative paths start.
        text: what the file says.
        data: the same as ruamel reads it, with line marks.
        notes: what is no error, with its line.
    """

    name: str
    folder: Path
    text: str
    data: Any
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> Page:
        """Read one YAML document.

        Raises:
            StorageError: the file cannot be read.
            InputError: it is no YAML, holds a key twice, more than one document, or too much.
        """
        try:
            with open(path, "rb") as file:
                raw = file.read(MOST_BYTES + 1)
        except (OSError, ValueError) as fault:
            reason = getattr(fault, "strerror", None) or str(fault)
            raise StorageError(f"the recipe {str(path)!r} cannot be read: {reason}.") from fault
        name = path.name
        if len(raw) > MOST_BYTES:
            raise InputError(f"{name} has more than {MOST_BYTES:,} bytes: no recipe is that long.")
        try:
            text = raw.decode("utf-8-sig")
            data = YAML(typ="rt", pure=True).load(text)
        except UnicodeDecodeError as fault:
            line = raw.count(b"\n", 0, fault.start) + 1
            raise InputError(f"{name}, line {line}: a byte that is no UTF-8.") from fault
        except MarkedYAMLError as fault:
            mark = fault.problem_mark or fault.context_mark
            place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
            raise InputError(f"{name}{place}: no readable YAML: {fault.problem}.") from fault
        except Exception as fault:  # the parser lets many kinds through on malformed text
            raise InputError(f"{name} is no readable YAML: {fault!r:.80}.") from fault
        if not isinstance(data, dict):
            raise InputError(f"{name}, line 1: expected keys such as merge_method and models.")
        return cls(name, Path(os.path.abspath(path)).parent, text, data)

    def find(self, way: Sequence[str | int]) -> tuple[str, int, int]:
        """The nearest key that the text has on the way to a value, its line and column (from 1).

        >>> page = Page("r.yml", Path(), "", YAML().load("a:\\n  - b: 1\\n    c: 2\\n"))
        >>> page.find(("a", 0, "c")), page.find(("a", 0, "c", "gone"))
        (('a[0].c', 3, 5), ('a[0].c', 3, 5))
        """
        here, key, line, column = self.data, "", 0, 0
        for part in way:
            try:
                line, column = here.lc.data[part][:2]
                here = here[part]
            except (AttributeError, KeyError, IndexError, TypeError):
                continue  # pydantic's own words for the form of a value
            key += f"[{part}]" if isinstance(part, int) else f".{part}"
        return key.removeprefix("."), line + 1, column + 1

    def place(self, way: Way) -> str:
        """File, line and column."""
        _, line, column = self.find(way)
        return f"{self.name}, line {line}, column {column}"

    def wrong(self, way: Way, what: object) -> InputError:
        """An error with file, line and column."""
        return InputError(f"{self.place(way)}: {str(what).rstrip('.')}.")

    @contextmanager
    def naming(self, way: Way) -> Iterator[None]:
        """Errors inside get the line of a key."""
        try:
            yield
        except BLRError as fault:
            raise self.wrong(way, fault) from fault

    def note(self, way: Way, what: str) -> None:
        """Something that is no error, with its line."""
        self.notes.append(f"line {self.find(way)[1]}: {what}")

    def check(self) -> RecipeText:
        """A recipe whose every key is known and of the right kind.

        Raises:
            InputError: every wrong key with its line, what was expected, and the nearest valid key.
        """
        try:
            return RecipeText.model_validate(self.data)
        except ValidationError as fault:
            faults = sorted(fault.errors(), key=lambda error: self.find(error["loc"])[1:])
        texts = [str(self.wrong(error["loc"], self._complaint(error))) for error in faults]
        texts = list(dict.fromkeys(texts))
        if len(texts) > MOST_COMPLAINTS:
            texts[MOST_COMPLAINTS:] = [f"… and {len(texts) - MOST_COMPLAINTS} more"]
        raise InputError("\n".join(texts))

    def _complaint(self, error: Any) -> str:
        """What to say about one error of pydantic."""
        way, given, what = error["loc"], error["input"], error["msg"]
        key = self.find(way)[0]
        match error["type"]:
            case "extra_forbidden":
                return _unknown(way)
            case "missing":
                return f"the key {way[-1]!r} is missing"
            case "model_type" | "model_attributes_type":
                return f"{key}: expected keys and values"
            case "list_type":
                return f"{key}: expected a list, each item beginning with '- '"
            case "too_short":
                return f"{key}: the list is empty"
            case "string_pattern_mismatch":
                what = "expected text"
        what = re.sub("^Input should be|^Value error, expected", "expected", what)
        plain = not isinstance(given, CommentedMap | CommentedSeq)
        return f"{key}: {what}{f', got {given!r:.60}' if plain else ''}"


def _unknown(way: Way) -> str:
    """What to write instead of a key that is not known, or where to write it."""
    key = str(way[-1])
    above = [part for part in way[:-1] if isinstance(part, str)]
    part = WrittenRule
    if "parameters" not in above[:-1]:  # whose values are rules; other names between are the user's
        inside = [p for p in PLACES if _in_order(p.split("."), above) or not p]
        part = PLACES[max(inside, key=len)]
    known = [field.alias or name for name, field in part.model_fields.items()]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    where = [p for p, other in PLACES.items() if p and key in other.model_fields]
    if near:
        return f"unknown key {key!r}: did you mean {near[0]!r}"
    if where:
        return f"unknown key {key!r}: it belongs to {where[0]!r}"
    return f"unknown key {key!r}; known here: {', '.join(known)}"


def _in_order(parts: Sequence[str], way: Sequence[str]) -> bool:
    left = iter(way)
    return all(part in left for part in parts)

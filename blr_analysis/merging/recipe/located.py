"""Which line each value of a YAML text stands on: plain data, and where to find it.

Only what plain data needs is read: mappings with text keys, lists, text, numbers, true/false and
null. No tag is ever acted upon, and the work is bounded whatever the text says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from blr_analysis.errors import InputError

MOST_CHARACTERS = 200_000
MOST_VALUES = 20_000  # after aliases are written out: a "billion laughs" stops here
MOST_LEVELS = 50
PREFIX = "tag:yaml.org,2002:"
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Located:
    """What a text says, and where.

    Attributes:
        data: dicts, lists, text, numbers, booleans and None.
        name: of the file, for messages.
        marks: line and column (from 1) of each key and each list item, by the way to it.
    """

    data: Any
    name: str
    marks: Mapping[Path, tuple[int, int]]

    def where(self, path: Sequence[str | int]) -> str:
        """File, line and column of a key, or of what is nearest above it."""
        for length in range(len(path), -1, -1):
            mark = self.marks.get(tuple(path[:length]))
            if mark is not None:
                return f"{self.name}, line {mark[0]}, column {mark[1]}"
        return self.name

    def line(self, path: Sequence[str | int]) -> int:
        """The line of a key, or of what is nearest above it; 0 where nothing is known."""
        marks = (self.marks.get(tuple(path[:n])) for n in range(len(path), -1, -1))
        return next((mark[0] for mark in marks if mark is not None), 0)


def spelled(path: Sequence[str | int]) -> str:
    """The way to a value as one writes it.

    >>> spelled(("models", 1, "parameters", "weight"))
    'models[1].parameters.weight'
    """
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def read_yaml(text: str, name: str) -> Located:
    """Read one YAML document.

    Raises:
        InputError: it is no YAML, more than one document, holds a key twice, a tag, a merge key,
            an alias inside of what it names, or too much; file, line and column are named.

    Example:
        >>> found = read_yaml("models:\\n  - model: ./a\\n", "recipe.yml")
        >>> found.data, found.where(("models", 0, "model"))
        ({'models': [{'model': './a'}]}, 'recipe.yml, line 2, column 5')
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"{name} has {len(text):,} characters: no recipe is that long.")
    try:
        _check_size(text, name)
        root = YAML(typ="safe", pure=True).compose(text)
    except InputError:
        raise
    except MarkedYAMLError as fault:
        raise InputError(_unreadable(fault, name)) from fault
    except (YAMLError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as fault:
        # the last ones: what the parser lets through on malformed text
        raise InputError(f"{name} is no YAML that can be read: {_first(fault)}.") from fault
    if root is None:
        return Located(None, name, {})
    reader = _Reader(name)
    return Located(reader.value(root, (), ()), name, reader.marks)


def _check_size(text: str, name: str) -> None:
    """Raise where the text has too many values or levels, before a tree is made of it."""
    level = 0
    for count, event in enumerate(YAML(typ="safe", pure=True).parse(text)):
        level += isinstance(event, CollectionStartEvent)
        level -= isinstance(event, CollectionEndEvent)
        if level > MOST_LEVELS or count > 2 * MOST_VALUES:
            line, column = event.start_mark.line + 1, event.start_mark.column + 1
            what = f"{MOST_LEVELS} levels, one inside the other"
            what = what if level > MOST_LEVELS else f"{MOST_VALUES:,} values"
            raise InputError(f"{name}, line {line}, column {column}: more than {what}.")


class _Reader:
    """From nodes to plain data, each value counted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.marks: dict[Path, tuple[int, int]] = {}
        self._count = 0

    def value(self, node: Node, path: Path, above: tuple[int, ...]) -> Any:
        self.marks.setdefault(path, _mark(node))
        self._count += 1
        if self._count > MOST_VALUES:
            raise self._wrong(node, f"more than {MOST_VALUES:,} values, aliases written out")
        if id(node) in above:
            raise self._wrong(node, "an alias stands inside of what it names")
        inside = (*above, id(node))
        match node:
            case ScalarNode():
                return self._scalar(node)
            case SequenceNode() if node.tag == f"{PREFIX}seq":
                return [self.value(n, (*path, i), inside) for i, n in enumerate(node.value)]
            case MappingNode() if node.tag == f"{PREFIX}map":
                return self._mapping(node, path, inside)
        raise self._wrong(node, f"the tag {str(node.tag)!r}: plain values only")

    def _mapping(self, node: MappingNode, path: Path, inside: tuple[int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == f"{PREFIX}merge":
                raise self._wrong(key, "a merge key (<<): write the keys out")
            name = self._scalar(key) if isinstance(key, ScalarNode) else None
            if not isinstance(name, str):
                raise self._wrong(key, "a key that is not text")
            if name in found:
                first = self.marks[*path, name][0]
                raise self._wrong(key, f"the key {name!r} a second time (first on line {first})")
            self.marks[*path, name] = _mark(key)
            found[name] = self.value(value, (*path, name), inside)
        return found

    def _scalar(self, node: ScalarNode) -> Any:
        text = str(node.value)
        try:
            match str(node.tag).removeprefix(PREFIX):
                case "str" | "timestamp":
                    return text
                case "null":
                    return None
                case "bool":
                    return WORDS[text.lower()]
                case "int":
                    return _integer(text.replace("_", ""))
                case "float":
                    return float(
                        text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan")
                    )
        except (ValueError, KeyError):
            raise self._wrong(node, f"{_short(text)} is no number that can be read") from None
        raise self._wrong(node, f"the tag {str(node.tag)!r}: plain values only")

    def _wrong(self, node: Node, what: str) -> InputError:
        line, column = _mark(node)
        return InputError(f"{self.name}, line {line}, column {column}: {what}.")


def _integer(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return int(text, 10)  # a leading zero


def _mark(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _unreadable(fault: MarkedYAMLError, name: str) -> str:
    mark = fault.problem_mark or fault.context_mark
    place = name if mark is None else f"{name}, line {mark.line + 1}, column {mark.column + 1}"
    what = " ".join(str(part) for part in (fault.context, fault.problem) if part)
    if "\\t" in what:
        what = "a tab: YAML is indented with blanks"
    elif "but found another document" in what:
        what = "a second document begins here: one recipe is one document"
    return f"{place}: no YAML that can be read: {' '.join(what.split())}."


def _first(fault: BaseException) -> str:
    lines = str(fault).splitlines() or [type(fault).__name__]
    return _short(lines[0].rstrip("."))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."

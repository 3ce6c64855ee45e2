"""The kinds of value that a recipe holds, each with what was expected where it is another."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import PlainValidator

from blr_analysis.merging.recipe.layer_weights import Rule, Setting


class Unexpected(ValueError):
    """Another kind of value than the recipe needs there.

    Attributes:
        at: the way to it from the key that is checked.
    """

    def __init__(self, wanted: str, value: Any, at: tuple[str | int, ...] = ()) -> None:
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
        super().__init__(f"expected {wanted}, got {shown}")
        self.at = at


def _number(value: Any, wanted: str = "a finite number", at: tuple[str | int, ...] = ()) -> float:
    """Numbers, and text that is one: YAML 1.1 takes ``1e-8`` for text."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise Unexpected(wanted, value, at)
    return found


def _not_negative(value: Any) -> float:
    found = _number(value, wanted := "a finite number of at least 0")
    if found < 0:
        raise Unexpected(wanted, value)
    return found


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Unexpected("a whole number above 0", value)
    return value


def _flag(value: Any) -> bool:
    word = value.lower() if isinstance(value, str) else value
    for truth, forms in (
        (True, (True, "true", "yes", "on")),
        (False, (False, "false", "no", "off")),
    ):
        if any(word == form for form in forms):  # 1 and 1.0 count as true, as in mergekit
            return truth
    raise Unexpected("true or false", value)


def _text(value: Any) -> str:
    """Text that can be a name: no null character, nothing that UTF-8 cannot say."""
    if isinstance(value, str) and value.strip() and "\0" not in value:
        with contextlib.suppress(UnicodeEncodeError):
            value.encode("utf-8")
            return value
    raise Unexpected("text", value)


def _layers(value: Any) -> tuple[int, int]:
    plain = isinstance(value, list) and len(value) == 2
    if not plain or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
        raise Unexpected("two whole numbers, [first, last + 1]", value)
    return value[0], value[1]


def _setting(value: Any) -> Setting:
    """A number, a list of numbers, or rules of ``filter`` and ``value``."""
    if isinstance(value, dict):
        return (_rule(value, ()),)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return tuple(_rule(item, (i,)) for i, item in enumerate(value))
    return (Rule(_gradient(value, ())),)


def _rule(item: dict[str, Any], at: tuple[str | int, ...]) -> Rule:
    for key in item:
        if key not in ("filter", "value"):
            raise Unexpected("the keys 'filter' and 'value'", key, (*at, key))
    if "value" not in item:
        raise Unexpected("a 'value' beside the filter", item, at)
    pattern = item.get("filter")
    if pattern is not None and (not isinstance(pattern, str) or not pattern):
        raise Unexpected("a part of the tensors' names", pattern, (*at, "filter"))
    return Rule(_gradient(item["value"], (*at, "value")), pattern)


def _gradient(value: Any, at: tuple[str | int, ...]) -> tuple[float, ...]:
    if not isinstance(value, list):
        return (_number(value, "a finite number, a list of numbers, or a list of rules", at),)
    if not value:
        raise Unexpected("at least one number", value, at)
    return tuple(_number(n, at=(*at, i)) for i, n in enumerate(value))


def _one_of(*words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in words:
            raise Unexpected(f"one of {', '.join(words)}", value)
        return value

    return check


DTYPES = ("bfloat16", "float16", "float32", "float64")


def _dtype(value: Any) -> str:
    return _one_of(*DTYPES)(value.removeprefix("torch.") if isinstance(value, str) else value)


Text = Annotated[str, PlainValidator(_text)]
Flag = Annotated[bool, PlainValidator(_flag)]
Count = Annotated[int, PlainValidator(_count)]
Amount = Annotated[float, PlainValidator(_not_negative)]
Weight = Annotated[tuple[Rule, ...], PlainValidator(_setting)]
Dtype = Annotated[str, PlainValidator(_dtype)]
Missing = Annotated[str, PlainValidator(_one_of("error", "base", "zero"))]
LayerRange = Annotated[tuple[int, int], PlainValidator(_layers)]

"""Which chat template a merged model gets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from blr_analysis.errors import InputError

MOST_BYTES = 50_000_000


def template_of(text: str, folder: Path, models: Iterable[Path]) -> str | None:
    """What ``chat_template`` of a recipe means; None leaves the tokenizer's own.

    ``auto`` is the template that most of the models have (the first of them where several are as
    frequent); text with ``{`` is a Jinja template itself; anything else is a file with one.

    Raises:
        InputError: no such file, or a model's tokenizer files cannot be read.
    """
    if text == "auto":
        counted = Counter(t for t in map(model_template, models) if t is not None)
        return counted.most_common(1)[0][0] if counted else None
    if "{" in text:
        return text
    try:
        place = folder / Path(text).expanduser()
        return place.read_text("utf-8")
    except (OSError, RuntimeError, ValueError) as fault:
        raise InputError(
            f"chat_template {text!r}: expected auto, a Jinja template, or a file that holds one; "
            "mergekit's named templates are not here"
        ) from fault


def model_template(model: Path) -> str | None:
    """The chat template in a model's folder, or None.

    Raises:
        InputError: the tokenizer files cannot be read.
    """
    own, config = model / "chat_template.jinja", model / "tokenizer_config.json"
    try:
        if own.is_file():
            return own.read_text("utf-8")
        if not config.is_file() or config.stat().st_size > MOST_BYTES:
            return None
        found = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise InputError(
            f"chat_template: auto: the tokenizer files of {str(model)!r} cannot be read: {fault}"
        ) from fault
    template = found.get("chat_template") if isinstance(found, dict) else None
    if isinstance(template, list):  # several by name
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None

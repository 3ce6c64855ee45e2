"""Which folder a recipe means: paths from the recipe's own folder, and models already downloaded.

Nothing is fetched here. A name such as ``org/model`` is looked for in the Hugging Face cache on
this machine (``$HF_HUB_CACHE``, ``$HF_HOME/hub`` or ``~/.cache/huggingface/hub``), whose
snapshots are folders of symbolic links to the files themselves; they are followed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from blr_analysis.errors import InputError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SNAPSHOT = re.compile(r"models--(?P<name>.+)")


def locate(text: str, folder: Path) -> Path:
    """The file or folder that a recipe in ``folder`` means by ``text``.

    Raises:
        InputError: there is none on this machine.
    """
    place = folder / _home(text)
    if _exists(place):
        return place
    name, _, revision = text.partition("@")
    if HUB_NAME.fullmatch(name):
        found = _snapshot(name, revision or "main")
        if found is not None:
            return found
        raise InputError(
            f"there is no folder {str(place)!r}, and {text!r} is not in the Hugging Face cache "
            f"{str(hub_cache())!r}: nothing is downloaded here. Run `huggingface-cli download "
            f"{name}{f' --revision {revision}' if revision else ''}` first; the recipe then finds "
            "the name in the cache, whose links are followed, or write the path of the folder"
        )
    raise InputError(f"there is no file or folder {str(place)!r} ({_whence(text, folder)})")


def precision_path(text: str, folder: Path) -> Path:
    """Where a precision is stored: a folder, or a ``.safetensors`` file.

    Raises:
        InputError: nothing there.
    """
    place = folder / _home(text)
    if not _exists(place):
        raise InputError(f"there is no precision {str(place)!r} ({_whence(text, folder)})")
    return place


def beside_model(model: Path) -> Path | None:
    """The folder ``precision`` of a model, if it has one."""
    place = model / "precision"
    return place if place.is_dir() else None


def same_place(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file or folder, links followed."""
    return os.path.realpath(one) == os.path.realpath(other)


def hub_name(place: Path) -> str | None:
    """The name on the Hugging Face hub of a folder in its cache; None for any other.

    >>> hub_name(Path("/cache/hub/models--org--model/snapshots/0a1b"))
    'org/model'
    >>> hub_name(Path("/home/me/model")) is None
    True
    """
    if len(place.parts) < 3 or place.parts[-2] != "snapshots":
        return None
    found = SNAPSHOT.fullmatch(place.parts[-3])
    return found["name"].replace("--", "/") if found else None


def hub_cache() -> Path:
    """Where the Hugging Face libraries keep what they downloaded."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _snapshot(name: str, revision: str) -> Path | None:
    kept = hub_cache() / f"models--{name.replace('/', '--')}"
    if "/" in revision or revision in ("", ".", ".."):
        return None
    try:
        commit = (kept / "refs" / revision).read_text("utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    place = kept / "snapshots" / commit
    return place if re.fullmatch(r"\w+", commit) and _exists(place) else None


def _home(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as fault:
        raise InputError(f"{text!r}: no user of this name has a home folder here") from fault


def _exists(place: Path) -> bool:
    try:
        return place.exists()
    except (OSError, ValueError):  # a name longer than the file system takes
        return False


def _whence(text: str, folder: Path) -> str:
    if _home(text).is_absolute():
        return "an absolute path"
    return f"{text!r}, taken from the folder of the recipe"

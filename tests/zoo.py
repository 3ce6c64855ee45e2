"""Every way of using a parameter that the engine must read exactly, as tiny models with inputs."""

from __future__ import annotations

from collections.abc import Callable

from models import example_models
from parts import Case
from zoo_layers import layers
from zoo_uses import uses


def _mixed() -> dict[str, Callable[[], Case]]:
    return {n: lambda n=n: Case(*example_models()[n]) for n in (
        "mlp", "images", "volumes", "words_tied", "words", "functional", "recurrent"
    )}  # fmt: skip


CASES: dict[str, Callable[[], Case]] = {**_mixed(), **layers(), **uses()}

"""How many bytes a person means: 500MB, 1GiB, 2e9."""

from __future__ import annotations

import math
import re

from blr_analysis.errors import InputError

UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}{b}": 1000**n for n, letter in enumerate("KMGT", 1) for b in ("", "B")}
UNITS |= {f"{letter}I{b}": 1024**n for n, letter in enumerate("KMGT", 1) for b in ("", "B")}
NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def read_size(option: str, text: str) -> int:
    """Bytes, at least 1.

    Raises:
        InputError: no size, named by the option.

    >>> read_size("--max-memory", "1.5GB"), read_size("--max-memory", "2 MiB")
    (1500000000, 2097152)
    """
    match = NUMBER.fullmatch(text)
    unit = UNITS.get(match[2].upper()) if match else None
    count = float(match[1]) * unit if match and unit else 0.0
    if not 1 <= count < 2**63 or not math.isfinite(count):
        raise InputError(f"{option} must be a size such as 500MB, 1GB or 1GiB, got {text!r}")
    return int(count)

"""Keep what a benchmark prints: its markdown tables as CSV below ``benchmarks/results/``.

    python -m benchmarks.binary | python -m benchmarks.results binary

Tables with the same columns make one file, with the nearest heading above each ("section") and the
bold words above it ("title") as columns, as far as they differ. One NAME for every sort of table,
in the order in which they come; what is read is printed as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).parent / "results"


def frames(lines: Iterable[str]) -> list[pd.DataFrame]:
    """The tables in a text; those with the same columns as one."""
    columns: tuple[str, ...] = ()
    above = {"section": "", "title": ""}
    rows: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for line in map(str.strip, lines):
        if line.startswith("#"):
            above = {"section": line.lstrip("# "), "title": ""}
        elif line.startswith("**"):
            above["title"] = line.split("**")[1]
        if not line.startswith("|"):
            columns = ()
            continue
        cells = tuple(cell.strip().replace("**", "") for cell in line.strip("|").split("|"))
        if not columns:
            columns = cells
        elif set("".join(cells)) - set("-: "):
            rows.setdefault(columns, []).append(above | dict(zip(columns, cells, strict=True)))
    return [pd.DataFrame(part).pipe(without_constants) for part in rows.values()]


def without_constants(table: pd.DataFrame) -> pd.DataFrame:
    """A table without a section or title that is the same in every row."""
    return table.drop(columns=[c for c in ("section", "title") if table[c].nunique() == 1])


def write(name: str, table: pd.DataFrame) -> None:
    """``benchmarks/results/NAME.csv``."""
    FOLDER.mkdir(exist_ok=True)
    table.to_csv(FOLDER / f"{name}.csv", index=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("names", nargs="+", help="one for every sort of table")
    names = parser.parse_args().names
    for name, table in zip(names, frames(echoed(sys.stdin)), strict=True):
        write(name, table)


def echoed(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        print(line, end="", flush=True)
        yield line


if __name__ == "__main__":
    main()

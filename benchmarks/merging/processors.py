"""Processor seconds of every method that both this package and mergekit have, without start-up.

    python -m benchmarks.merging.processors [--parameters 12e6] [--peers DIR] [--methods METHOD ...]

One process merges by all recipes, one after the other, and so does mergekit's. Processor seconds
change little on a busy machine, where the seconds of a clock change much. For those, and for
memory, see :mod:`benchmarks.merging.speed`, whose checkpoints and recipes these are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.__main__ import machine
from benchmarks.merging import child
from benchmarks.merging.checkpoints_made import make, shape_of
from benchmarks.merging.contenders import HERE, METHODS_OF_MERGEKIT, ROOT, contenders


def seconds_by_method(text: str) -> dict[str, float]:
    """The lines of :mod:`benchmarks.merging.all_recipes` among what else was printed."""
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"method"')]
    return {row["method"]: row["seconds"] for row in rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=12e6, help="about how many")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--methods", nargs="+", default=list(METHODS_OF_MERGEKIT))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args(arguments)
    root = Path(tempfile.mkdtemp(prefix="merging_processors_", dir=args.folder))
    try:
        made = make(root, int(args.parameters), precisions=False)
        contenders(made, args.peers)  # writes the recipes
        recipes = [root / f"{method}.yml" for method in args.methods]
        pythons = {"ours": sys.executable, "mergekit": args.peers / "mergekit" / "bin" / "python"}
        script = HERE / "all_recipes.py"
        found = {}
        for package, python in pythons.items():
            command = [python, "-W", "ignore", script, package, root / "out", *recipes]
            path = [ROOT] if package == "ours" else []
            found[package] = seconds_by_method(child.output(command, path))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    size = f"{shape_of(int(args.parameters)).parameters / 1e6:.1f} million parameters."
    print(machine(), size, "", "| method | ours, s | mergekit, s | ours / mergekit |", sep="\n")
    print("|---|---|---|---|")
    for method, seconds in found["ours"].items():
        theirs = found["mergekit"].get(method, float("nan"))
        print(f"| {method} | {seconds:.2f} | {theirs:.2f} | {seconds / theirs:.2f} |")


if __name__ == "__main__":
    main()

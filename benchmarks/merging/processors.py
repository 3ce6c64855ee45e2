"""Processor seconds and memory of every method that both this package and mergekit have.

    python -m benchmarks.merging.processors [--parameters 30e6] [--peers DIR] [--methods METHOD ...]
        [--packages ours mergekit] [--folder DIR] | python -m benchmarks.results merging_processors

Every merge is a process of its own, with one thread of torch, and is timed without start-up: a
merge of a small model comes before it. Processor seconds change little on a busy machine, where the
seconds of a clock change much. For those see :mod:`benchmarks.merging.speed`, whose checkpoints and
recipes these are.

* seconds: of all processor cores, user and system.
* peak: resident memory, start-up and mapped files included.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.__main__ import machine
from benchmarks.merging import child
from benchmarks.merging.checkpoints_made import Checkpoints, make, shape_of
from benchmarks.merging.contenders import ARITHMETIC, HERE, METHODS_OF_MERGEKIT, ROOT, recipe_file

METHODS = (ARITHMETIC, *METHODS_OF_MERGEKIT)
PACKAGES = ("ours", "mergekit")
SMALL = 500_000  # parameters of the model that is merged first
UNKNOWN = float("nan")


@dataclass(frozen=True)
class Cost:
    """What one merge takes; NaN where it failed.

    Attributes:
        seconds: of processors.
        peak: bytes of resident memory.
    """

    seconds: float = UNKNOWN
    peak: float = UNKNOWN


def cost(package: str, python: Path, method: str, small: Checkpoints, made: Checkpoints) -> Cost:
    """Merge by one method; what a merge that fails says is printed to the standard error."""
    out = made.root / "out"
    recipes = [recipe_file(checkpoints, method) for checkpoints in (small, made)]
    command = ["env", "OMP_NUM_THREADS=1", python, "-W", "ignore", HERE / "one_recipe.py", package]
    try:
        run = child.run([*command, *recipes, out], [ROOT] if package == "ours" else [])
    except child.ChildError as error:
        print(f"{package}, {method}: {error}", file=sys.stderr, flush=True)
        return Cost()
    finally:
        shutil.rmtree(out, ignore_errors=True)
    assert run.inner is not None
    return Cost(run.inner, run.peak)


def row(method: str, costs: dict[str, Cost]) -> str:
    """A line of the table; a dash where a merge failed or was not asked for."""
    ours = costs.get("ours", Cost())
    theirs = costs.get("mergekit", Cost())
    numbers = [f"{ours.seconds:.2f}", f"{theirs.seconds:.2f}"]
    numbers += [f"{ours.seconds / theirs.seconds:.2f}"]
    numbers += [f"{one.peak / 1e6:.0f}" for one in (ours, theirs)]
    return f"| {' | '.join((method, *numbers))} |".replace("nan", "-")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=30e6, help="about how many")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=PACKAGES)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args(arguments)
    pythons = {
        "ours": Path(sys.executable),
        "mergekit": args.peers.absolute() / "mergekit" / "bin" / "python",
    }
    args.folder.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="merging_processors_", dir=args.folder))
    failed = []
    try:
        small = make(root / "small", SMALL, precisions=False)
        made = make(root / "large", int(args.parameters), precisions=False)
        n_parameters = shape_of(int(args.parameters)).parameters
        print(machine(), f"{n_parameters / 1e6:.1f} million parameters.", "", sep="\n")
        print("| method | ours, s | mergekit, s | ours / mergekit | ours, MB | mergekit, MB |")
        print("|---|---|---|---|---|---|", flush=True)
        for method in args.methods:
            costs = {
                package: cost(package, pythons[package], method, small, made)
                for package in args.packages
            }
            print(row(method, costs), flush=True)
            failed += [
                f"{name} ({method})" for name, one in costs.items() if math.isnan(one.seconds)
            ]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

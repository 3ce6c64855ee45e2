"""Seconds and memory of merging folders: ours and mergekit's.

    python -m benchmarks.merging.speed [--parameters 551e6] [--rounds 3] [--peers DIR] [--only NAME]
        [--methods METHOD ...] [--folder DIR] | python -m benchmarks.results merging_speed

Makes its checkpoints (a bfloat16 base, three fine-tunes, four float32 precision sets: 13.2 GB for
551 million parameters, of which 1.1 GB come out) in a folder that is removed afterwards. Every
contender is a fresh process; they take turns; medians are printed.

* raw: ``cat`` of the inputs to ``/dev/null`` and ``cp`` of a file of the output's size. The ratios
  are to this, in the same run.
* seconds: from the start of the process to its end. "inner": without start-up and imports.
* peak: resident memory, as the kernel counts it; files that are mapped count as far as they are
  resident.
* differs: the share of the numbers written that are not ours; largest: the largest difference, over
  the largest number of the same tensor (bfloat16 is rounded to 2⁻⁸ of a number).

DIR holds mergekit's environment as DIR/mergekit (``make peers`` sets it up).
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.__main__ import machine
from benchmarks.merging import child
from benchmarks.merging.agreement import Difference, difference
from benchmarks.merging.checkpoints_made import Checkpoints, bytes_needed, make, shape_of
from benchmarks.merging.contenders import MATCHING, Contender, contenders

COLUMNS: tuple[str, ...] = (
    "method", "contender", "seconds", "× raw", "inner", "inner × raw", "processor seconds",
    "peak GB", "differs", "largest",
)  # fmt: skip


@dataclass
class Measured:
    """What came of one contender, run by run."""

    contender: Contender
    runs: list[child.Run] = field(default_factory=list)
    apart: Difference | None = None
    error: str = ""

    def median(self, what: str) -> float:
        """Of a field of :class:`child.Run`; NaN where there is none."""
        found = [getattr(run, what) for run in self.runs]
        return statistics.median(found) if found and None not in found else float("nan")


def measure(made: Checkpoints, found: Sequence[Measured], rounds: int) -> None:
    """Let all take turns; the first to write a result of a method is what others are compared to.

    Contenders that fail are left out of later rounds, with what they said.
    """
    ours: dict[str, Path] = {}
    for turn in range(rounds):
        for one in found:
            if not one.error:
                print(f"round {turn + 1}: {one.contender.label}", file=sys.stderr, flush=True)
                _turn(made, one, ours)


def _turn(made: Checkpoints, one: Measured, ours: dict[str, Path]) -> None:
    contender = one.contender
    out = made.root / "out"
    try:
        run = child.run(contender.command(out), contender.path)
        one.runs.append(run)
        words = f"    {run.seconds:.2f} s, of processors {run.cpu:.2f} s, {run.peak / 1e9:.2f} GB"
        print(words, file=sys.stderr, flush=True)
        written = out / "model.safetensors"
        if contender.merges and one.apart is None:
            if contender.method not in ours:
                ours[contender.method] = kept = made.root / f"ours_{contender.method}"
                out.rename(kept)
                written = kept / "model.safetensors"
            one.apart = difference(written, ours[contender.method] / "model.safetensors")
    except child.ChildError as error:
        one.error = " ".join(str(error).split())[:200]
        print(f"{contender.label}: {one.error}", file=sys.stderr)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def table(found: Sequence[Measured]) -> list[str]:
    """One row per contender, ratios to the raw one of the same method."""
    raw = {m.contender.method: m.median("seconds") for m in found if m.contender.name == "raw"}
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for one in found:
        if one.runs:
            seconds = one.median("seconds")
            inner = one.median("inner")
            floor = raw[one.contender.method]
            numbers = (seconds, seconds / floor, inner, inner / floor, one.median("cpu"),
                       one.median("peak") / 1e9)  # fmt: skip
            cells = ["" if value != value else f"{value:.2f}" for value in numbers]
            apart = one.apart
            cells += ["", ""] if apart is None else [f"{apart.share:.2g}", f"{apart.largest:.2g}"]
            names = (one.contender.method, one.contender.name)
            lines.append(f"| {' | '.join((*names, *cells))} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=551e6, help="about how many")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every contender")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--only", default="", help="contenders by a part of their name")
    parser.add_argument("--methods", nargs="+", help="left out: all")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args(arguments)
    shape = shape_of(int(args.parameters))
    needed = bytes_needed(shape) + 16 * shape.parameters
    if shutil.disk_usage(args.folder).free < needed:
        raise SystemExit(f"{args.folder} has less than {needed / 1e9:.1f} GB free: name another")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or they would stay
    root = Path(tempfile.mkdtemp(prefix="merging_speed_", dir=args.folder))
    found: list[Measured] = []
    try:
        print(f"making checkpoints in {root}", file=sys.stderr, flush=True)
        has_precisions = not args.methods or MATCHING in args.methods
        made = make(root, int(args.parameters), precisions=has_precisions)
        wanted = contenders(made, args.peers)
        wanted = [c for c in wanted if c.name == "raw" or args.only in c.label]
        if args.methods:
            wanted = [c for c in wanted if c.method in args.methods]
        found = [Measured(contender) for contender in wanted]
        measure(made, found, args.rounds)
    finally:  # a run that is ended shows what it has measured
        shutil.rmtree(root, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
        print(machine(), f"{shape.parameters / 1e6:.1f} million parameters.", "", sep="\n")
        print(*table(found), sep="\n", flush=True)
    if failed := [m.contender.label for m in found if m.error]:
        raise SystemExit("failed: " + ", ".join(failed))


if __name__ == "__main__":
    main()

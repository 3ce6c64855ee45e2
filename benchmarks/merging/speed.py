"""Seconds and memory of merging folders: ours, mergekit's, and everything in memory at once.

    python -m benchmarks.merging.speed [--parameters 551e6] [--rounds 3] [--peers DIR]
        [--only NAME ...] [--folder DIR] [--out TABLE.md] [--keep]

Makes its checkpoints (a bfloat16 base, three fine-tunes, four float32 precision sets: 13.2 GB for
551 million parameters, of which 1.1 GB come out) in a folder that is removed afterwards. Every
contender is a fresh process; they take turns; medians are printed. First all merge a tiny model,
not measured, so that Python has compiled their modules, as it has on a machine in use. Before each
run its inputs are read once and finished writes are flushed, so that all find the same disk.

* raw: ``cat`` of the inputs to ``/dev/null`` and ``cp`` of a file of the output's size. The ratios
  are to this, in the same run. "raw, flushed" also waits until the copy is on the disk, as ours
  does before it lets a merged model appear (none of the others do).
* seconds: from the start of the process to its end. "inner": without start-up and imports.
* peak: resident memory, as the kernel counts it. Files that are mapped count as far as they are
  resident; "own" leaves them out (the kernel can take them back when others need memory).
* differs: the share of the numbers written that are not ours; largest: the largest difference, over
  the largest number of the same tensor (bfloat16 is rounded to 2⁻⁸ of a number).

DIR holds mergekit's environment as DIR/mergekit (``make peers`` sets it up).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.__main__ import machine
from benchmarks.merging import child
from benchmarks.merging.agreement import Difference, difference
from benchmarks.merging.checkpoints_made import Checkpoints, bytes_needed, make, shape_of
from benchmarks.merging.contenders import Contender, contenders, inputs

BYTECODE = "bytecode"  # the folder, among the checkpoints, that Python compiles into
COLUMNS: tuple[str, ...] = (
    "method", "contender", "seconds", "lowest", "highest", "× raw", "inner", "inner × raw",
    "processor seconds", "peak GB", "own GB", "inputs in memory", "differs", "largest",
)  # fmt: skip


@dataclass
class Measured:
    """What came of one contender, run by run."""

    contender: Contender
    runs: list[child.Run] = field(default_factory=list)
    warmth: list[float] = field(default_factory=list)
    apart: Difference | None = None
    error: str = ""

    def median(self, what: str) -> float:
        """Of a field of :class:`child.Run`; NaN where there is none."""
        found = [getattr(run, what) for run in self.runs]
        return statistics.median(found) if found and None not in found else float("nan")


def measure(
    made: Checkpoints,
    wanted: Sequence[Contender],
    rounds: int,
    *,
    rehearsal: Sequence[Contender] = (),
    after: Callable[[list[Measured]], object] = lambda found: None,
) -> list[Measured]:
    """Let all take turns; the first to write a result of a method is what others are compared to.

    Contenders that fail are left out of later rounds, with what they said. ``after`` is told what
    is known after every round; ``rehearsal`` has the same contenders on a tiny model.
    """
    found = [Measured(c) for c in wanted]
    ours: dict[str, Path] = {}
    for contender in rehearsal:
        _rehearse(made, contender)
    try:
        for turn in range(rounds):
            for one in found:
                if not one.error:
                    print(f"round {turn + 1}: {one.contender.label}", file=sys.stderr, flush=True)
                    _turn(made, one, ours)
            after(found)
    finally:
        for folder in ours.values():
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _rehearse(made: Checkpoints, contender: Contender) -> None:
    """Let Python compile what a contender imports; whether it fails shows when it is measured."""
    out = made.root / "out"
    with suppress(child.ChildError):
        child.run(contender.command(out), contender.path, made.root / BYTECODE)
    shutil.rmtree(out, ignore_errors=True)


def _turn(made: Checkpoints, one: Measured, ours: dict[str, Path]) -> None:
    contender, out = one.contender, made.root / "out"
    files = inputs(made, contender.method)
    os.sync()
    child.warm(files)
    one.warmth.append(child.resident(files))
    try:
        if contender.memory * 1.1 > (free := child.available()):
            raise child.ChildError(
                f"it takes {contender.memory / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"
            )
        one.runs.append(child.run(contender.command(out), contender.path, made.root / BYTECODE))
        written = out / "model.safetensors"
        if contender.merges and one.apart is None:
            if contender.method not in ours:
                ours[contender.method] = kept = made.root / f"ours_{contender.method}"
                out.rename(kept)
                written = kept / "model.safetensors"
            one.apart = difference(written, ours[contender.method] / "model.safetensors")
    except child.ChildError as error:
        one.error = str(error)
        print(one.error, file=sys.stderr)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def table(found: Sequence[Measured]) -> list[dict[str, str]]:
    """One row per contender, ratios to the raw one of the same method."""
    raw = {m.contender.method: m.median("seconds") for m in found if m.contender.name == "raw"}
    rows = []
    for one in found:
        if not one.runs:
            continue
        seconds, inner = one.median("seconds"), one.median("inner")
        floor = raw.get(one.contender.method, float("nan"))
        every = [run.seconds for run in one.runs]
        values = (
            one.contender.method, one.contender.name, f"{seconds:.2f}", f"{min(every):.2f}",
            f"{max(every):.2f}", _number(seconds / floor), _number(inner), _number(inner / floor),
            f"{one.median('cpu'):.2f}", f"{one.median('peak') / 1e9:.2f}",
            f"{one.median('own') / 1e9:.2f}",
            f"{100 * min(one.warmth):.0f} %",
            "" if one.apart is None else f"{one.apart.share:.2g}",
            "" if one.apart is None else f"{one.apart.largest:.2g}",
        )  # fmt: skip
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def _number(value: float) -> str:
    return "" if value != value else f"{value:.2f}"


def remarks(found: Sequence[Measured]) -> list[str]:
    """How many times faster ours is, with start-up and without it; who is missing, and why."""
    lines = [
        f"{one.contender.label}: {' '.join(one.error.split())[:200]}" for one in found if one.error
    ]
    for method in dict.fromkeys(m.contender.method for m in found):
        group = {m.contender.name: m for m in found if m.contender.method == method and m.runs}
        if "ours" not in group:
            continue
        mine = group["ours"]
        for name, other in group.items():
            if name.startswith(("raw", "ours")):
                continue
            whole = other.median("seconds") / mine.median("seconds")
            inner = other.median("inner") / mine.median("inner")
            peak, own = (other.median(k) / mine.median(k) for k in ("peak", "own"))
            lines.append(
                f"{method}: {whole:.1f}× faster than {name} ({inner:.1f}× without start-up); its "
                f"peak memory is {peak:.1f}× ours, without mapped files {own:.1f}×"
            )
    return lines


def described(made: Checkpoints, rounds: int) -> str:
    """What was measured, on what."""
    size = {p: sum(f.stat().st_size for f in made.inputs(p)) / 1e9 for p in (True, False)}
    return (
        f"{machine()} {os.cpu_count()} cores. "
        f"{made.shape.parameters / 1e6:.1f} million parameters; {size[True]:.2f} GB read with "
        f"precisions, {size[False]:.2f} GB without, {made.shape.parameters * 2 / 1e9:.2f} GB "
        f"written. Medians of {rounds} rounds."
    )


def markdown(about: str, rows: Sequence[dict[str, str]], lines: Sequence[str]) -> str:
    """The table as it is printed."""
    head = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    body = [f"| {' | '.join(row.values())} |" for row in rows]
    return "\n".join([about, "", *head, *body, "", *(f"* {line}" for line in lines)]) + "\n"


def check_disk(folder: Path, parameters: int) -> None:
    """Exit with a message unless there is room for the inputs and four outputs."""
    shape = shape_of(parameters)
    needed = bytes_needed(shape) + 4 * 2 * shape.parameters
    free = shutil.disk_usage(folder).free
    if free < 1.05 * needed:
        raise SystemExit(
            f"{folder} has {free / 1e9:.1f} GB free, the benchmark takes {needed / 1e9:.1f} GB: "
            "name another folder (--folder), or fewer --parameters"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.merging.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parameters", type=float, default=551e6, help="about how many")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every contender")
    parser.add_argument(
        "--peers", type=Path, default=Path(".venv-peers"), help="folder of peers' environments"
    )
    parser.add_argument("--only", action="append", help="contenders by a part of their name")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where there is room"
    )
    parser.add_argument("--out", type=Path, help="write the table here as well")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    args = parser.parse_args(arguments)
    check_disk(args.folder, int(args.parameters))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or they would stay
    root = Path(tempfile.mkdtemp(prefix="merging_speed_", dir=args.folder))
    try:
        print(f"making checkpoints in {root}", file=sys.stderr, flush=True)
        made = make(root, int(args.parameters))
        tiny = make(root / "tiny", 1)

        def chosen(made: Checkpoints) -> list[Contender]:
            everyone = contenders(made, args.peers)
            parts = args.only
            return [
                c
                for c in everyone
                if c.name == "raw" or not parts or any(part in c.label for part in parts)
            ]

        def save(found: list[Measured]) -> None:
            rounds = max(len(one.runs) for one in found)
            text = markdown(described(made, rounds), table(found), remarks(found))
            if args.out:
                args.out.write_text(text)
            if rounds >= args.rounds or all(one.error for one in found):
                print(text)

        found = measure(made, chosen(made), args.rounds, rehearsal=chosen(tiny), after=save)
    finally:
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
    if any(one.error for one in found):
        raise SystemExit("failed: " + ", ".join(m.contender.label for m in found if m.error))


if __name__ == "__main__":
    main()

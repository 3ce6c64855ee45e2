"""Run every benchmark and write the table of benchmarks/README.md anew.

    python -m benchmarks [--kronfluence PYTHON] [--quick]

Without an environment for kronfluence the rows that need it are left out of the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
START, END = "<!-- table: written by `make bench` -->", "<!-- end of table -->"
Result = dict[str, dict[str, float]]


def run(script: str, folder: Path, *extra: str) -> Any:
    """The JSON that one benchmark writes."""
    out = folder / f"{script}.json"
    command = [sys.executable, "-W", "ignore", str(HERE / f"{script}.py")]
    command += ["--json" if script == "ivon_step" else "--out", str(out), *extra]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


def variance_table(name: str, found: Result) -> list[str]:
    """Seconds, distance to the floor, memory and speed-ups on one problem."""
    title = {
        "mlp": "MLP 784-32-16-10, 2,000 images",
        "lenet": "LeNet-5, 1,000 images",
    }[name]
    lines = [
        f"**{title}**",
        "",
        "| what | seconds | floor | × floor | peak MB above model and data |",
        "|---|---|---|---|---|",
    ]
    for method, row in found.items():
        bottom = f"{row['floor']:.4f}" if "floor" in row else ""
        ratio = f"{row['seconds'] / row['floor']:.2f}" if "floor" in row else ""
        scaled = " (measured on fewer images, scaled)" if row.get("scaled_by", 1) != 1 else ""
        lines.append(
            f"| {method}{scaled} | {row['seconds']:.4f} | {bottom} | {ratio} "
            f"| {row['peak_mb']:.0f} |"
        )
    lines += ["", *[f"* {line}" for line in comparisons(found)], ""]
    return lines


def comparisons(found: Result) -> list[str]:
    """Our speed as a multiple of the others', from the same run."""

    def times(slow: str, fast: str) -> str:
        return f"{found[slow]['seconds'] / found[fast]['seconds']:.0f}×"

    lines = [
        f"V_i, diagonal: {times('published', 'V diag')} faster than the published way; peak memory "
        f"{found['V diag']['peak_mb'] / found['published']['peak_mb']:.2f} of its",
        f"V_i, Kronecker: {times('laplace-torch', 'V kron')} faster than laplace-torch",
    ]
    if "kronfluence" in found:
        ours = found["self-influence kron"]["seconds"]
        lines += [
            f"V_i, Kronecker (all C × C numbers): "
            f"{found['kronfluence']['seconds'] / found['V kron']['seconds']:.1f}× faster than "
            "kronfluence's self-influence (one number)",
            f"self-influence, Kronecker: {found['kronfluence']['seconds'] / ours:.1f}× faster than "
            "kronfluence's",
        ]
    return lines


def end_table(rows: list[dict[str, float]]) -> list[str]:
    """End to end against N."""
    lines = [
        "**`sensitivity` end to end, MLP 784-500-300-10, one process**",
        "",
        "| N | seconds | floor | × floor | peak MB | of which results |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['n']:,} | {row['seconds']:.2f} | {row['floor']:.2f} | "
        f"{row['seconds'] / row['floor']:.2f} | {row['peak_mb']:.0f} | {row['results_mb']:.0f} |"
        for row in rows
    ]
    return [*lines, ""]


def step_table(rows: list[dict[str, Any]]) -> list[str]:
    """IVON's step beside AdamW's."""
    lines = [
        "**IVON's step, 10 million parameters**",
        "",
        "| what | milliseconds | × AdamW (foreach) |",
        "|---|---|---|",
    ]
    lines += [f"| {r['what']} | {1e3 * r['seconds']:.1f} | {r['ratio']:.2f} |" for r in rows]
    return [*lines, ""]


def machine() -> str:
    """What it ran on."""
    info = Path("/proc/cpuinfo")
    model = "unknown processor"
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return (
        f"Measured on {date.today().isoformat()}: {model}, two threads, Python "
        f"{platform.python_version()}, torch {torch.__version__}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--kronfluence", help="the python of an environment with kronfluence")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, smaller sizes")
    args = parser.parse_args()
    quick = ["--quick"] if args.quick else []
    peer = ["--kronfluence", args.kronfluence] if args.kronfluence else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variance = run("variance", folder, *peer, *quick)
        rows = run("end_to_end", folder, *quick)
        step = run("ivon_step", folder)
    lines = [machine(), ""]
    for problem, found in variance.items():
        lines += variance_table(problem, found)
    lines += end_table(rows)
    lines += step_table(step["rows"])
    readme = HERE / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    readme.write_text(before + START + "\n\n" + "\n".join(lines) + "\n" + END + after)
    print("\n".join(lines))


if __name__ == "__main__":
    main()

"""Run every benchmark of costs; write benchmarks/results/ and the table of benchmarks/README.md.

    python -m benchmarks [--quick] [--device cuda]

Of a GPU the tables are named after it, and the page stays as it is.
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

import pandas as pd
import torch

from benchmarks import results

HERE = Path(__file__).parent
START = "<!-- table: written by `make bench` -->"
END = "<!-- end of table -->"
Result = dict[str, dict[str, float]]
PROBLEMS = {
    "mlp": "MLP 784-32-16-10, 2,000 images",
    "lenet": "LeNet-5, 1,000 images",
    "large": "MLP 784-500-300-10, 60,000 images",
}


def run(script: str, folder: Path, *extra: str) -> Any:
    """The JSON that one benchmark writes."""
    out = folder / f"{script}.json"
    command = [sys.executable, "-W", "ignore", str(HERE / f"{script}.py")]
    command += ["--out", str(out), *extra]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


def costs(variance: dict[str, Result]) -> pd.DataFrame:
    """Seconds, distance to the floor and memory of every method on every problem."""
    return pd.DataFrame(
        {
            "title": PROBLEMS[problem],
            "what": method
            + (" (measured on fewer images, scaled)" if row.get("scaled_by", 1) != 1 else ""),
            "seconds": f"{row['seconds']:.4f}",
            "floor": f"{row['floor']:.4f}" if "floor" in row else "",
            "× floor": f"{row['seconds'] / row['floor']:.2f}" if "floor" in row else "",
            "peak MB above model and data": f"{row['peak_mb']:.0f}",
        }
        for problem, measured in variance.items()
        for method, row in measured.items()
    )


def steps(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Training steps with each optimizer beside torch's Adam."""
    return pd.DataFrame(
        {
            "model": row["model"],
            "optimizer": row["what"],
            "milliseconds": f"{1e3 * row['seconds']:.1f}",
            "× Adam": f"{row['ratio']:.2f}",
        }
        for row in rows
    )


def audits(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The fit and the ranking of a ResNet beside its training."""
    return pd.DataFrame(
        {
            "what": row["what"],
            "images": row["images"],
            "epochs": row["epochs"],
            "processor seconds": f"{row['seconds']:.1f}",
            "trainings": f"{row['trainings']:.2f}",
        }
        for row in rows
    )


def compared(measured: Result) -> dict[str, str]:
    """What one problem says, of one run: multiples of the floor and of the others' times."""
    floors = ("V diag", "sensitivity diag", "V kron", "sensitivity kron")
    floors += ("self-influence diag", "self-influence kron")
    row = {
        f"{what}: × floor": f"{measured[what]['seconds'] / measured[what]['floor']:.2f}"
        for what in floors
    }

    def faster(what: str, ours: str, slow: str, digits: int = 0) -> None:
        if slow in measured:
            ratio = measured[slow]["seconds"] / measured[ours]["seconds"]
            row[what] = f"{ratio:.{digits}f}×"

    faster("V diag: faster than the published way", "V diag", "published")
    share = measured["V diag"]["peak_mb"] / measured["published"]["peak_mb"]
    row["V diag: of the published way's peak memory"] = f"{share:.2f}"
    faster("V kron: faster than laplace-torch", "V kron", "laplace-torch")
    return row


def audit_line(rows: list[dict[str, Any]]) -> str:
    """What the fit and the ranking of a ResNet cost."""
    by_name = {row["what"]: row for row in rows}
    fit = by_name["fit"]
    both = by_name["both"]
    return (
        f"Fit and `suspicious` of a ResNet at four checkpoints: {both['trainings']:.2f} of its "
        f"training of {both['epochs']} epochs; the fit takes "
        f"{fit['forward passes a checkpoint']:.1f} forward and "
        f"{fit['backward passes a checkpoint']:.1f} backward passes a checkpoint, ten classes."
    )


def summary(variance: dict[str, Result], rows: list[dict[str, Any]]) -> list[str]:
    """The table of the page, a line on whole calls, and one on IVON's step."""
    columns = {PROBLEMS[n]: compared(m) for n, m in variance.items() if n != "large"}
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for what in next(iter(columns.values())):
        lines.append(f"| {what} | {' | '.join(c[what] for c in columns.values())} |")
    most = variance["large"]["sensitivity diag"]
    ratios = [f"{row['ratio']:.2f} ({row['model']})" for row in rows if row["what"] == "IVON"]
    return [
        *lines,
        "",
        f"`sensitivity` of 60,000 images, 784-500-300-10: {most['seconds']:.2f} s, "
        f"{most['seconds'] / most['floor']:.2f} floors.",
        f"A training step of IVON, in steps of torch's Adam: {', '.join(ratios)}.",
    ]


def machine() -> str:
    """What it ran on."""
    info = Path("/proc/cpuinfo")
    model = "unknown processor"
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    if torch.cuda.is_available():
        model = f"{torch.cuda.get_device_name()}, {model}"
    return (
        f"Measured on {date.today().isoformat()}: {model}, two threads, Python "
        f"{platform.python_version()}, torch {torch.__version__}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, smaller sizes")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    quick = ["--quick"] if args.quick else []
    on = ["--device", args.device]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = run("rule_step", folder, *on)["rows"]
        variance = run("variance", folder, *quick, *on)
        smaller = ["--images", "500"] if args.quick else []
        resnet = run("resnet", folder, *smaller)["rows"]
    tables = {
        "costs": costs(variance),
        "rule_step": steps(rows),
        "audit": audits(resnet),
    }
    for name, table in tables.items():
        results.write(name if args.device == "cpu" else f"{name}_{args.device}", table)
        print(table.to_string(index=False), end="\n\n")
    lines = [machine(), "", *summary(variance, rows), audit_line(resnet)]
    print(*lines, sep="\n")
    if args.device != "cpu":
        return
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(START)
    readme.write_text("\n".join([before + START, "", *lines, "", END + rest.partition(END)[2]]))


if __name__ == "__main__":
    main()

"""``sensitivity`` on 60,000 images and an MLP 784-500-300-10, in one process; memory against N.

    python benchmarks/end_to_end.py [--out FILE.json] [--quick] [--device cuda]

Beside each N stands the floor: a forward pass and ten backward passes that stop at the layers'
outputs. Peak memory is above model and data, and does not grow with N beyond the results kept
(N·C² variances).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from cases import CLASSES, mlp
from measure import interleaved, peak_above, threads
from variance import floor

import blr_analysis as blr


def measure(n: int, device: str) -> dict[str, float]:
    """Seconds, floor and peak memory for n images."""
    torch.manual_seed(0)
    model = mlp(784, 500, 300, CLASSES).to(device)
    x, y = torch.rand(n, 784).to(device), torch.randint(CLASSES, (n,)).to(device)
    task = blr.Task(model, (x, y))
    params = task.parameters()
    precision = {name: torch.full_like(p, 2.0) for name, p in params.items()}
    q = blr.Posterior(params, precision, prior_precision=1.0, n_data=n)
    blr.sensitivity(blr.Task(model, (x[:500], y[:500])), replaced(q, 500))

    def run() -> None:
        scores = blr.sensitivity(task, q)
        assert scores.variance is not None and len(scores) == n

    def bottom() -> None:
        for part in bottoms:
            part()

    peak = peak_above(run)
    bottoms = [floor(model, part) for part in x.split(1000)]
    results = 4 * n * (CLASSES**2 + 6 * CLASSES)
    return {
        "n": n,
        **interleaved({"seconds": run, "floor": bottom}, rounds=3, warm=1),
        "peak_mb": peak / 2**20,
        "results_mb": results / 2**20,
    }


def replaced(q: blr.Posterior, n: int) -> blr.Posterior:
    """The same posterior for n examples."""
    return blr.Posterior(q.mean, q.form, prior_precision=q.prior_precision, n_data=n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="smaller N")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    threads(2)
    rows = [measure(n, args.device) for n in ((2_000, 6_000) if args.quick else (6_000, 60_000))]
    for row in rows:
        print(
            f"N={row['n']:>6}: {row['seconds']:.2f} s, floor {row['floor']:.2f} s, peak "
            f"{row['peak_mb']:.0f} MB of which results {row['results_mb']:.0f} MB"
        )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

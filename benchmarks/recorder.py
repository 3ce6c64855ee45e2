"""What recording Kronecker factors costs a step of training.

    python -m benchmarks.recorder [--every 100] [--rounds 12]

Milliseconds of processor time of one step of AdamW on batches of 50, with and without a recorder.
Rounds of ``every`` steps, of which one is recorded, take turns; medians over
the rounds are compared.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from statistics import median

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr

BATCH = 50


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)), (784,)


def wide() -> tuple[nn.Module, tuple[int, ...]]:
    sizes = (784, 512, 512, 10)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), (784,)


def convnet() -> tuple[nn.Module, tuple[int, ...]]:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return model, (1, 28, 28)


def step_time(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> float:
    """Seconds of a step, of one processor."""
    optimizer = torch.optim.AdamW(model.parameters())
    start = time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return (time.process_time() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description="What recording costs a step.")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for make in (mlp, wide, convnet):
        plain, shape = make()
        watched, _ = make()
        blr.KroneckerRecorder(watched, every=args.every)
        x, y = torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))
        rows = []
        for _ in range(args.rounds):
            rows.append([step_time(m, x, y, args.every) for m in (plain, watched)])
        without, with_it = (median(column) for column in zip(*rows, strict=True))
        print(
            f"{make.__name__:8} {1e3 * without:7.3f} ms, recorded {1e3 * with_it:7.3f} ms: "
            f"{with_it / without:.3f}"
        )


if __name__ == "__main__":
    main()

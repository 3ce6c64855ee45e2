"""Labels that a posterior asks for, beside labels chosen at random.

    python -m benchmarks.acquire [--seeds 5] [--rounds 6] [--labels 10]

scikit-learn's digits: 20 labels to begin with, then some more each round, from 1,000 without. Each
round a network 64-64-10 is trained from fresh weights on what is labelled, a Kronecker posterior is
fitted, and `acquire` chooses. Printed are accuracies on 777 other digits, mean ± spread over seeds.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import blr_analysis as blr

FIRST = 20
POOL = 1000
STEPS = 150
WAYS = ("random", "information", "variance")


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def accuracies(way: str, seed: int, rounds: int, labels: int) -> list[float]:
    """On held-out digits after each round."""
    images, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x = ((torch.tensor(images) - 4.9) / 6).float()[order]
    y = torch.tensor(targets)[order]
    test_x = x[POOL + FIRST :]
    test_y = y[POOL + FIRST :]
    labelled = torch.arange(FIRST)
    found = []
    for done in range(rounds + 1):
        model = trained(x[labelled], y[labelled], seed)
        hits = model(test_x).argmax(1) == test_y
        found.append(float(hits.float().mean()))
        if done == rounds:
            break
        is_free = torch.ones(POOL + FIRST, dtype=torch.bool)
        is_free[labelled] = False
        free = is_free.nonzero().flatten()
        if way == "random":
            generator = torch.Generator().manual_seed(1000 * seed + done)
            chosen = torch.randperm(len(free), generator=generator)[:labels]
        else:
            posterior = blr.fit_laplace(blr.Task(model, (x[labelled], y[labelled])))
            pool = blr.Task(model, x[free], progress=False)
            chosen = blr.acquire(pool, posterior, labels, by=way, seed=seed)
        labelled = torch.cat([labelled, free[chosen]])
    return found


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.acquire", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--labels", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = [FIRST + options.labels * k for k in range(options.rounds + 1)]
    print(f"| labels | {' | '.join(map(str, counts))} |")
    for way in WAYS:
        runs = [
            accuracies(way, seed, options.rounds, options.labels) for seed in range(options.seeds)
        ]
        table = torch.tensor(runs)
        means = table.mean(0).tolist()
        spreads = table.std(0).tolist()
        cells = [f"{m:.3f} ± {s:.3f}" for m, s in zip(means, spreads, strict=True)]
        print(f"| {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

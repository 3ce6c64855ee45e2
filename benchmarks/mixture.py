"""A mixture of IVONs beside one IVON, and beside as many that know nothing of each other.

    python -m benchmarks.mixture [--components 4] [--seeds 5] [--train 4000] [--epochs 20]
        [--device cuda] [--workers 6] | python -m benchmarks.results mixture

LeNet-5 on Fashion-MNIST, with IVON as docs/ivon.md sets it for so many images, and the schedule and
scores of benchmarks.training; every minibatch is one step of every component. "own starts":
components begin at weights of their own; "one start": all at the same. Predictions are averages of
``--draws`` networks in all, so many of each component; "at their means": of one network each, a
deep ensemble. Mean ± standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

import blr_analysis as blr
from benchmarks.training import predict
from benchmarks.training_parts import MODELS, Data, load, scores
from blr_analysis.learning_rule.optim import Mixture


def trained(
    data: Data, models: list[nn.Module], together: bool, seed: int, epochs: int, batch: int = 100
) -> list[blr.IVON]:
    """The optimizers of networks that learn side by side; together: as one mixture."""
    n = len(data.x)
    torch.manual_seed(seed)
    steps = epochs * -(-n // batch)
    given: dict[str, Any] = {"lr": 0.2, "ess": n, "weight_decay": 1 / n, "steps": steps}
    optimizers = [blr.IVON(m.parameters(), **given) for m in models]
    mixture = Mixture(optimizers)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, steps) for o in optimizers]
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(n, generator=order).split(batch):
            x, y = data.x[rows], data.y[rows]
            for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    (loss + mixture.overlap(k) if together else loss).backward()
                optimizer.step()
                schedules[k].step()
    return optimizers


def measured(job: tuple[int, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Scores of one seed and way to start: one network, several apart, and the mixture."""
    seed, start = job
    torch.set_num_threads(1)
    data = load(args.train, held_out=False).to(args.device)
    torch.manual_seed(seed)
    first = [MODELS["lenet5"]().to(args.device) for _ in range(args.components)]
    if start == "one start":
        first = [copy.deepcopy(first[0]) for _ in first]
    rows = []
    for together in (False, True):
        models = copy.deepcopy(first)
        optimizers = trained(data, models, together, seed, args.epochs)
        k = args.components
        ways = [(f"mixture, {start}" if together else f"{k} IVONs, {start}", k, args.draws)]
        if not together and start == "own starts":
            ways = [("one IVON, at its mean", 1, 0), ("one IVON", 1, args.draws),
                    (f"{k} IVONs, at their means", k, 0), *ways]  # fmt: skip
        for name, count, draws in ways:
            probs = [torch.zeros((), device=args.device)] * 2
            for model, optimizer in zip(models[:count], optimizers, strict=False):
                look = optimizer.sampled_params if draws else nullcontext
                for i, x in enumerate((data.x_test, data.x_other)):
                    probs[i] = probs[i] + predict(model, look, max(1, draws // count), x) / count
            found = scores(probs[0], data.y_test, probs[1])
            rows.append({"posterior": name, "seed": seed, **found})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("components", 4), ("seeds", 5), ("train", 4000), ("epochs", 20), ("draws", 32),
        ("workers", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--starts", nargs="+", default=["own starts", "one start"])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    jobs = [(s, start) for s in range(args.seeds) for start in args.starts]
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        found = pd.DataFrame([*chain(*pool.map(partial(measured, args=args), jobs))])
    columns = {"accuracy": 4, "nll": 4, "ece": 4, "brier": 4, "auroc": 4}
    print("| posterior | accuracy | NLL | ECE | Brier | AUROC, MNIST |\n|---|---|---|---|---|---|")
    for name, part in found.groupby("posterior", sort=False):
        cells = [f"{part[c].mean():.{d}f} ± {part[c].std():.{d}f}" for c, d in columns.items()]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

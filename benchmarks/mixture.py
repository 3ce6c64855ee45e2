"""A mixture of IVONs beside one IVON, and beside as many that know nothing of each other.

    python -m benchmarks.mixture [--components 4] [--seeds 3] [--train 2000] [--epochs 30]
        [--device cuda] [--workers 6] | python -m benchmarks.results mixture

LeNet-5 on Fashion-MNIST as in benchmarks.training, whose settings of IVON, schedule and scores are
used; every minibatch is one step of every component. "own starts": components begin at weights of
their own; "one start": all at the same. Everything predicts with the average of ``--draws``
networks in all, so many of each component. Mean ± standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

import blr_analysis as blr
from benchmarks.training import LONG, LONGER, MAKE, SETTINGS, predict
from benchmarks.training_parts import MODELS, Data, load, scores
from blr_analysis.learning_rule.optim import Mixture


def trained(
    data: Data, models: list[nn.Module], together: bool, seed: int, epochs: int, batch: int = 100
) -> list[blr.IVON]:
    """The optimizers of networks that learn side by side; together: as one mixture."""
    n = len(data.x)
    torch.manual_seed(seed)
    settings = (LONGER if epochs >= LONG else SETTINGS)["IVON"][0]
    optimizers = [MAKE["IVON"](m, n, batch, settings) for m in models]
    mixture = Mixture(optimizers)
    steps = epochs * -(-n // batch)
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
        counts = {"one IVON": 1} if not together and start == "own starts" else {}
        counts["mixture" if together else f"{args.components} IVONs"] = args.components
        for name, count in counts.items():
            probs = [torch.zeros((), device=args.device)] * 2
            for model, optimizer in zip(models[:count], optimizers, strict=False):
                for i, x in enumerate((data.x_test, data.x_other)):
                    drawn = predict(model, optimizer.sampled_params, args.draws // count, x)
                    probs[i] = probs[i] + drawn / count
            found = scores(probs[0], data.y_test, probs[1])
            label = name if count == 1 else f"{name}, {start}"
            rows.append({"posterior": label, "seed": seed, **found})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("components", 4), ("seeds", 3), ("train", 2000), ("epochs", 30), ("draws", 32),
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

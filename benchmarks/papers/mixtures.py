"""A mixture of Gaussians beside one: LeNet-5 on 4,000 images of Fashion-MNIST, by IVON.

    python -m benchmarks.papers.mixtures [--small]

Khan & Rue, "The Bayesian learning rule", JMLR 2023, Section 3.3; Lin et al., "Fast and simple
natural-gradient variational inference with mixture of exponential-family approximations", ICML
2019. Rows: one network at its mean and averaged over draws, four apart, and four as one mixture.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import blr_analysis as blr
from benchmarks.cases import LeNet
from benchmarks.papers import Data, Numbers, averaged, clothes, probabilities, scores
from blr_analysis.learning_rule.optim import Mixture

COMPONENTS = 4
DRAWS = 8
BATCH = 100


def trained(
    data: Data, models: list[nn.Module], together: bool, seed: int, epochs: int
) -> list[blr.IVON]:
    """The optimizers of networks that learn side by side; together: as one mixture."""
    x, y, *_ = data
    torch.manual_seed(seed)
    steps = epochs * -(-len(x) // BATCH)
    given: dict[str, Any] = {"lr": 0.2, "ess": len(x), "weight_decay": 1 / len(x), "steps": steps}
    optimizers = [blr.IVON(m.parameters(), **given) for m in models]
    mixture = Mixture(optimizers)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, steps) for o in optimizers]
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=order).split(BATCH):
            for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x[rows]), y[rows])
                    (loss + mixture.overlap(k) if together else loss).backward()
                optimizer.step()
                schedules[k].step()
    return optimizers


def measured(data: Data, seed: int, epochs: int) -> dict[str, Numbers]:
    """Scores of one seed: one network, several apart, and the mixture."""
    found = {}
    for together in (False, True):
        torch.manual_seed(seed)
        models: list[nn.Module] = [LeNet() for _ in range(COMPONENTS)]
        optimizers = trained(data, models, together, seed, epochs)
        ways = [(f"mixture of {COMPONENTS}", COMPONENTS, DRAWS)]
        if not together:
            ways = [("one IVON, at its mean", 1, 0), ("one IVON", 1, DRAWS),
                    (f"{COMPONENTS} IVONs, at their means", COMPONENTS, 0),
                    (f"{COMPONENTS} IVONs", COMPONENTS, DRAWS)]  # fmt: skip
        for name, count, draws in ways:
            p = torch.zeros(())
            for model, optimizer in zip(models[:count], optimizers, strict=False):
                look = optimizer.sampled_params if draws else nullcontext
                p = p + probabilities(model, look, max(1, draws // count), data[2]) / count
            found[name] = scores(p, data[3])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="500 images, four epochs, one seed")
    small = parser.parse_args().small
    data = clothes(500 if small else 4000)
    runs = [measured(data, seed, 4 if small else 20) for seed in range(1 if small else 5)]
    print("| posterior | accuracy % | NLL | ECE |\n|---|---|---|---|")
    for name in runs[0]:
        print(f"| {name} | {averaged([run[name] for run in runs])} |")


if __name__ == "__main__":
    main()

"""The rows of the rule that train networks, beside SGD, Adam and AdamW: LeNet-5 on Fashion-MNIST.

    python -m benchmarks.papers.training [--small] [--train 60000] [--epochs 10]

Shen et al., "Variational learning is effective for large deep networks", ICML 2024; Khan et al.,
"Fast and scalable Bayesian deep learning by weight-perturbation in Adam", ICML 2018. All start at
the same weights and see the same images in the same order, with a cosine schedule. Those with a
posterior average ten networks drawn from it. Settings were chosen by the NLL on held-out training
images at 60,000 images and 10 epochs. Vadam takes the square of a minibatch's mean gradient, which
is B times too small (Theorem 1): "ess = B N" undoes that, "ess = N" is as published.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import blr_analysis as blr
from benchmarks.cases import LeNet
from benchmarks.papers import averaged, clothes, fitted, probabilities, scores
from blr_analysis.learning_rule.optim import BSAM, Vadam

DRAWS = 10


def contestants(model: nn.Module, n: int) -> dict[str, Any]:
    params = list(model.parameters())
    given: dict[str, Any] = {"ess": n, "weight_decay": 1e-4}
    wide = {**given, "ess": 100 * n}
    return {
        "SGD": lambda: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4),
        "Adam": lambda: torch.optim.Adam(params, lr=4e-3),
        "AdamW": lambda: torch.optim.AdamW(params, lr=8e-3, weight_decay=0.1),
        "IVON": lambda: blr.IVON(params, lr=1.0, hess_init=2.0, beta2=0.9999, **given),
        "VOGN": lambda: blr.VOGN(params, lr=0.2, hess_init=0.2, beta2=0.9999, model=model, **given),
        "Vadam, ess = B N": lambda: Vadam(params, lr=4e-3, **wide),
        "Vadam, ess = N": lambda: Vadam(params, lr=8e-3, **given),
        "bSAM": lambda: BSAM(params, lr=0.1, hess_init=0.1, radius=0.001, **given),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="500 images, two epochs, one seed")
    parser.add_argument("--train", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    n, epochs, seeds = (500, 2, 1) if args.small else (args.train, args.epochs, 3)
    data = clothes(n)
    print("| optimizer | predicts | accuracy % | NLL | ECE |\n|---|---|---|---|---|")
    for name in contestants(LeNet(), n):
        found: dict[str, list[dict[str, float]]] = {}
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = LeNet()
            optimizer = contestants(model, n)[name]()
            fitted(model, optimizer, data, epochs, seed)
            ways: dict[str, tuple[Any, int]] = {"at the mean": (nullcontext, 1)}
            if hasattr(optimizer, "sampled_params"):
                ways[f"average of {DRAWS}"] = (optimizer.sampled_params, DRAWS)
            for way, (look, draws) in ways.items():
                p = probabilities(model, look, draws, data[2])
                found.setdefault(way, []).append(scores(p, data[3]))
        for way, rows in found.items():
            print(f"| {name} | {way} | {averaged(rows)} |", flush=True)


if __name__ == "__main__":
    main()

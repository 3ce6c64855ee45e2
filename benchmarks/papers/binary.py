"""Networks of weights ±1 on Fashion-MNIST: BayesBiNN beside straight-through estimation.

    python -m benchmarks.papers.binary [--small]

Meng et al., "Training binary neural networks using the Bayesian learning rule", ICML 2020. The
network is 784–100–10 without biases; nothing else is learned: the hidden layer is normalised over
its own units and the logits are divided by √100 / 2. Settings were chosen on held-out images: three
learning rates for straight-through estimation, some thirty-five settings for BayesBiNN. Mean ±
standard deviation over three seeds, of the 10,000 test images.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.papers import averaged, clothes, fitted, probabilities, scores
from blr_analysis.learning_rule.optim.binary import STE, BayesBiNN

HIDDEN = 100
DRAWS = 20


class Net(nn.Module):
    """784–100–10, all its weights of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(784, HIDDEN, bias=False)
        self.second = nn.Linear(HIDDEN, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.layer_norm(self.first(x.flatten(1)), (HIDDEN,))
        return 2 * self.second(hidden.relu()) / HIDDEN**0.5


def contestants(model: nn.Module, n: int) -> dict[str, Any]:
    params = list(model.parameters())
    wide: dict[str, Any] = {"temperature": 1.0, "floor": 0.1, "beta1": 0.9}
    return {
        "STE, Adam": lambda: STE(params, lr=1e-3, row="Adam"),
        "BayesBiNN, ess = N": lambda: BayesBiNN(params, 0.1, n, **wide),
        "BayesBiNN, ess = 300 N": lambda: BayesBiNN(
            params, 0.003, 300 * n, **wide | {"temperature": 0.5}
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="1,000 images, four epochs, one seed")
    small = parser.parse_args().small
    sizes = ((1_000, 4),) if small else ((10_000, 10), (1_000, 40))
    print("| images | trained by | predicts | accuracy % | NLL | ECE |\n|---|---|---|---|---|---|")
    for examples, epochs in sizes:
        data = clothes(examples)
        for name in contestants(Net(), examples):
            found: dict[str, list[dict[str, float]]] = {}
            for seed in range(1 if small else 3):
                torch.manual_seed(seed)
                model = Net()
                optimizer = contestants(model, examples)[name]()
                fitted(model, optimizer, data, epochs, seed)
                ways = {"signs": (optimizer.mode_params, 1)}
                if isinstance(optimizer, BayesBiNN):
                    ways[f"{DRAWS} binary draws"] = (optimizer.sampled_params, DRAWS)
                for way, (look, draws) in ways.items():
                    p = probabilities(model, look, draws, data[2])
                    found.setdefault(way, []).append(scores(p, data[3]))
            for way, rows in found.items():
                print(f"| {examples:,} | {name} | {way} | {averaged(rows)} |", flush=True)


if __name__ == "__main__":
    main()

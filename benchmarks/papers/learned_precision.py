"""Is the precision that IVON leaves behind the data's? Beside Laplace's, and in merges of four.

    python -m benchmarks.papers.learned_precision [--small]

Four turned or inverted sets of Fashion-MNIST, 2,000 images each, an MLP 784-64-10, trained by IVON
with the settings of the docs: from one base (12 epochs; ``hess_init`` 1 and "weights"), and from
fresh weights (25 epochs). Spearman's rank correlation with the diagonal of ``fit_laplace``, over
all weights, of h as it stands (before), of h without its start, and of what
``Posterior.from_optimizer`` makes of it (after); then the accuracy of merges by each, the mean over
the tasks, with the best of five multiples of the mean precision added to all of them.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.papers import Data, clothes, fitted

State = dict[str, Tensor]
RIDGES = (1e-3, 1e-2, 0.1, 1.0, 10.0)
VIEWS = (
    lambda images: images,
    lambda images: images.rot90(1, (2, 3)),
    lambda images: images.rot90(2, (2, 3)),
    lambda images: -images,
)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def tasks(n: int) -> list[Data]:
    """Each with its own images, and the same test images."""
    x, y, x_test, y_test = clothes(4 * n)
    found = []
    for k, view in enumerate(VIEWS):
        own = view(x[k * n : (k + 1) * n].view(-1, 1, 28, 28)).flatten(1)
        test = view(x_test[:2000].view(-1, 1, 28, 28)).flatten(1)
        found.append((own, y[k * n : (k + 1) * n], test, y_test[:2000]))
    return found


def learned(model: nn.Module, data: Data, epochs: int, start: Any) -> dict[str, State]:
    """The data's part of every precision, by what it is called."""
    n = len(data[0])
    steps = epochs * -(-n // 100)
    optimizer = blr.IVON(
        model.parameters(), lr=0.2, ess=n, weight_decay=1 / n, steps=steps, hess_init=start,
        batch_size=min(n, 100),
    )  # fmt: skip
    fitted(model, optimizer, data, epochs, seed=0)
    task = blr.Task(model, data[:2])
    group = optimizer.param_groups[0]
    left = group["beta2"] ** steps
    hess = {name: optimizer.state[p]["hess"] for name, p in model.named_parameters()}
    learned = blr.Posterior.from_optimizer(optimizer, model)
    laplace = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    return {
        "h (before)": {name: n * h for name, h in hess.items()},
        "h without its start": {
            name: n * ((h - left * group["hess_init"]) / (1 - left)).clamp_min(0)
            for name, h in hess.items()
        },
        "captured (after)": {name: learned.precision(name) - 1 for name in hess},
        "Laplace": {name: laplace.precision(name) - 1 for name in hess},
    }


def merged(models: list[State], precisions: list[State], data: list[Data]) -> float:
    """Mean accuracy in per cent, of the best number that is added."""
    found = []
    for ridge in RIDGES:
        added = ridge * mean_of(precisions)
        damped = [{name: h + added for name, h in state.items()} for state in precisions]
        weights = blr.merge(None, models, precisions=damped, method="fisher", progress=False)
        model = network()
        model.load_state_dict(weights)
        with torch.no_grad():
            hits = [(model(x).argmax(1) == y).double().mean() for _, _, x, y in data]
        found.append(100 * float(torch.stack(hits).mean()))
    return max(found)


def mean_of(precisions: list[State]) -> float:
    flat = torch.cat([h.flatten() for state in precisions for h in state.values()])
    return float(flat.double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="100 images a task, two epochs")
    small = parser.parse_args().small
    data = tasks(100 if small else 2000)
    warnings.simplefilter("ignore", blr.errors.InitialPrecisionWarning)
    torch.manual_seed(0)
    base = network()
    few = [tuple(part[: len(part) // 4] for part in parts) for parts in data]
    x, y, x_test, y_test = (torch.cat(parts) for parts in zip(*few, strict=True))
    fitted(base, torch.optim.AdamW(base.parameters(), lr=1e-3), (x, y, x_test, y_test), 5, 0)
    print("| start | precision | rank with Laplace's | merge % |\n|---|---|---|---|")
    for title, start, epochs in (("base", 1.0, 12), ("base", "weights", 12), ("fresh", 1.0, 25)):
        models = [network() if title == "fresh" else copy.deepcopy(base) for _ in data]
        ways = [
            learned(model, parts, 2 if small else epochs, start)
            for model, parts in zip(models, data, strict=True)
        ]
        states = [{n: p.detach() for n, p in model.named_parameters()} for model in models]
        equal = [{n: torch.ones_like(p) for n, p in state.items()} for state in states]
        print(f"| {title}, {start} | equal (average) | | {merged(states, equal, data):.1f} |")
        for way in ways[0]:
            ranks = [rank_correlation(found[way], found["Laplace"]) for found in ways]
            merge = merged(states, [found[way] for found in ways], data)
            print(f"| | {way} | {min(ranks):.2f} to {max(ranks):.2f} | {merge:.1f} |", flush=True)


def rank_correlation(first: State, second: State) -> float:
    """Spearman's, over all weights."""
    flat = [torch.cat([h.flatten() for h in state.values()]) for state in (first, second)]
    result: Any = spearmanr(flat[0].numpy(), flat[1].numpy())
    return float(result.statistic)


if __name__ == "__main__":
    main()

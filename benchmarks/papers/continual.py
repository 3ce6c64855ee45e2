"""One task after the other: what is known of the old ones, when only some of their images are left.

    python -m benchmarks.papers.continual [--small] [--seeds 5]

Khan & Rue, "The Bayesian learning rule", JMLR 2023, Section 5: the last posterior is the next prior
(of diagonals that is elastic weight consolidation). "split": scikit-learn's digits, odd or even,
from 0/1 to 8/9. "permuted": all ten, their pixels in another order in each of five tasks. One
network with 32 hidden units; accuracy on the test images of all tasks after the last. One image in
twenty of every task goes into the memory: "memory alone" trains on it and the new task, "adapt" is
:func:`blr_analysis.adapt`, which has the posterior in the place of all other old images.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import blr_analysis as blr

DELTA = 1.0
TASKS = 5
MEMORY = 20  # one image in so many stays
PRIORS = {"diagonal as prior": "diag", "kron as prior": "kron", "adapt": "kron"}
KINDS = ("going on", "memory alone", *PRIORS, "all data")
Data = tuple[Tensor, Tensor]


def tasks_of(name: str) -> tuple[list[Data], Data]:
    """Five tasks and the test images of all of them."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = images.float() / 16
    train = torch.arange(len(x)) % 3 != 0
    if name == "split":
        chosen = [train & (labels // 2 == k) for k in range(TASKS)]
        return [(x[c], labels[c] % 2) for c in chosen], (x[~train], labels[~train] % 2)
    draw = torch.Generator().manual_seed(0)
    orders = [torch.arange(64), *(torch.randperm(64, generator=draw) for _ in range(TASKS - 1))]
    test = torch.cat([x[~train][:, order] for order in orders])
    tasks = [(x[train][:, order], labels[train]) for order in orders]
    return tasks, (test, labels[~train].repeat(TASKS))


def descend(model: nn.Module, data: Data) -> None:
    """Minimise Σ ℓ_i + ½ δ ‖θ‖²."""
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(parameters, max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1], reduction="sum")
        for p in parameters:
            loss = loss + 0.5 * DELTA * p.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def both(first: Data, second: Data) -> Data:
    return torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])


def sequence(kind: str, seed: int, tasks: list[Data], test: Data) -> float:
    torch.manual_seed(seed)
    width = tasks[0][0].shape[1]
    classes = int(tasks[0][1].max()) + 1
    model = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, classes))
    memory = (torch.empty(0, width), torch.empty(0, dtype=torch.long))
    if kind == "all data":
        for data in tasks:
            memory = both(memory, data)
        descend(model, memory)
        tasks = []
    posterior = None
    for data in tasks:
        new = blr.Task(model, data, progress=False)
        if posterior is not None:
            task = blr.Task(model, memory, progress=False) if kind == "adapt" else None
            result = blr.adapt(new, posterior, task)
            result.apply(model)
            posterior = result.posterior
        else:
            descend(model, both(memory, data) if kind == "memory alone" else data)
            if kind in PRIORS:
                posterior = blr.fit_laplace(new, structure=PRIORS[kind], prior_precision=DELTA)
        stays = torch.randperm(len(data[0]))[: len(data[0]) // MEMORY]
        memory = both(memory, (data[0][stays], data[1][stays]))
    return float((model(test[0]).argmax(1) == test[1]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="one seed of the split digits")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    seeds = 1 if args.small else args.seeds
    names = ("split",) if args.small else ("split", "permuted")
    print(f"| tasks | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}")
    for name in names:
        tasks, test = tasks_of(name)
        cells = []
        for kind in KINDS:
            accuracies = [sequence(kind, seed, tasks, test) for seed in range(seeds)]
            spread = statistics.pstdev(accuracies)
            cells.append(f"{statistics.mean(accuracies):.3f} ± {spread:.3f}")
        print(f"| digits, {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

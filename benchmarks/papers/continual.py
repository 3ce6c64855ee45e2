"""One task after the other: the last posterior as the next prior, beside going on.

    python -m benchmarks.papers.continual [--small] [--seeds 5]

Khan & Rue, "The Bayesian learning rule", JMLR 2023, Section 5 (elastic weight consolidation is the
rule with a diagonal Laplace posterior in place of the prior). "split": scikit-learn's digits, odd
or even, from 0/1 to 8/9. "permuted": all ten, their pixels in another order in each of five tasks.
One network with 32 hidden units; accuracy on the test images of all tasks after the last.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import blr_analysis as blr

DELTA, TASKS = 1.0, 5
KINDS = ("going on", "posterior as prior", "all data")
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
    seen = torch.cat([x[~train][:, o] for o in orders])
    return [(x[train][:, o], labels[train]) for o in orders], (seen, labels[~train].repeat(TASKS))


def descend(model: nn.Module, data: Data, precision: dict[str, Tensor], mean: dict) -> None:
    """Minimise Σ ℓ_i + ½ (θ − m)ᵀ S (θ − m)."""
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.LBFGS(parameters.values(), max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1], reduction="sum")
        for name, p in parameters.items():
            loss = loss + 0.5 * (precision[name] * (p - mean[name]).square()).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def sequence(kind: str, seed: int, tasks: list[Data], test: Data) -> float:
    torch.manual_seed(seed)
    width, classes = tasks[0][0].shape[1], int(tasks[0][1].max()) + 1
    model = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, classes))
    precision = {n: torch.full_like(p, DELTA) for n, p in model.named_parameters()}
    mean = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    if kind == "all data":
        tasks = [(torch.cat([x for x, _ in tasks]), torch.cat([y for _, y in tasks]))]
    for data in tasks:
        descend(model, data, precision, mean)
        if kind == "posterior as prior":
            task = blr.Task(model, data, progress=False)
            q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA)
            for name in precision:
                precision[name] = precision[name] + q.precision(name) - DELTA
            mean = {name: value.detach().clone() for name, value in model.named_parameters()}
    return float((model(test[0]).argmax(1) == test[1]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="one seed")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    seeds = 1 if args.small else args.seeds
    print(f"| tasks | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}")
    for name in ("split", "permuted"):
        tasks, test = tasks_of(name)
        found = [[sequence(kind, seed, tasks, test) for seed in range(seeds)] for kind in KINDS]
        cells = [f"{statistics.mean(f):.3f} ± {statistics.pstdev(f):.3f}" for f in found]
        print(f"| digits, {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

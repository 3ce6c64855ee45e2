"""One task after the other: adapt() beside EWC, going on, and training again on all data.

    python -m benchmarks.continual [split] [permuted] [fashion] [--seeds 2] [--kinds EWC ...]

"split": scikit-learn's digits, odd or even, from 0/1 to 8/9. "permuted": all ten digits, their
pixels in another order in each of five tasks. "fashion": 3,000 images of Fashion-MNIST at 14 × 14
pixels, of each pair of classes the first or the second. One network with 32 hidden units; accuracy
on the test images of all tasks after the last, mean ± standard deviation over seeds. A memory's
examples keep their labels (or, "said", what the model said of them: K-priors), and all others stay
as the quadratic of their sites.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.sensitivity import adapt
from tutorials.data import read

DELTA, PAIRS = 1.0, 5
KINDS = ("going on", "EWC", "memory 10", "memory 40", "memory 40 said", "all data")
Data = tuple[Tensor, Tensor]


def tasks_of(name: str) -> tuple[list[Data], Data]:
    """Five tasks and the test images of all of them."""
    if name == "fashion":
        found = read("fashion-mnist")
        x, x_test = (
            F.avg_pool2d(images[:3000], 2).flatten(1)
            for images in (found.images, found.test_images)
        )
        labels, test_labels = found.labels[:3000], found.test_labels[:3000]
        chosen = [labels // 2 == k for k in range(PAIRS)]
        return [(x[c], labels[c] % 2) for c in chosen], (x_test, test_labels % 2)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = images.float() / 16
    train = torch.arange(len(x)) % 3 != 0
    if name == "split":
        chosen = [train & (labels // 2 == k) for k in range(PAIRS)]
        return [(x[c], labels[c] % 2) for c in chosen], (x[~train], labels[~train] % 2)
    draw = torch.Generator().manual_seed(0)
    orders = [torch.arange(64), *(torch.randperm(64, generator=draw) for _ in range(PAIRS - 1))]
    seen = torch.cat([x[~train][:, o] for o in orders])
    return [(x[train][:, o], labels[train]) for o in orders], (seen, labels[~train].repeat(PAIRS))


def network(seed: int, task: Data) -> nn.Module:
    torch.manual_seed(seed)
    classes = int(task[1].max()) + 1
    return nn.Sequential(nn.Linear(task[0].shape[1], 32), nn.Tanh(), nn.Linear(32, classes))


def descend(model: nn.Module, data: Data, precision: list[Tensor], mean: list[Tensor]) -> None:
    """Minimise Σ ℓ_i + ½ (θ − m)ᵀ S (θ − m)."""
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(parameters, max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1], reduction="sum")
        for p, s, m in zip(parameters, precision, mean, strict=True):
            loss = loss + 0.5 * (s * (p - m).square()).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def accuracy(model: nn.Module, data: Data) -> float:
    return float((model(data[0]).argmax(1) == data[1]).float().mean())


def sequence(kind: str, seed: int, tasks: list[Data], test: Data) -> float:
    model = network(seed, tasks[0])
    flat = [torch.full_like(p, DELTA) for p in model.parameters()]
    zero = [torch.zeros_like(p) for p in model.parameters()]
    if kind == "all data":
        whole = (torch.cat([x for x, _ in tasks]), torch.cat([y for _, y in tasks]))
        descend(model, whole, flat, zero)
        return accuracy(model, test)
    descend(model, tasks[0], flat, zero)
    task = blr.Task(model, tasks[0])
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA)
    for data in tasks[1:]:
        if kind.startswith("memory"):
            _, size, *said = kind.split()
            step = adapt(
                task, q, blr.Task(model, data), memory=int(size),
                targets="predictions" if said else "labels", progress=False,
            )  # fmt: skip
            task, q = step.task, step.posterior
            continue
        mean = [p.detach().clone() for p in model.parameters()]
        names = [n for n, _ in model.named_parameters()]
        old = [q.precision(n) for n in names] if kind == "EWC" else flat
        descend(model, data, old, mean if kind == "EWC" else zero)
        prior = dict(zip(names, old, strict=True))
        first = dict(zip(names, mean, strict=True))
        q = blr.fit_laplace(
            blr.Task(copy.deepcopy(model), data), structure="diag", prior_precision=prior,
            initial=first,
        )  # fmt: skip
    return accuracy(task.model if kind.startswith("memory") else model, test)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=["split", "permuted", "fashion"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = args.kinds
    print(f"| tasks | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    for name in args.names:
        tasks, test = tasks_of(name)
        cells = []
        for kind in kinds:
            found = [sequence(kind, seed, tasks, test) for seed in range(args.seeds)]
            cells.append(f"{statistics.mean(found):.3f} ± {statistics.stdev(found):.3f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

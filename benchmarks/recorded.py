"""What recording Kronecker factors in a training costs, and merges by what it leaves behind.

    python -m benchmarks.recorded cost     steps with and without, of four networks
    python -m benchmarks.recorded merge    four turned digits tasks, three seeds

The cost is that of a step whose pass is recorded, and of one whose pass is not, in parts of a step
without a recorder (medians of blocks in turn, in seconds of the processor); and of a training that
records one pass in five, as trainings do on average. The merge is of four
fine-tunes of one base, by the posteriors that ``blr.Checkpoints(structure="kron")`` left, beside
fitted ones; the mean accuracy in per cent on held-out images of the four tasks.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from benchmarks.field.cases import mlp
from blr_analysis.posterior import KroneckerRecorder

BATCH = 32
BLOCK = 16  # steps
NEVER = 10**9  # passes for one that is recorded
BLOCKS = 21
TASKS = 4
TRAINED = 250  # examples of a task
BASE = 400

State = dict[str, Tensor]


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 10)),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "64-64-10": (lambda: mlp(64, 64, 10), (64,)),
    "784-64-10": (lambda: mlp(784, 64, 10), (784,)),
    "784-512-512-10": (lambda: mlp(784, 512, 512, 10), (784,)),
    "two convolutions, 28 x 28": (convolutions, (1, 28, 28)),
}


def stepper(name: str, every: int | None) -> Callable[[], None]:
    """One step of AdamW, of which one in ``every`` is recorded; None: without a recorder."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(BATCH, *shape)
    y = torch.randint(10, (BATCH,))
    if every is not None:
        KroneckerRecorder(model, every=every, labels="drawn")

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None]) -> float:
    """Of a step, in a block of them."""
    start = time.process_time()
    for _ in range(BLOCK):
        step()
    return (time.process_time() - start) / BLOCK


def cost() -> None:
    """Print the cost of recorded and other steps for every network."""
    for name in NETWORKS:
        plain = stepper(name, None)
        recorded = stepper(name, 1)
        others = stepper(name, NEVER)
        for step in (plain, recorded, others):
            step()
        blocks = [(seconds(plain), seconds(recorded), seconds(others)) for _ in range(BLOCKS)]
        base = statistics.median(block[0] for block in blocks)
        more = statistics.median(block[1] / block[0] - 1 for block in blocks)
        more_of_others = statistics.median(block[2] / block[0] - 1 for block in blocks)
        print(
            f"{name}: {1e3 * base:.2f} ms; recorded +{more:.0%}, others {more_of_others:+.0%}, "
            f"one in five +{0.2 * more + 0.8 * more_of_others:.0%}",
            flush=True,
        )


def turned(x: Tensor, quarters: int) -> Tensor:
    return x.view(-1, 8, 8).rot90(quarters, (1, 2)).reshape(-1, 64)


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    epochs: int,
    lr: float,
    checkpoints: blr.Checkpoints | None = None,
) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            if checkpoints is not None:
                checkpoints.step()
    return model.eval()


def accuracy(state: State, x: Tensor, y: Tensor) -> float:
    """The mean over the tasks, in per cent."""
    model = mlp(64, 64, 10)
    model.load_state_dict(state)
    hits = [(model(turned(x, k)).argmax(1) == y).float().mean() for k in range(TASKS)]
    return 100 * float(torch.stack(hits).mean())


def merges(seed: int) -> dict[str, float]:
    """Accuracies of one base's fine-tunes, merged."""
    torch.manual_seed(seed)
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(77))
    x = ((x[order] - 4.9) / 6).float()
    y = y[order]
    base = train(mlp(64, 64, 10), x[:BASE], y[:BASE], 15, 2e-3)
    first = base.state_dict()
    states: list[State] = []
    precisions: dict[str, list[blr.Posterior]] = {"recorded": [], "gram": [], "kron": []}
    for k in range(TASKS):
        own = slice(BASE + k * TRAINED, BASE + (k + 1) * TRAINED)
        data = (turned(x[own], k), y[own])
        model = copy.deepcopy(base)
        steps = 12 * -(-TRAINED // BATCH)
        checkpoints = blr.Checkpoints(model, steps=steps, structure="kron")
        train(model, *data, 12, 3e-3, checkpoints)
        task = blr.Task(model, data, progress=False)
        precisions["recorded"].append(checkpoints.posterior(n_data=TRAINED, initial=first))
        precisions["gram"].append(blr.fit_laplace(task, structure="gram"))
        precisions["kron"].append(blr.fit_laplace(task, initial=first))
        states.append(model.state_dict())
    held = slice(BASE + TASKS * TRAINED, None)
    average = {n: torch.stack([state[n] for state in states]).mean(0) for n in first}
    found = {"average": accuracy(average, x[held], y[held])}
    for name, posteriors in precisions.items():
        merged = dict(blr.merge(first, states, precisions=posteriors))
        found[name] = accuracy(merged, x[held], y[held])
    return found


def merge() -> None:
    """Print the accuracies of three seeds, and their mean."""
    rows = [merges(seed) for seed in range(3)]
    for row in [*rows, {name: statistics.mean(r[name] for r in rows) for name in rows[0]}]:
        print(", ".join(f"{name} {value:.1f}" for name, value in row.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Recorded factors")
    parser.add_argument("what", choices=("cost", "merge"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    {"cost": cost, "merge": merge}[parser.parse_args().what]()

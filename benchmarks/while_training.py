"""Does the leave-one-out estimate follow the test loss while a network trains, and overfits?

    python -m benchmarks.while_training [--quick] [--out FOLDER]

LeNet-5 on Fashion-MNIST, 1,000 training images, so that it overfits, by three optimizers. IVON and
Adam keep a precision of their own, from which the posterior is captured at every epoch; SGD keeps
none, and a diagonal Laplace posterior is fitted at every epoch. Printed for each: Pearson's
correlation of the estimate with the test NLL, over all epochs and over the second half of them
(where the network overfits), beside that of the training NLL, which any estimate has to beat; the
mean gap of estimate and test NLL, the epoch at which each is smallest, and what the watching cost
beside the training. Everything runs on one thread.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.cases import LeNet

sys.path.append(str(Path(__file__).parents[1] / "tutorials"))
from data import Images, read

DELTA = 1.0  # prior precision of the summed loss
BATCH = 50


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    train: int = 1000
    test: int = 1000
    watched: int = 500
    epochs: int = 30


QUICK = Size(train=300, test=300, watched=150, epochs=4)


@dataclass(frozen=True)
class Run:
    """One optimizer's epochs."""

    name: str
    monitor: blr.Monitor
    training_seconds: float


def ivon(model: nn.Module, n: int, steps: int) -> torch.optim.Optimizer:
    """Its precision starts at 1,000 for every weight and fades by a factor e in the run."""
    return blr.IVON(
        model.parameters(),
        lr=0.1,
        ess=n,
        hess_init=1000 / n,
        beta2=math.exp(-1 / steps),
        weight_decay=DELTA / n,
        generator=torch.Generator().manual_seed(0),
    )


def sgd(model: nn.Module, n: int, steps: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=DELTA / n)


def adam(model: nn.Module, n: int, steps: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=DELTA / n)


Posterior = Callable[[blr.Task, Any], blr.Posterior]


def captured(task: blr.Task, optimizer: Any) -> blr.Posterior:
    """The precision that the optimizer itself keeps."""
    prior = {} if isinstance(optimizer, blr.IVON) else {"prior_precision": DELTA}
    return blr.Posterior.from_optimizer(optimizer, task.model, n_data=task.n_data, **prior)


def fitted(task: blr.Task, optimizer: Any) -> blr.Posterior:
    """A diagonal Laplace posterior, for an optimizer that keeps none."""
    return blr.fit_laplace(task, structure="diag", prior_precision=DELTA)


OPTIMIZERS = {"IVON": (ivon, captured), "SGD": (sgd, fitted), "Adam": (adam, captured)}


def run(name: str, data: Images, size: Size) -> Run:
    """Train with one optimizer and watch every epoch."""
    make, posterior = OPTIMIZERS[name]
    x, y = data.images[: size.train], data.labels[: size.train]
    torch.manual_seed(0)
    model = LeNet()
    optimizer = make(model, len(y), size.epochs * math.ceil(len(y) / BATCH))
    task = blr.Task(model, (x, y))
    test = blr.Task(model, (data.test_images[: size.test], data.test_labels[: size.test]))
    monitor = blr.Monitor(task, test=test, examples=size.watched)
    shuffle = torch.Generator().manual_seed(0)
    spent = 0.0
    for epoch in range(1, size.epochs + 1):
        start = time.perf_counter()
        for batch in torch.randperm(len(y), generator=shuffle).split(BATCH):
            train_step(model, optimizer, x[batch], y[batch])
        spent += time.perf_counter() - start
        row = monitor(lambda: posterior(task, optimizer), epoch)
        assert row is not None
        print(
            f"  {name}, epoch {epoch:2}: NLL training {row['train_nll']:.3f}, leave-one-out "
            f"{row['loo_nll']:.3f}, test {row['test_nll']:.3f}; highest leverage "
            f"{row['max_leverage']:.2f}"
        )
    return Run(name, monitor, spent)


def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """One minibatch; IVON's gradient is taken at a sample."""
    optimizer.zero_grad()
    if isinstance(optimizer, blr.IVON):
        with optimizer.sampled_params(train=True):
            F.cross_entropy(model(x), y).backward()
    else:
        F.cross_entropy(model(x), y).backward()
    optimizer.step()


def pearson(a: Tensor, b: Tensor) -> float:
    """Their linear correlation."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def verdict(found: Run) -> dict[str, float]:
    """Agreement of the estimate with the test loss over the epochs."""
    rows = [r for r in found.monitor.rows if math.isfinite(r["loo_nll"])]
    names = ("loo_nll", "train_nll", "test_nll")
    loo, train, test = (torch.tensor([r[k] for r in rows]) for k in names)
    late = len(rows) // 2
    return {
        "pearson": pearson(loo, test),
        "late": pearson(loo[late:], test[late:]),
        "train": pearson(train, test),
        "train_late": pearson(train[late:], test[late:]),
        "gap": float((loo - test).abs().mean()),
        "last_gap": float(loo[-1] - test[-1]),
        "loo_best": found.monitor.best_epoch,
        "test_best": int(rows[int(test.argmin())]["epoch"]),
        "training": found.training_seconds,
        "watching": found.monitor.seconds,
    }


def picture(runs: list[Run]) -> Figure:
    """Estimated against measured generalisation, and the sensitivities, per optimizer."""
    figure = Figure(figsize=(5 * len(runs), 8), layout="constrained")
    axes = figure.subplots(2, len(runs), squeeze=False)
    for found, column in zip(runs, axes.T, strict=True):
        found.monitor.plot(column[0])
        column[0].set_title(f"{found.name}: Pearson {verdict(found)['pearson']:.2f}")
        found.monitor.plot(column[1], kind="sensitivities")
        column[0].set_yscale("log")  # estimates can lie far above what they estimate
        column[1].set_title("")
    return figure


def report(runs: list[Run]) -> None:
    """One line per optimizer."""
    print(
        "Pearson with the test NLL, all epochs / second half\n"
        "optimizer  leave-one-out    training NLL   mean |gap|  last gap  best epoch: estimate, "
        "test  seconds: training, watching"
    )
    for found in runs:
        v = verdict(found)
        print(
            f"{found.name:9}  {v['pearson']:6.3f} /{v['late']:6.3f}  {v['train']:6.3f} /"
            f"{v['train_late']:6.3f}  {v['gap']:10.3f}  {v['last_gap']:+8.3f}  "
            f"{v['loo_best']:20}, {v['test_best']:4}  {v['training']:17.1f}, {v['watching']:8.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.while_training",
                                     description=__doc__)  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few images and epochs: seconds")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = QUICK if args.quick else Size()
    data = read("fashion-mnist")
    runs = [run(name, data, size) for name in OPTIMIZERS]
    print(
        f"\nLeNet-5, {size.train:,} images of Fashion-MNIST, {size.epochs} epochs; "
        f"{size.watched:,} images watched, {size.test:,} test images\n"
    )
    report(runs)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "while_training.png"
    picture(runs).savefig(path, dpi=110)
    for found in runs:
        found.monitor.table.to_csv(args.out / f"while_training_{found.name}.csv", index=False)
    print(f"\n{path}")


if __name__ == "__main__":
    main()

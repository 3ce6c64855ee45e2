"""The rows that train networks, side by side on Fashion-MNIST.

    python -m benchmarks.training [--seeds 3] [--epochs 10] [--train 60000] [--optimizers IVON VOGN]

All start at the same weights and see the same images in the same order, in minibatches of 100,
with a cosine schedule from their own learning rate to 0. "At the mean" predicts with the weights
as the optimizer leaves them; "average of 10" averages the probabilities of ten networks drawn
from the posterior that the optimizer learned (its noise in training, tempered where ``ess`` says
so). The table is about the 10,000 test images, mean ± standard deviation over seeds; AUROC tells
them from 5,000 digits of MNIST by the largest probability. On a CPU seconds are CPU time.

Settings: the first of each optimizer in ``SETTINGS`` is in the table, from 30 epochs on the first
in ``LONGER``. ``--look`` compares all of them by the NLL on 5,000 training images that are held
out (seed 0; for those with a posterior, of the average). Vadam takes the square of a minibatch's
mean gradient for the mean of squares, which for B independent examples is B times too small (Khan
et al., 2018, Theorem 1): "ess = B N" undoes that, "ess = N" is the published algorithm.

Every run is kept under ``$BLR_CACHE`` or ``~/.cache/blr_analysis``, in ``training/``, and is not
run again while its settings stay; delete that folder after a change of the code.

At full size, on a GPU:

    python -m benchmarks.training --model resnet20-frn --device cuda --epochs 200 \\
        --batch 128 --draws 64
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.training_parts import MODELS, Data, load, scores
from benchmarks.truth import store
from blr_analysis.progress import track

Settings = dict[str, float]
Make = Callable[[nn.Module, int, int, Settings], Any]
COLUMNS = ("accuracy", "nll", "ece", "brier", "auroc")


def plain(kind: Any) -> Make:
    """One of torch's optimizers."""
    return lambda model, n, batch, settings: kind(model.parameters(), **settings)


def bayes(kind: Any) -> Make:
    """One with a posterior; ``by_batch`` multiplies ess = N by the size of the minibatch."""

    def make(model: nn.Module, n: int, batch: int, settings: Settings) -> Any:
        rest = dict(settings)
        ess = n * (batch if rest.pop("by_batch", False) else 1)
        extra: dict[str, Any] = {"model": model} if kind is blr.VOGN else {}
        return kind(model.parameters(), ess=ess, weight_decay=1e-4, **rest, **extra)

    return make


MAKE: dict[str, Make] = {
    "SGD": plain(torch.optim.SGD),
    "Adam": plain(torch.optim.Adam),
    "AdamW": plain(torch.optim.AdamW),
    "IVON": bayes(blr.IVON),
    "VOGN": bayes(blr.VOGN),
    "Vadam, ess = B N": bayes(blr.Vadam),
    "Vadam, ess = N": bayes(blr.Vadam),
    "bSAM": bayes(blr.BSAM),
}
LONG = 30
"""Epochs from which on a training is a long one."""
PLAIN = ("SGD", "Adam", "AdamW")
_SGD = {"momentum": 0.9, "weight_decay": 1e-4}
_STEPS = (4e-3, 1e-3, 2e-3, 8e-3, 1.6e-2)
SETTINGS: dict[str, tuple[Settings, ...]] = {
    "SGD": tuple({"lr": lr, **_SGD} for lr in (0.1, 0.03, 0.06, 0.15, 0.2)),
    "Adam": tuple({"lr": lr} for lr in _STEPS),
    "AdamW": tuple(
        {"lr": lr, "weight_decay": decay}
        for lr, decay in ((8e-3, 0.1), *((lr, 0.01) for lr in _STEPS))
    ),
    "IVON": tuple(
        {"lr": lr, "hess_init": start, "beta2": beta2}
        for lr, start, beta2 in (
            (1.0, 2.0, 0.9999),
            (1.0, 1.0, 0.9999),
            (1.0, 4.0, 0.9999),
            (0.5, 0.5, 0.9999),
            (0.3, 0.1, 0.9999),
            (1.0, 1.0, 0.999),
            (0.3, 0.1, 0.999),
        )
    ),
    "VOGN": (
        {"lr": 0.2, "hess_init": 0.2, "beta2": 0.9999},
        *(
            {"lr": lr, "hess_init": start}
            for lr, start in (
                (0.02, 0.1),
                (0.02, 0.05),
                (0.01, 0.05),
                (0.05, 0.05),
                (0.1, 0.1),
                (0.2, 0.2),
                (0.4, 0.5),
                (0.4, 1.0),
            )
        ),
    ),
    "Vadam, ess = B N": tuple({"lr": lr, "by_batch": True} for lr in (4e-3, 8e-3, 1.6e-2)),
    "Vadam, ess = N": tuple({"lr": lr} for lr in (8e-3, 2e-3, 1e-3)),
    "bSAM": tuple(
        {"lr": lr, "hess_init": 0.1, "radius": radius}
        for lr, radius in (
            (0.1, 0.001),
            (0.1, 0.003),
            (0.1, 0.01),
            (0.2, 0.01),
            (0.2, 0.003),
            (0.05, 0.01),
        )
    ),
}


# For long trainings, which want small steps or wide noise; tried together with the others.
LONGER: dict[str, tuple[Settings, ...]] = {
    "SGD": tuple({"lr": lr, **_SGD} for lr in (0.01, 3e-3, 1e-3)),
    "Adam": tuple({"lr": lr} for lr in (5e-4, 2.5e-4)),
    "AdamW": tuple(
        {"lr": lr, "weight_decay": decay}
        for lr, decay in ((1e-3, 1.0), (5e-4, 0.01), (2.5e-4, 0.01), (1e-3, 0.1))
    ),
    "IVON": tuple(
        {"lr": lr, "hess_init": start, "beta2": beta2}
        for lr, start, beta2 in (
            (0.3, 0.1, 0.9999),
            (0.1, 0.1, 0.999),
            (0.1, 0.05, 0.9999),
            (0.3, 0.05, 0.9999),
        )
    ),
    "VOGN": tuple(
        {"lr": lr, "hess_init": start} for lr, start in ((0.1, 0.1), (0.02, 0.05), (0.05, 0.02))
    ),
    "Vadam, ess = B N": tuple({"lr": lr, "by_batch": True} for lr in (1.6e-2, 2e-3)),
    "Vadam, ess = N": ({"lr": 8e-3},),
    "bSAM": tuple(
        {"lr": lr, "hess_init": start, "radius": radius}
        for lr, start, radius in ((0.03, 0.05, 0.03), (0.03, 0.1, 0.01), (0.1, 0.1, 0.03))
    ),
}


@dataclass(frozen=True)
class Run:
    """All that the result of a training depends on, but for code and machine."""

    optimizer: str
    settings: Settings
    seed: int
    train: int
    epochs: int
    batch: int
    draws: int
    model: str
    device: str
    held_out: bool

    @property
    def path(self) -> Path:
        """Where its result is kept."""
        text = json.dumps(asdict(self), sort_keys=True)
        name = "".join(c if c.isalnum() else "-" for c in self.optimizer)
        short = hashlib.sha256(text.encode()).hexdigest()[:16]
        return store.root() / "training" / f"{name}-{self.seed}-{short}.json"


def result(run: Run, data: Callable[[], Data]) -> dict[str, Any]:
    """From the cache, or from a training now."""
    if run.path.is_file():
        return json.loads(run.path.read_text())
    found = asdict(run) | measure(run, data())
    run.path.parent.mkdir(parents=True, exist_ok=True)
    beside = run.path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(found, indent=1))
    beside.replace(run.path)
    return found


def measure(run: Run, data: Data) -> dict[str, Any]:
    """Train and score; the scores of each way of prediction under ``"ways"``."""
    torch.manual_seed(run.seed)
    model = MODELS[run.model]().to(data.x.device)
    optimizer = MAKE[run.optimizer](model, len(data.x), run.batch, run.settings)
    order = torch.Generator().manual_seed(run.seed)
    steps = run.epochs * -(-len(data.x) // run.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    clock = time.perf_counter if data.x.is_cuda else time.process_time
    spent = 0.0
    for _ in range(run.epochs):
        start = clock()
        for batch in torch.randperm(len(data.x), generator=order).split(run.batch):
            step(model, optimizer, data.x[batch], data.y[batch])
            schedule.step()
        if data.x.is_cuda:
            torch.cuda.synchronize()
        spent += clock() - start
    model.eval()
    found: dict[str, Any] = {"ways": {}, "seconds_per_epoch": spent / run.epochs}
    for way, look, draws in ways(optimizer, run.draws):
        probs = predict(model, look, draws, data.x_test), predict(model, look, draws, data.x_other)
        found["ways"][way] = scores(probs[0], data.y_test, probs[1])
    seen = predict(model, nullcontext, 1, data.x)
    found["train_nll"] = scores(seen, data.y, seen)["nll"]
    return found


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """One minibatch, with the looks that the optimizer asks for."""

    def backward() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()

    if not hasattr(optimizer, "sampled_params"):
        backward()
    else:
        with optimizer.sampled_params(train=True):
            backward()
        if hasattr(optimizer, "adversarial_params"):
            with optimizer.adversarial_params():
                F.cross_entropy(model(x), y).backward()
    optimizer.step()


def ways(
    optimizer: Any, draws: int
) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]], int]]:
    """How this optimizer's model can predict: name, context, contexts to average."""
    yield "at the mean", nullcontext, 1
    if hasattr(optimizer, "sampled_params"):
        yield f"average of {draws}", optimizer.sampled_params, draws


def predict(
    model: nn.Module, look: Callable[[], AbstractContextManager[Any]], draws: int, x: Tensor
) -> Tensor:
    """Probabilities ``[N, C]``, averaged over contexts."""
    total = torch.zeros(())
    with torch.no_grad():
        for _ in range(draws):
            with look():
                logits = torch.cat([model(part) for part in x.split(1000)])
            total = total.to(logits) + logits.softmax(-1) / draws
    return total


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """A row for every optimizer and way of prediction: mean ± standard deviation over seeds."""
    lines = [
        "| optimizer | predicts | accuracy % | NLL | ECE | Brier | AUROC, MNIST | NLL of the "
        "training images | s / epoch | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    pairs = dict.fromkeys((row["optimizer"], way) for row in found for way in row["ways"])
    for name, way in pairs:
        rows = [row for row in found if row["optimizer"] == name]
        cells = [_spread([row["ways"][way][column] for row in rows], column) for column in COLUMNS]
        at_mean = way == "at the mean"
        seen = f"{statistics.mean(row['train_nll'] for row in rows):.3f}" if at_mean else ""
        took = f"{statistics.mean(r['seconds_per_epoch'] for r in rows):.1f}" if at_mean else ""
        lines.append(f"| {name} | {way} | {' | '.join(cells)} | {seen} | {took} | {len(rows)} |")
    return lines


def _spread(values: Sequence[float], column: str) -> str:
    factor, digits = (100, 2) if column == "accuracy" else (1, 3)
    spread = f" ± {factor * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{factor * statistics.mean(values):.{digits}f}{spread}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--train", type=int, default=60_000, help="training images, at most 60,000")
    parser.add_argument("--optimizers", nargs="+", choices=MAKE, default=list(MAKE), metavar="NAME")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--draws", type=int, default=10, help="networks in a posterior average")
    parser.add_argument("--model", choices=MODELS, default="lenet5")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--look", action="store_true", help="compare the settings, held out")
    parser.add_argument("--cached", action="store_true", help="only what has been run before")
    return parser.parse_args(given)


def plan(args: argparse.Namespace) -> list[Run]:
    """Every training that these arguments ask for, all optimizers of a seed before the next."""
    same = {
        "train": args.train,
        "epochs": args.epochs,
        "batch": args.batch,
        "model": args.model,
        "device": args.device,
        "held_out": args.look,
    }
    first = (LONGER, SETTINGS) if args.epochs >= LONG else (SETTINGS,)
    if args.look:
        tried = [
            (name, one, 0)
            for name in args.optimizers
            for place, settings in enumerate(first)
            for one in settings[name]
            if not any(one in other[name] for other in first[:place])
        ]
    else:
        seeds = range(args.seeds)
        tried = [(name, first[0][name][0], seed) for seed in seeds for name in args.optimizers]
    return [
        Run(name, one, seed, draws=1 if name in PLAIN else args.draws, **same)
        for name, one, seed in tried
    ]


def main() -> None:
    args = arguments()
    kept: list[Data] = []

    def data() -> Data:
        if not kept:
            kept.append(load(args.train, args.look).to(args.device))
        return kept[0]

    runs = [run for run in plan(args) if not args.cached or run.path.is_file()]
    found = []
    for run in track(runs, label="training"):
        found.append(result(run, data))
        if args.look:
            nll = {way: round(score["nll"], 4) for way, score in found[-1]["ways"].items()}
            print(run.optimizer, run.settings, nll)
    if not args.look:
        print(f"**{args.model}, {args.train:,} images, {args.epochs} epochs**\n")
        print(*table(found), sep="\n")


if __name__ == "__main__":
    main()

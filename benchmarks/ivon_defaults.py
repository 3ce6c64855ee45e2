"""IVON as docs/ivon.md has it, beside AdamW: a character LSTM and a CNN; Vadam and Vprop too.

    python -m benchmarks.ivon_defaults [cnn] [lstm] [--seeds 3] [--draws 8]
    python -m benchmarks.ivon_defaults moby --device cuda      # two layers on Moby Dick
    python -m benchmarks.ivon_defaults moby --units 128 --steps 600 --look 1      # on a CPU

The learning rates of both are chosen from a grid by the mean NLL on held-out data over the first
``--seeds`` (IVON's at the average); the table is about other test data and as many other seeds,
the same ones for both. One schedule for all, a cosine to 0. The LSTM (97 k weights) takes 402 steps
of 32 passages of 64 characters of State-of-the-Union speeches, the CNN (52 k) 800 steps of 50 of
4,000 images of Fashion-MNIST. IVON has ``weight_decay=1 / ess``, a standard normal prior, ``steps``
and its defaults. ECE has 15 bins. Data as for the tutorials.

"moby" is the language model of Khan's talk of 2018 (a two-layer LSTM on War and Peace; here 256
units on Moby Dick): of every chapter four fifths to train on, a tenth to choose by and a tenth to
test, 2,000 steps of 64 passages of 64 characters. Vprop and Vadam take the square of a minibatch's
mean gradient; "ess = B N" undoes what that does to their variance (Khan et al., 2018, Theorem 1).
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim import Vadam, Vprop
from blr_analysis.posterior.predictive import Predictions
from tutorials import data as images
from tutorials.data import cache_folder

Pair = tuple[Tensor, Tensor]
LENGTH = 64


class Problem(NamedTuple):
    """Examples to train on, to choose by and to test on, and how long to train."""

    train: Pair
    held_out: Pair
    test: Pair
    classes: int
    batch: int
    steps: int
    grids: dict[str, tuple[float, ...]]
    layers: int = 1
    units: int = 128

    def network(self) -> nn.Module:
        if self.train[0].ndim == 4:
            return cnn(self.classes)
        return CharacterLSTM(self.classes, self.layers, self.units)

    def to(self, device: str) -> Problem:
        """The same on a device."""
        pairs = [(x.to(device), y.to(device)) for x, y in self[:3]]
        return Problem(*pairs, *self[3:])


class CharacterLSTM(nn.Module):
    def __init__(self, classes: int, layers: int, units: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, 32)
        self.lstm = nn.LSTM(32, units, layers, batch_first=True)
        self.out = nn.Linear(units, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(ids))[0])


def cnn(classes: int) -> nn.Module:
    """Two convolutions with stride, two linear layers, ReLU."""
    convolutions = (nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, classes)
    )


def characters() -> Problem:
    """4,000 characters of every speech to train on, the next ones to test and to choose by."""
    sys.path.insert(0, str(Path(images.__file__).parent))
    importlib.import_module("speeches").read("sotu")  # fetched
    texts = [p.read_text(errors="replace") for p in sorted((cache_folder() / "sotu").glob("*.txt"))]
    index = {c: i for i, c in enumerate(sorted({c for text in texts for c in text[:5600]}))}

    def rows(start: int, end: int) -> Pair:
        return passages([index[c] for text in texts for c in text[start:end]])

    grids = {"AdamW": (0.01, 0.015, 0.02, 0.03), "IVON": (10.0, 20.0)}
    return Problem(rows(0, 4000), rows(5000, 5600), rows(4000, 5000), len(index), 32, 402, grids)


def passages(ids: list[int]) -> Pair:
    """Characters and the ones after them, ``[N, 64]`` each."""
    n = (len(ids) - 1) // LENGTH * LENGTH
    found = torch.tensor(ids[: n + 1])
    return found[:-1].view(-1, LENGTH), found[1:].view(-1, LENGTH)


def moby_dick() -> Problem:
    sys.path.insert(0, str(Path(images.__file__).parent))
    folder = cache_folder() / "moby-dick"
    if not folder.exists():
        importlib.import_module("speeches").fetch(folder, "package/moby-dick/data/")
    # The package's data.txt is the book once more.
    texts = [p.read_text("utf-8") for p in sorted(folder.glob("chapter_*.txt"))]
    index = {c: i for i, c in enumerate(sorted(set("".join(texts))))}
    first, second, third = (
        passages([index[c] for t in texts for c in t[len(t) * a // 10 : len(t) * b // 10]])
        for a, b in ((0, 8), (8, 9), (9, 10))
    )
    root = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
    grids = {"AdamW": root[:-1], "IVON": (5.0, 10.0, 20.0)}
    grids |= dict.fromkeys(("Vprop", "Vprop, ess = B N", "Vadam", "Vadam, ess = B N"), root)
    return Problem(first, second, third, len(index), 64, 2000, grids, layers=2, units=256)


def clothes() -> Problem:
    found = images.read("fashion-mnist")
    mean, scale = found.images.mean(), found.images.std()
    x, test = ((part - mean) / scale for part in (found.images, found.test_images))
    held_out = x[50_000:55_000], found.labels[50_000:55_000]
    grids = {"AdamW": (1e-3, 2e-3, 3e-3, 4e-3), "IVON": (0.1, 0.2, 0.3)}
    return Problem(
        (x[:4000], found.labels[:4000]), held_out, (test, found.test_labels), 10, 50, 800, grids
    )


def trained(problem: Problem, kind: str, lr: float, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    x, y = problem.train
    model = problem.network().to(x.device)
    optimizer = optimizer_of(problem, kind, lr, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, problem.steps)
    shuffle, batches = torch.Generator().manual_seed(seed), []
    for _ in range(problem.steps):
        if not batches:
            order = torch.randperm(len(x), generator=shuffle)
            batches = [*order[: len(x) // problem.batch * problem.batch].split(problem.batch)]
        batch = batches.pop()

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]).flatten(0, -2), y[batch].flatten())
            loss.backward()
            return loss

        optimizer.step(closure)
        schedule.step()
    return model, optimizer


def optimizer_of(problem: Problem, kind: str, lr: float, model: nn.Module) -> Any:
    """At its defaults, but for the standard normal prior and what the kind's name says."""
    if kind == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    targets = problem.train[1]
    batch = problem.batch * targets[0].numel() if kind.endswith("B N") else 1
    given = {"lr": lr, "ess": targets.numel() * batch, "weight_decay": 1 / targets.numel()}
    if kind == "IVON":
        return blr.IVON(model.parameters(), steps=problem.steps, **given)
    return {"Vadam": Vadam, "Vprop": Vprop}[kind[:5]](model.parameters(), **given)


def scores(
    kind: str, found: tuple[nn.Module, Any], test: Pair, draws: int
) -> dict[str, Predictions]:
    """At the weights, and averaged over draws; every character is an example."""
    model, optimizer = found
    at_mean = predictions(model, test, nullcontext, 0)
    if kind == "AdamW":
        return {kind: at_mean}
    averaged = predictions(model, test, optimizer.sampled_params, draws)
    return {f"{kind}, at the mean": at_mean, f"{kind}, {draws} draws": averaged}


def predictions(model: nn.Module, test: Pair, look: Any, draws: int) -> Predictions:
    x, y = test
    passes, total = max(draws, 1), torch.zeros(())
    with torch.no_grad():
        for _ in range(passes):
            with look():
                probs = torch.cat([model(part).softmax(-1).cpu() for part in x.split(500)])
            total = total + probs.flatten(0, -2) / passes
    y = y.cpu()
    losses = -total.gather(1, y.flatten()[:, None]).squeeze(1).clamp_min(1e-30).log()
    return Predictions(total, losses, y.flatten(), draws, blr.Categorical())


def held_out_nll(problem: Problem, kind: str, lr: float, seeds: int, draws: int) -> float:
    """Mean over seeds, averaged over draws where there are any; inf if a training diverges."""
    try:
        models = [trained(problem, kind, lr, seed) for seed in range(seeds)]
    except OptimizerError:
        return math.inf
    scored = [list(scores(kind, m, problem.held_out, draws).values())[-1] for m in models]
    nll = statistics.mean(p.nll for p in scored)
    return nll if math.isfinite(nll) else math.inf


def table(name: str, problem: Problem, seeds: int, look: int, draws: int) -> None:
    chosen = {}
    for kind, grid in problem.grids.items():
        tried = {lr: held_out_nll(problem, kind, lr, look, draws) for lr in grid}
        print(name, kind, {lr: round(nll, 4) for lr, nll in tried.items()}, flush=True)
        if min(tried.values()) < math.inf:
            chosen[kind] = min(tried, key=tried.__getitem__)
    found: dict[str, list[Predictions]] = {}
    shares = []
    for seed in range(seeds, 2 * seeds):
        for kind, lr in chosen.items():
            model, optimizer = trained(problem, kind, lr, seed)
            for way, scored in scores(kind, (model, optimizer), problem.test, draws).items():
                found.setdefault(f"{way}, lr {lr:g}", []).append(scored)
            if kind == "IVON":
                shares.append(blr.Posterior.from_optimizer(optimizer, model).record)
    base = next(iter(found.values()))
    said = "".join(f"{s['beta2'] ** s['step']:.2g} of h's start is left; " for s in shares[:1])
    print(f"\n**{name}**, {said}{seeds} seeds\n")
    print("| | NLL | / AdamW's | by seed | ECE | accuracy % |\n|---|---|---|---|---|---|")
    for way, rows in found.items():
        nll = statistics.mean(p.nll for p in rows)
        ece = statistics.mean(p.calibration_error or 0.0 for p in rows)
        right = 100 * statistics.mean(p.accuracy or 0.0 for p in rows)
        ratios = [p.nll / b.nll for p, b in zip(rows, base, strict=True)]
        seen = ", ".join(f"{r:.3f}" for r in ratios)
        ratio = nll / statistics.mean(b.nll for b in base)
        print(f"| {way} | {nll:.4f} | {ratio:.4f} | {seen} | {ece:.4f} | {right:.2f} |")
    print(flush=True)


TASKS = {
    "cnn": ("CNN, Fashion-MNIST", clothes),
    "lstm": ("LSTM, characters", characters),
    "moby": ("Two-layer LSTM, Moby Dick", moby_dick),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=["cnn", "lstm"], metavar="|".join(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--look", type=int, help="seeds that rates are chosen on; as --seeds")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", help="those of the grids that are run; AdamW first")
    parser.add_argument("--units", type=int, help="of each of the LSTM's layers")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for task in args.tasks:
        name, make = TASKS[task]
        problem = make().to(args.device)
        kinds = args.kinds or list(problem.grids)
        size = {"units": args.units or problem.units, "steps": args.steps or problem.steps}
        problem = problem._replace(grids={kind: problem.grids[kind] for kind in kinds}, **size)
        table(name, problem, args.seeds, args.look or args.seeds, args.draws)


if __name__ == "__main__":
    main()

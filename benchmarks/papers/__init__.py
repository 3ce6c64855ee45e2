"""A result of each paper that the package was built from: a script that prints or draws it.

python -m benchmarks.papers.NAME [--small]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy

from tutorials.data import read

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
BINS = 15
Numbers = dict[str, float]
Data = tuple[Tensor, Tensor, Tensor, Tensor]


def panels(count: int, width: float = 3.6, height: float = 3.0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width * count, height), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def drawn(draw: Callable[[bool], tuple[Figure, Numbers]]) -> None:
    """The command line of a figure: its picture into a folder, its numbers printed."""
    parser = argparse.ArgumentParser(description=draw.__doc__)
    parser.add_argument("--small", action="store_true", help="the size of the docs' gallery")
    parser.add_argument("--out", type=Path, default=Path())
    args = parser.parse_args()
    figure, numbers = draw(args.small)
    figure.savefig(args.out / f"{Path(draw.__code__.co_filename).stem}.png", dpi=100)
    print({name: round(value, 4) for name, value in numbers.items()})


def train(
    optimizer: Any, loss: Callable[[Tensor], Tensor], n: int, steps: int, batch: int, seed: int = 0
) -> None:
    """Minibatches without replacement; ``loss`` takes their indices."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randperm(n, generator=generator)[:batch]

        def closure(chosen: Tensor = chosen) -> Tensor:
            optimizer.zero_grad()
            value = loss(chosen)
            value.backward()
            return value

        optimizer.step(closure)


def clothes(examples: int) -> Data:
    """The first images of Fashion-MNIST, and its first test images; one mean and scale."""
    found = read("fashion-mnist")
    mean = found.images.mean()
    scale = found.images.std()
    x, test = ((images - mean) / scale for images in (found.images, found.test_images))
    most = 1000 if examples <= 1000 else len(test)
    return x[:examples], found.labels[:examples], test[:most], found.test_labels[:most]


def fitted(model: torch.nn.Module, optimizer: Any, data: Data, epochs: int, seed: int) -> None:
    """An ordinary training: minibatches of 100, a rate that falls to 0 as a cosine."""
    x, y, *_ = data
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(x) // 100))
    generator = torch.Generator().manual_seed(seed)
    draws = getattr(optimizer, "sampled_params", lambda train: nullcontext())
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(100):
            with draws(train=True):
                optimizer.zero_grad()
                cross_entropy(model(x[batch]), y[batch]).backward()
            if hasattr(optimizer, "adversarial_params"):
                with optimizer.adversarial_params():
                    cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()


def probabilities(
    model: torch.nn.Module, look: Callable[[], AbstractContextManager[Any]], draws: int, x: Tensor
) -> Tensor:
    """Of every class, averaged over contexts, ``[N, C]``."""
    total = torch.zeros(())
    with torch.no_grad():
        for _ in range(draws):
            with look():
                total = total + model(x).softmax(-1) / draws
    return total


def scores(p: Tensor, y: Tensor) -> Numbers:
    """Accuracy in per cent, NLL in nats, and the expected calibration error over 15 bins."""
    confidence, said = p.max(-1)
    gap = (said == y).double() - confidence.double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    sums = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, gap)
    nll = -p.gather(1, y[:, None]).clamp_min(1e-30).log().mean()
    return {
        "accuracy": 100 * float((said == y).double().mean()),
        "nll": float(nll),
        "ece": float(sums.abs().sum() / len(y)),
    }


def averaged(rows: list[Numbers]) -> str:
    """Cells of a table: mean ± standard deviation over seeds."""
    columns = torch.tensor([list(row.values()) for row in rows]).double()
    spread = columns.std(0) if len(rows) > 1 else torch.zeros(columns.shape[1])
    pairs = zip(columns.mean(0).tolist(), spread.tolist(), strict=True)
    return " | ".join(f"{mean:.3f} ± {sd:.3f}" for mean, sd in pairs)

"""What an audit of a ResNet costs, in trainings: its fit and `suspicious` at four checkpoints.

    python benchmarks/resnet.py [--out FILE.json] [--images 3000] [--epochs 60]

A residual network as CIFAR's, three pairs of convolutions without biases, each before its
BatchNorm, 38,554 parameters, on 3 x 16 x 16 images of ten classes. It is trained by SGD with
momentum in batches of 50, and keeps its weights after 1/8, 1/4, 1/2 and all of the epochs.
Seconds are of the processor, on one thread, so that a busy machine does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blr_analysis as blr

CLASSES = 10
BATCH = 50
FRACTIONS = (1 / 8, 1 / 4, 1 / 2)  # of the epochs, at which weights are kept


def conv_norm(i: int, o: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(i, o, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o))


class Block(nn.Module):
    """Two convolutions and a skip connection, projected where the shape changes."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(i, o, 3, stride)
        self.second = conv_norm(o, o, 3)
        self.skip = nn.Identity() if (i, stride) == (o, 1) else conv_norm(i, o, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.first(x))
        return F.relu_(self.second(h) + self.skip(x))


def network() -> nn.Module:
    stem = nn.Sequential(conv_norm(3, 16, 3), nn.ReLU(inplace=True))
    blocks = (Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1))
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, *blocks, *pool, nn.Linear(32, CLASSES))


def images(n: int) -> tuple[Tensor, Tensor]:
    """A class is a random pattern of colours, with noise on top."""
    patterns = torch.randn(CLASSES, 3, 16, 16)
    labels = torch.randint(CLASSES, (n,))
    return patterns[labels] + 4 * torch.randn(n, 3, 16, 16), labels


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> list[dict[str, Tensor]]:
    """The weights that are kept on the way."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    kept = {max(1, round(fraction * epochs)) for fraction in FRACTIONS}
    checkpoints = []
    model.train()
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()
        if epoch in kept:
            checkpoints.append({n: t.clone() for n, t in model.state_dict().items()})
    model.eval()
    return checkpoints


class Passes:
    """How many rows of outputs a model makes, and how many gradients are taken of them."""

    def __init__(self, model: nn.Module) -> None:
        self.forward = 0
        self.backward = 0
        self.handle = model.register_forward_hook(self._seen)

    def _seen(self, _: nn.Module, __: object, outputs: Tensor) -> None:
        self.forward += len(outputs)
        if outputs.requires_grad:
            outputs.register_hook(self._gradient)

    def _gradient(self, gradient: Tensor) -> None:
        self.backward += len(gradient)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def measured(n: int, epochs: int) -> list[dict[str, Any]]:
    """Seconds of the training, the fit and the ranking, and what part of a training they are."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = network()
    x, y = images(n)
    checkpoints, training = timed(lambda: train(model, x, y, epochs))
    task = blr.Task(model, (x, y), checkpoints=checkpoints)
    posterior, fit = timed(lambda: blr.fit_laplace(task))
    _, ranking = timed(lambda: blr.suspicious(task, posterior).table)
    seconds = {"training": training, "fit": fit, "suspicious": ranking, "both": fit + ranking}
    rows = [
        {"what": what, "images": n, "epochs": epochs, "seconds": s, "trainings": s / training}
        for what, s in seconds.items()
    ]
    passes = Passes(model)  # of one fit: other checkpoints run in copies of the model
    blr.fit_laplace(blr.Task(model, (x, y)))
    passes.handle.remove()
    rows[1]["forward passes a checkpoint"] = passes.forward / n
    rows[1]["backward passes a checkpoint"] = passes.backward / n
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args()
    rows = measured(args.images, args.epochs)
    for row in rows:
        print(row, flush=True)
    if args.out:
        args.out.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()

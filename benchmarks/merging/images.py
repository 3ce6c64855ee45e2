"""Clothes in four poses, and three small networks for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.merging.trained import Trained, fine_tuned, fitted, joined
from tutorials.data import read

POSES = ("upright", "90°", "180°", "inverted")
# pictures of each pose
FIRST = 300
TRAIN = 800
VALIDATE = 200
TEST = 500
BASE_EPOCHS = 12
EPOCHS = 10


def mlp() -> nn.Module:
    """196-64-32-10."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    )


def cnn() -> nn.Module:
    """Two convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(144, 48), nn.ReLU(), nn.Linear(48, 10),
    )  # fmt: skip


class Vit(nn.Module):
    """A transformer on 49 patches of 2 × 2 pixels, whose mean is classified."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.places = nn.Parameter(0.1 * torch.randn(49, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(len(x), 49, 4)
        x = self.patches(patches) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Block(nn.Module):
    """Attention with two heads and an MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.between = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        heads = [
            layer(y).unflatten(-1, (2, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def vit() -> nn.Module:
    return Vit()


def images_of(network: Callable[[], nn.Module], seed: int) -> Trained:
    """A base that saw a few pictures of every pose, and a model for each; no two tasks share
    training pictures."""
    torch.manual_seed(seed)
    source = read("fashion-mnist")
    x = nn.functional.avg_pool2d(source.images[:30_000], 2)
    x_test = nn.functional.avg_pool2d(source.test_images, 2)
    per_pose = FIRST + TRAIN + VALIDATE
    order = torch.randperm(len(x))[: len(POSES) * per_pose].view(len(POSES), per_pose)
    held_out = torch.randperm(len(x_test))[:TEST]
    data = {}
    for pose, rows in zip(POSES, order, strict=True):
        first, train, validate = rows.split([FIRST, TRAIN, VALIDATE])
        data[pose] = {
            "first": (posed(x[first], pose), source.labels[first]),
            "train": (posed(x[train], pose), source.labels[train]),
            "validate": (posed(x[validate], pose), source.labels[validate]),
            "test": (posed(x_test[held_out], pose), source.test_labels[held_out]),
        }
    rate = 3e-3 if network is vit else 1e-3
    mixed = joined([part["first"] for part in data.values()])
    base = fitted(network(), mixed, classified, epochs=BASE_EPOCHS, seed=seed, rate=rate)
    return fine_tuned(base, data, classified, epochs=EPOCHS, seed=seed, rate=rate)


def posed(images: Tensor, pose: str) -> Tensor:
    """Pictures in a pose."""
    if pose == "inverted":
        return 1 - images
    return images.rot90(POSES.index(pose), (2, 3)).contiguous()


def classified(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return nn.functional.cross_entropy(model(x), y)

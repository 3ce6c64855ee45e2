"""The trial problems, shaped like Fashion-MNIST; the pixels' values do not change the cost."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


class LeNet(nn.Module):
    """LeNet-5: two convolutions, three linear layers, tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.linear1 = nn.Linear(400, 120)
        self.linear2 = nn.Linear(120, 84)
        self.linear3 = nn.Linear(84, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.tanh(self.conv1(x)), 2)
        x = F.max_pool2d(torch.tanh(self.conv2(x)), 2).flatten(1)
        return self.linear3(torch.tanh(self.linear2(torch.tanh(self.linear1(x)))))


def mlp(*widths: int) -> nn.Module:
    """A tanh MLP with these layer widths."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Model, images, labels: "mlp" (784-32-16-10, 2,000 images), "lenet" (LeNet-5, 1,000) or
    "large" (784-500-300-10, 60,000)."""
    torch.manual_seed(0)
    if name == "large":
        x = torch.rand(60_000, 784)
        y = torch.randint(CLASSES, (60_000,))
        return mlp(784, 500, 300, CLASSES), x, y
    if name == "mlp":
        return mlp(784, 32, 16, CLASSES), torch.rand(2000, 784), torch.randint(CLASSES, (2000,))
    return LeNet(), torch.rand(1000, 1, 28, 28), torch.randint(CLASSES, (1000,))


def layer_modules(model: nn.Module) -> list[nn.Module]:
    """The layers with parameters, in order."""
    return [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]

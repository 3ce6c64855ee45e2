"""A U-Net on drawn shapes by IVON: the mean of 16 draws, and how unsure they are.

    python -m benchmarks.papers.segmentation [--small] [--out DIR]

Shen et al., "Variational learning is effective for large deep networks", ICML 2024. Printed: the
entropy of the averaged prediction at borders, elsewhere and where it is wrong, in nats.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.papers import Numbers, drawn, panels, train


def block(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    """Two levels down and up with skips, eight channels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(1, width), block(width, 2 * width)])
        self.bottom = block(2 * width, 2 * width)
        self.up = nn.ModuleList([block(4 * width, width), block(2 * width, width)])
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            kept.append(layer(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.bottom(x)
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.out(x)


def shapes(n: int, seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Noisy images ``[n, 1, 32, 32]`` of a disc and a square, and where they are."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(*2 * [torch.arange(size).float()], indexing="ij")
    y, x, radius = (torch.rand(3, n, 2, 1, 1, generator=generator) * 20 + 6).unbind()
    radius = radius / 5 + 2
    across = (rows - y).abs()
    down = (columns - x).abs()
    disc = (across.square() + down.square() < radius.square())[:, 0]
    square = (torch.maximum(across, down) < radius)[:, 1]
    mask = (disc | square).float().unsqueeze(1)
    noise = torch.randn(n, 1, size, size, generator=generator)
    return F.avg_pool2d(mask, 3, 1, 1) + 0.4 * noise, mask


def draw(small: bool = False) -> tuple[Figure, Numbers]:
    """A U-Net on drawn shapes by IVON: the mean of 16 draws, and how unsure they are."""
    n = 100
    steps = 150 if small else 800
    x, mask = shapes(n, 0)
    x_test, truth = shapes(20, 1)
    torch.manual_seed(0)
    model = UNet()
    given = {"ess": n * 32, "weight_decay": 1e-4, "steps": steps, "hess_init": 0.1}
    optimizer = blr.IVON(model.parameters(), lr=0.3, **given)
    loss = F.binary_cross_entropy_with_logits
    train(optimizer, lambda i: loss(model(x[i]), mask[i]), n, steps, 10)
    draws = []
    with torch.no_grad():
        for _ in range(16):
            with optimizer.sampled_params():
                draws.append(model(x_test).sigmoid())
    p = torch.stack(draws).mean(0)
    entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))
    near = F.max_pool2d(truth, 3, 1, 1) != -F.max_pool2d(-truth, 3, 1, 1)
    wrong = (p > 0.5) != (truth > 0.5)
    figure, axes = panels(4, 2.2, 2.4)
    titles = ("image", "truth", "mean of draws", "entropy")
    for a, picture, title in zip(axes, (x_test, truth, p, entropy), titles, strict=True):
        a.imshow(picture[2, 0], cmap="viridis" if title == "entropy" else "gray")
        a.set(title=title, xticks=[], yticks=[])
    return figure, {
        "entropy at borders": float(entropy[near].mean()),
        "entropy elsewhere": float(entropy[~near].mean()),
        "entropy where wrong": float(entropy[wrong].mean()),
        "share wrong": float(wrong.float().mean()),
    }


if __name__ == "__main__":
    drawn(draw)

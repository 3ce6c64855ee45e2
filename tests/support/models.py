"""Small models that mix every kind of layer, and data for them, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D as HFConv1D

D = torch.float64


class Images(nn.Module):
    """Convolutions of every sort, norms, in-place activations, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.n1 = nn.BatchNorm2d(4)
        self.c2 = nn.Conv2d(4, 4, (3, 2), padding=(1, 0), dilation=(1, 2), groups=2, bias=False)
        self.n2 = nn.GroupNorm(2, 4)
        self.depth = nn.Conv2d(4, 8, 3, padding="same", groups=4, padding_mode="reflect")
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.n1(self.c1(x)))
        x = self.n2(self.c2(x))
        x = x + torch.tanh(x)
        x = self.act(self.depth(x))
        return self.head(x.mean((2, 3)))


class Words(nn.Module):
    """Embeddings (tied to the read-out; positions), norms, Conv1D, attention, a parameter."""

    def __init__(self, tied: bool = True, vocabulary: int = 7, width: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.places = nn.Embedding(6, width)
        self.norm = nn.LayerNorm(width)
        self.mix = HFConv1D(width, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.rms = nn.RMSNorm(width)
        self.scale = nn.Parameter(torch.randn(width))
        self.twice = nn.Linear(width, width)
        self.read = nn.Linear(width, vocabulary, bias=True)
        if tied:
            self.read.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = self.norm(self.words(ids) + self.places(places))
        x = x + self.mix(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.read(self.rms(x * self.scale).mean(1))


class Graph(nn.Module):
    """Parts by name, and a function of them: ``forward(parts, *inputs)``."""

    def __init__(self, call: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


def volumes(m: Any, x: Tensor) -> Tensor:
    """Conv1d with stride and dilation, Conv3d with groups."""
    a = torch.tanh(m.bn(m.c1(x))).mean(-1)
    b = torch.tanh(m.c3(x.reshape(len(x), 1, 2, 2, -1))).mean((2, 3, 4))
    return m.out(a * m.gate(b))


def functional(m: Any, x: Tensor) -> Tensor:
    """A weight used outside its module, which no hook on the module can see."""
    h = torch.tanh(m.first(x))
    return m.second(h) + F.linear(h, m.first.weight.t())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Layers built inside have the same weights every time; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 eval mode with generic weights and running statistics."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    for p in model.parameters():
        p.data += 0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    for name, b in model.named_buffers():
        if "running" in name:
            b.copy_(torch.rand(b.shape, generator=generator, dtype=torch.float64) + 0.3)
    return model.eval()


@dataclass(frozen=True)
class Case:
    """A model, the inputs of its examples, and how a batch is run (None: the default way)."""

    model: nn.Module
    inputs: Any
    forward: Any = None


def graph(call: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> nn.Module:
    """Parts and a function of them, in float64 eval mode with generic weights."""
    return randomised(Graph(call, **parts))


def normal(*shape: int, seed: int = 3) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def tokens(n: int, length: int, vocabulary: int = 5) -> Tensor:
    """Random word indices."""
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, vocabulary, (n, length), generator=generator)


def classes(seed: int, dtype: torch.dtype = torch.float64, n: int = 120) -> tuple[Tensor, Tensor]:
    """Inputs and three classes that overlap."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    noise = 1.5 * torch.randn(n, 3, generator=g, dtype=torch.float64)
    y = (x @ torch.randn(4, 3, generator=g, dtype=torch.float64) + noise).argmax(1)
    return x.to(dtype), y


def minimised(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    delta: float,
    *,
    start: float = 0.0,
    weight: Tensor | None = None,
    steps: int = 500,
) -> nn.Module:
    """Trained by L-BFGS on the summed (weighted) cross-entropy + δ/2 ‖θ − start‖²."""
    x, y = data
    for p in model.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    settings = {"max_iter": steps, "tolerance_grad": 1e-9, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(model.parameters(), **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = sum((p - start).square().sum() for p in model.parameters())
        loss = F.cross_entropy(model(x), y, weight, reduction="sum") + delta / 2 * penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def mlp(inputs: int = 4, hidden: int = 5, outputs: int = 3, seed: int = 0) -> nn.Module:
    """A tanh MLP with generic weights."""
    with seeded(seed):
        layers = [nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)]
    return randomised(nn.Sequential(*layers), seed)


def example_models() -> dict[str, tuple[nn.Module, Tensor]]:
    """Name → (model, inputs) for every kind of model that the engine must read exactly."""
    with seeded(3):
        models = {
            "mlp": (mlp(), normal(7, 4)),
            "images": (Images(), normal(7, 2, 8, 8)),
            "volumes": (
                Graph(
                    volumes,
                    bn=nn.BatchNorm1d(3),
                    out=nn.Linear(3, 2, bias=False),
                    c1=nn.Conv1d(2, 3, 3, 2, 2, 2, padding_mode="circular"),
                    gate=nn.Linear(2, 3),
                    c3=nn.Conv3d(1, 2, (1, 2, 2), stride=(1, 2, 1), padding=(0, 1, 0)),
                ),
                normal(7, 2, 12),
            ),
            "words_tied": (Words(), tokens(7, 6, 7)),
            "functional": (
                Graph(functional, first=nn.Linear(3, 4), second=nn.Linear(4, 3)),
                normal(7, 3),
            ),
        }
    return {name: (randomised(model), x) for name, (model, x) in models.items()}

"""What the zoo of models is built from: parts by name, and a function of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import Graph, randomised
from torch import Tensor, nn

D = torch.float64


@dataclass(frozen=True)
class Case:
    """A model, the inputs of its examples, and how a batch is run (None: the default way)."""

    model: nn.Module
    inputs: Any
    forward: Any = None


def graph(call: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> nn.Module:
    """The same in float64 eval mode with generic weights."""
    return randomised(Graph(call, **parts))


def normal(*shape: int, seed: int = 3) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def tokens(n: int, length: int, vocabulary: int = 5) -> Tensor:
    """Random word indices."""
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, vocabulary, (n, length), generator=generator)

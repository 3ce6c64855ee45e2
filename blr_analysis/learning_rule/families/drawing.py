"""Random numbers from the generator that the caller gave, on its device."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis.checks import instance, positive_int


def many(like: Tensor, n: int | None) -> Tensor:
    """``like``, n times along a new leading dimension.

    Raises:
        InputError: ``n`` is no positive integer.
    """
    if n is not None:
        positive_int("n", n)
    return like if n is None else like.expand(n, *like.shape)


def device_of(like: Tensor, generator: torch.Generator | None) -> torch.device:
    """Where to draw: on the generator's device, or that of ``like`` if there is none.

    Raises:
        InputError: something else than a generator.
    """
    if generator is None:
        return like.device
    instance("generator", generator, torch.Generator, "a torch.Generator or None")
    return generator.device


def normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal, shaped as ``like``."""
    device = device_of(like, generator)
    drawn = torch.randn(like.shape, dtype=like.dtype, device=device, generator=generator)
    return drawn.to(like.device)


def uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform on (0, 1), never 0, shaped as ``like``."""
    device = device_of(like, generator)
    drawn = torch.rand(like.shape, dtype=like.dtype, device=device, generator=generator)
    return drawn.clamp(min=torch.finfo(like.dtype).tiny).to(like.device)


def log_gamma_draw(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """The logarithm of a Gamma(shape, 1) draw; it does not underflow where the shape is small.

    G(a) = G(a + 1) · U^{1/a} (Marsaglia & Tsang, 2000).
    """
    device = device_of(shape, generator)
    larger = torch._standard_gamma((shape + 1).to(device), generator).to(shape.device)
    return larger.log() + uniform(shape, generator).log() / shape

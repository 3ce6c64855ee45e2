"""Random numbers, drawn on the device of the caller's generator and moved to the parameters'."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis.checks import instance, positive_int


def many(like: Tensor, n: int | None) -> Tensor:
    """``like``, n times along a new leading dimension.

    Raises:
        InputError: ``n`` is not a positive integer.
    """
    if n is None:
        return like
    positive_int("n", n)
    return like.expand(n, *like.shape)


def device_of(like: Tensor, generator: torch.Generator | None) -> torch.device:
    """The device to draw on: the generator's, or that of ``like`` where there is no generator.

    Raises:
        InputError: ``generator`` is something else.
    """
    if generator is None:
        return like.device
    instance("generator", generator, torch.Generator, "a torch.Generator or None")
    return generator.device


def normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, shaped as ``like``."""
    device = device_of(like, generator)
    drawn = torch.randn(like.shape, dtype=like.dtype, device=device, generator=generator)
    return drawn.to(like.device)


def uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers above 0 and below 1, shaped as ``like``."""
    device = device_of(like, generator)
    drawn = torch.rand(like.shape, dtype=like.dtype, device=device, generator=generator)
    smallest = torch.finfo(like.dtype).tiny
    return drawn.clamp(min=smallest).to(like.device)


def log_gamma_draw(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """The logarithm of a Gamma(shape, 1) draw G(a), which does not underflow for small shapes a:

    G(a) = G(a + 1) · U^{1/a},    U uniform (Marsaglia & Tsang, 2000)
    """
    device = device_of(shape, generator)
    larger_shape = (shape + 1).to(device)
    draw = torch._standard_gamma(larger_shape, generator).to(shape.device)
    return draw.log() + uniform(shape, generator).log() / shape

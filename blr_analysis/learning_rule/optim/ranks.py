"""Average what was gathered over the processes of ``torch.distributed``."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blr_analysis.learning_rule.optim.gathered import Gathered


def is_distributed() -> bool:
    """Whether there is anyone to average with."""
    return dist.is_available() and dist.is_initialized()


def true_on_any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Elementwise "or" over the processes."""
    ours = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(ours, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in ours.tolist()]


def average_over_ranks(
    gathered: Gathered, params: Sequence[Tensor], methods: Sequence[str]
) -> None:
    """Mean gradient and curvature over the processes, settled ones, in place.

    ``params`` and ``methods`` are the same on every process. A parameter that has a gradient on
    some processes only counts as zero on the others.
    """
    flags = [param in gathered.estimates for param in params]
    work: list[Any] = []
    reduced: list[Tensor] = []
    for param, method, needed in zip(
        params, methods, true_on_any_rank(flags, params[0].device), strict=True
    ):
        if needed:
            estimate = gathered.estimates.get(param) or gathered.add_zeros(param, method)
            assert estimate.curvature is not None
            reduced += [estimate.grad, estimate.curvature]
    for tensor in reduced:
        work.append(dist.all_reduce(tensor, async_op=True))
    for handle in work:
        handle.wait()
    torch._foreach_div_(reduced, dist.get_world_size())

"""Matrix products in single precision, by oneDNN (which torch brings) where MKL's are slow.

MKL takes its fastest code on its maker's processors only: of an AMD EPYC (Zen 5) a core does 80 to
100 GFLOP/s with it and 200 with oneDNN. Both round to float32 alike.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

WORTH = 2**21  # multiplications, from which on a call of oneDNN pays
EACH = 2**22  # the same of each of many products, which MKL takes together


@cache
def slow_mkl() -> bool:
    """Whether float32 products go through MKL on another maker's processor."""
    file = Path("/proc/cpuinfo")
    named = file.read_text() if file.exists() else platform.processor()
    built = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not built or "AuthenticAMD" not in named:
        return False
    two = torch.ones(2, 2)
    try:  # an operator that torch keeps for itself: another version may do without
        return bool((_one_dnn(two, two, None) == 2).all())
    except (AttributeError, RuntimeError, TypeError):
        return False


def _one_dnn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    with torch.no_grad():
        return torch.ops.mkldnn._linear_pointwise(a, b.mT, bias, "none", [], "")


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b (+ bias ``[n]``), as ``torch.matmul`` and ``torch.addmm``.

    >>> product(torch.ones(2, 3), torch.ones(3, 4), torch.ones(4))[0]
    tensor([4., 4., 4., 4.])
    """
    one = b.ndim == 2 or (b.ndim == a.ndim == 3 and len(a) == len(b) == 1)
    if one and a.numel() * b.shape[-1] >= WORTH and _better(a, b):
        right = b if b.ndim == 2 else b[0]
        if not (right.is_contiguous() or right.mT.is_contiguous()):
            right = right.contiguous()  # oneDNN is slow on part of a matrix
        bias = None if bias is None else bias.contiguous()  # oneDNN would pass over its stride
        return _one_dnn(a, right, bias)
    return a @ b if bias is None else torch.addmm(bias, a, b)


def batch_product(a: Tensor, b: Tensor) -> Tensor:
    """a_i b_i ``[n, m, o]`` for every i, as ``torch.bmm``.

    >>> batch_product(torch.ones(2, 3, 4), torch.ones(2, 4, 5)).shape
    torch.Size([2, 3, 5])
    """
    if not len(a) or a[0].numel() * b.shape[-1] < EACH or not _better(a, b):
        return torch.bmm(a, b)
    if not (a[0].is_contiguous() and (b[0].is_contiguous() or b[0].mT.is_contiguous())):
        return torch.bmm(a, b)
    if len(a) == 1:
        return _one_dnn(a[0], b[0], None).unsqueeze(0)
    made = a.new_empty(*a.shape[:2], b.shape[-1])
    for left, right, into in zip(a, b, made, strict=True):
        into.copy_(_one_dnn(left, right, None))
    return made


def _better(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN may multiply these, and does so faster."""
    plain = a.dtype == b.dtype == torch.float32 and a.device.type == "cpu"
    return plain and not (a.requires_grad or b.requires_grad) and slow_mkl()

"""Matrix products in single precision, by oneDNN (which torch brings) where MKL's are slow.

MKL runs its fastest code only on the processors of its maker. One core of an AMD EPYC (Zen 5) does
80 to 100 GFLOP/s with MKL and 200 with oneDNN. Both round to float32 alike.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

MULTIPLICATIONS = 2**21  # of one product, from which on oneDNN is faster
MULTIPLICATIONS_IN_BATCH = 2**22  # of each product of a batch, which MKL does in one call


@cache
def slow_mkl() -> bool:
    """Whether float32 products go through MKL on another maker's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    processor = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or "AuthenticAMD" not in processor:
        return False
    ones = torch.ones(2, 2)
    try:  # the operator is torch's own and undocumented: another version may lack it
        return bool((_one_dnn(ones, ones, None) == 2).all())
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
    is_batch_of_one = a.ndim == b.ndim == 3 and len(a) == len(b) == 1
    is_one_product = b.ndim == 2 or is_batch_of_one
    is_large = is_one_product and a.numel() * b.shape[-1] >= MULTIPLICATIONS
    if is_large and _one_dnn_is_faster(a, b):
        right = b if b.ndim == 2 else b[0]
        if not _rows_or_columns_contiguous(right):
            right = right.contiguous()  # oneDNN is slow on part of a matrix
        if bias is not None:
            bias = bias.contiguous()  # oneDNN ignores its stride
        return _one_dnn(a, right, bias)
    if bias is None:
        return a @ b
    return torch.addmm(bias, a, b)


def batch_product(a: Tensor, b: Tensor) -> Tensor:
    """a_i b_i ``[n, m, o]`` for every i, as ``torch.bmm``.

    >>> batch_product(torch.ones(2, 3, 4), torch.ones(2, 4, 5)).shape
    torch.Size([2, 3, 5])
    """
    is_large = len(a) > 0 and a[0].numel() * b.shape[-1] >= MULTIPLICATIONS_IN_BATCH
    if not is_large or not _one_dnn_is_faster(a, b):
        return torch.bmm(a, b)
    if not (a[0].is_contiguous() and _rows_or_columns_contiguous(b[0])):
        return torch.bmm(a, b)
    if len(a) == 1:
        return _one_dnn(a[0], b[0], None).unsqueeze(0)
    products = a.new_empty(*a.shape[:2], b.shape[-1])
    for left, right, into in zip(a, b, products, strict=True):
        into.copy_(_one_dnn(left, right, None))
    return products


def _rows_or_columns_contiguous(matrix: Tensor) -> bool:
    return matrix.is_contiguous() or matrix.mT.is_contiguous()


def _one_dnn_is_faster(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN can multiply these two, and is faster than MKL on this processor."""
    is_float32_on_cpu = a.dtype == b.dtype == torch.float32 and a.device.type == "cpu"
    is_differentiated = a.requires_grad or b.requires_grad
    return is_float32_on_cpu and not is_differentiated and slow_mkl()

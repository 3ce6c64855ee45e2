"""Half precision: stored as it is, read and summed in float32. Quantised weights: their parts."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import register_pytree_node

HALF = (torch.bfloat16, torch.float16)


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in: float32 for half precision.

    >>> working(torch.bfloat16), working(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype


class Widened(UserDict[str, Tensor], dict[str, Tensor]):  # pyright: ignore
    """Tensors by name, stored in half precision and read in float32.

    Each float32 tensor is made when it is read, so there is no second copy of a model in memory.
    The class is a ``dict``, for code that asks for one.

    >>> weights = Widened({"w": torch.ones(2, dtype=torch.bfloat16)})
    >>> weights["w"].dtype, dict(weights)["w"].dtype, weights.data["w"].dtype
    (torch.float32, torch.float32, torch.bfloat16)
    >>> isinstance(weights, dict)
    True
    """

    def __getitem__(self, name: str) -> Tensor:
        value = self.data[name]
        return value.to(working(value.dtype))

    def __reduce__(self) -> tuple[Any, ...]:  # a form that torch.load(weights_only=True) reads
        return OrderedDict, (), None, None, iter(self.items())


register_pytree_node(  # for torch.func, to which it is a dict of float32
    Widened,
    lambda tensors: (list(tensors.values()), list(tensors)),
    lambda values, names: dict(zip(names, values, strict=True)),
)


def widened(tensors: Mapping[str, Tensor]) -> Any:
    """The tensors as a dict in which half precision is read as float32."""
    has_half = any(t.dtype in HALF for t in tensors.values())
    return Widened(tensors) if has_half else dict(tensors)


def narrow(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors in the dtypes in which they are stored; the reverse of :func:`widened`."""
    return tensors.data if isinstance(tensors, Widened) else tensors


def placed(tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Any:
    """The tensors on a device, read in a dtype.

    For float32, half precision stays as it is stored and is :func:`widened`.
    """
    stored_tensors = narrow(tensors)
    if dtype != torch.float32:
        return {name: tensor.to(device, dtype) for name, tensor in stored_tensors.items()}
    on_device = {
        name: tensor.to(device, tensor.dtype if tensor.dtype in HALF else dtype)
        for name, tensor in stored_tensors.items()
    }
    return widened(on_device)


def stored(value: Tensor, parameter: Tensor) -> Tensor:
    """The value in the parameter's dtype if that is half precision, else in a full one."""
    if parameter.dtype in HALF:
        return value.to(parameter.dtype)
    return value.to(working(value.dtype))


def shared(value: Tensor, parameter: Tensor) -> Tensor:
    """The :func:`stored` value, or the parameter itself if both are equal: one tensor in memory."""
    converted = stored(value, parameter)
    if converted is value or converted.device != parameter.device:
        return converted
    return parameter.detach() if torch.equal(converted, parameter) else converted


def stored_parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor is stored as: its codes and scales if it is quantised, this
    process's piece if it is divided among processes, else itself.

    >>> [part.shape for part in stored_parts(torch.zeros(2, 3))]
    [torch.Size([2, 3])]
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    for part in parts:
        if isinstance(part, Tensor):  # a divided tensor names its mesh, too
            yield from stored_parts(part)

"""Half precision: held as it is, read and summed in float32."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

HALF = (torch.bfloat16, torch.float16)


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in: float32 for half precision.

    >>> working(torch.bfloat16), working(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype


class Widened(UserDict[str, Tensor], dict[str, Tensor]):  # pyright: ignore
    """Tensors by name that are held in half precision and read in float32, each made when it is
    asked for: no second copy of a model is held. A ``dict``, for those who ask for one.

    >>> weights = Widened({"w": torch.ones(2, dtype=torch.bfloat16)})
    >>> weights["w"].dtype, dict(weights)["w"].dtype, weights.data["w"].dtype
    (torch.float32, torch.float32, torch.bfloat16)
    >>> isinstance(weights, dict)
    True
    """

    def __getitem__(self, name: str) -> Tensor:
        held = self.data[name]
        return held.to(working(held.dtype))

    def __reduce__(self) -> tuple[Any, ...]:  # which torch.load(weights_only=True) reads
        return OrderedDict, (), None, None, iter(self.items())


register_pytree_node(  # for torch.func, to which it is a dict of float32
    Widened,
    lambda held: (list(held.values()), list(held)),
    lambda values, names: dict(zip(names, values, strict=True)),
)


def widened(tensors: Mapping[str, Tensor]) -> Any:
    """Those in half precision read in float32."""
    half = any(t.dtype in HALF for t in tensors.values())
    return Widened(tensors) if half else dict(tensors)


def narrow(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """As they are held."""
    return tensors.data if isinstance(tensors, Widened) else tensors


def placed(tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Any:
    """On a device, read in a dtype: :func:`widened` where float32 is asked for."""
    kept = HALF if dtype == torch.float32 else ()
    held = narrow(tensors).items()
    moved = {n: t.to(device, t.dtype if t.dtype in kept else dtype) for n, t in held}
    return widened(moved) if kept else moved


def stored(value: Tensor, parameter: Tensor) -> Tensor:
    """In half precision where the parameter is, and nowhere else."""
    return value.to(parameter.dtype if parameter.dtype in HALF else working(value.dtype))


def shared(value: Tensor, parameter: Tensor) -> Tensor:
    """The same; the parameter itself where it is equal, which holds nothing twice."""
    held = stored(value, parameter)
    alike = held is not value and held.device == parameter.device
    return parameter.detach() if alike and torch.equal(held, parameter) else held

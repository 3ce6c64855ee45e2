"""Half precision: held as it is, read and summed in float32."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from copy import deepcopy
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


class Widened(MutableMapping[str, Tensor], dict[str, Tensor]):  # pyright: ignore
    """Tensors by name that are held in half precision and read in float32, each made when it is
    asked for: no second copy of a model is held. A ``dict``, for those who ask for one.

    >>> weights = Widened({"w": torch.ones(2, dtype=torch.bfloat16)})
    >>> weights["w"].dtype, dict(weights)["w"].dtype, weights.held["w"].dtype
    (torch.float32, torch.float32, torch.bfloat16)
    """

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        dict.__init__(self, held)

    @property
    def held(self) -> dict[str, Tensor]:
        """As they are."""
        return {name: dict.__getitem__(self, name) for name in self}

    def __getitem__(self, name: str) -> Tensor:
        held = dict.__getitem__(self, name)
        return held.to(working(held.dtype))

    def __iter__(self) -> Iterator[str]:  # what makes dict(self) and {**self} ask for the items
        return dict.__iter__(self)

    __setitem__, __delitem__ = dict.__setitem__, dict.__delitem__
    __len__, __contains__ = dict.__len__, dict.__contains__

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __eq__(self, other: object) -> bool:
        return self is other or dict(self) == other

    def copy(self) -> dict[str, Tensor]:
        return dict(self)

    def __copy__(self) -> Widened:
        return Widened(self.held)

    def __deepcopy__(self, memo: dict[int, Any]) -> Widened:
        return Widened(deepcopy(self.held, memo))

    def __reduce__(self) -> tuple[Any, ...]:  # which torch.load(weights_only=True) reads
        return OrderedDict, (), None, None, iter(self.items())

    def __repr__(self) -> str:
        return repr(dict(self))


register_pytree_node(  # for torch.func, to which it is a dict of float32
    Widened,
    lambda held: (list(held.values()), list(held)),
    lambda values, names: dict(zip(names, values, strict=True)),
)


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those in half precision read in float32."""
    half = any(t.dtype in HALF for t in tensors.values())
    return Widened(tensors) if half else dict(tensors)


def narrow(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """As they are held."""
    return tensors.held if isinstance(tensors, Widened) else tensors


def placed(tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Any:
    """On a device, read in a dtype: :func:`widened` where float32 is asked for."""
    held = narrow(tensors)
    if dtype == torch.float32:
        wide = {n: t.to(device, t.dtype if t.dtype in HALF else dtype) for n, t in held.items()}
        return widened(wide)
    return {n: t.to(device, dtype) for n, t in held.items()}


def stored(value: Tensor, parameter: Tensor) -> Tensor:
    """In half precision where the parameter is, and nowhere else."""
    half = parameter.dtype in HALF
    return value.to(parameter.dtype if half else working(value.dtype))


def shared(value: Tensor, parameter: Tensor) -> Tensor:
    """The same; the parameter itself where it is equal, which holds nothing twice."""
    held = stored(value, parameter)
    alike = held is not value and held.device == parameter.device
    return parameter.detach() if alike and torch.equal(held, parameter) else held

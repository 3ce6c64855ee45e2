"""Numbers that change when inputs change, or the tensors and settings of a module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

BYTES_PER_WORD = 8
SHIFT = 29  # bits, about half of a word: it mixes signs and exponents into the lower bits
ATTRIBUTES_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
CONSTANTS = (type(None), bool, int, float, str)  # values that are compared as they are


def fingerprints(inputs: Tensor) -> list[int]:
    """A whole number for each row of ``inputs`` ``[B, ...]``.

        Σ_j c_j (w_j xor ⌊w_j / 2²⁹⌋)   modulo 2⁶⁴,

    w_j are the row's words of 64 bits and c_j fixed odd numbers. The sum is exact, so that it does
    not depend on the other rows. Without the xor, two signs that change together would cancel.
    """
    if not inputs.numel():
        return [0] * len(inputs)
    rows = inputs.detach().reshape(len(inputs), prod(inputs.shape[1:])).contiguous()
    octets = rows.view(torch.uint8)
    missing = -octets.shape[1] % BYTES_PER_WORD
    if missing:
        octets = nn.functional.pad(octets, (0, missing))
    elif octets.storage_offset() % BYTES_PER_WORD:
        octets = octets.clone()
    words = octets.reshape(-1).view(torch.int64).view(len(rows), -1)
    mixed = words >> SHIFT
    mixed ^= words
    mixed *= _odd_numbers(words.shape[1]).to(words)
    return mixed.sum(1).tolist()


@lru_cache(maxsize=16)
def _odd_numbers(n: int) -> Tensor:
    """``[n]`` fixed random odd integers."""
    generator = torch.Generator().manual_seed(n)
    return torch.randint(-(2**62), 2**62, (n,), generator=generator) | 1


def state_of(modules: Sequence[nn.Module]) -> Any:
    """A value that differs when these modules, their tensors or their settings do."""
    settings = [(name, leaf) for module in modules for name, leaf in _settings(module)]
    tensors = [
        tensor
        for module in modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    tensors += [leaf for _, leaf in settings if isinstance(leaf, Tensor)]
    identities = tuple((id(t), t.data_ptr(), t._version, t.dtype) for t in tensors)
    sketches = tuple(_sketch(t.detach()) for t in tensors if t.numel())
    values = tuple(
        (name, type(leaf), leaf if isinstance(leaf, CONSTANTS) else id(leaf))
        for name, leaf in settings
    )
    return tuple(map(id, modules)), identities, sketches, values


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that not every module has, by name; of lists and dicts, their
    entries."""
    for name, value in vars(module).items():
        if name in ATTRIBUTES_OF_EVERY_MODULE:
            continue
        if isinstance(value, CONSTANTS):
            yield name, value
        else:
            for leaf in tree_leaves(value):
                yield name, leaf


def _sketch(tensor: Tensor) -> float:
    """A number that changes with a tensor's entries, their signs and their order."""
    if not tensor.is_floating_point():
        return float(fingerprints(tensor.unsqueeze(0))[0])
    if tensor.ndim < 2:
        entries = tensor.reshape(-1)
    else:
        rows = tensor.flatten(1)
        entries = rows @ _direction(rows.shape[1]).to(rows)
    return float(entries @ _direction(len(entries)).to(entries))


@lru_cache(maxsize=256)
def _direction(n: int) -> Tensor:
    """``[n]`` fixed random numbers between 0.5 and 1.5."""
    return torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.5

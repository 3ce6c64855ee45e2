"""A user's module: what wraps it, where it is, and how it runs at other weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint

from blr_analysis.checks import instance
from blr_analysis.errors import DeviceError, ModelError, told_as
from blr_analysis.half import stored
from blr_analysis.ranks import divided, is_sharded


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    inside = getattr(model, "_orig_mod", None)
    return unwrapped(inside) if isinstance(inside, nn.Module) else model


def checked_model(model: Any) -> nn.Module:
    """The model, or the one inside a compiled or data-parallel model.

    Raises:
        InputError: no module.
        ModelError: lazy parameters, or a model that is divided among processes.
    """
    instance("model", model, nn.Module, "a torch.nn.Module")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ModelError(f"parameter {lazy[0]!r} is lazy, without a shape; run a batch first")
    inside = unwrapped(model)
    if divided(inside) or any(map(is_sharded, inside.parameters())):
        raise ModelError("the model is sharded; load its full state dict into a plain one")
    return inside


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the first parameter of real numbers; float32 without any."""
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(dtypes, torch.float32)


def find_device(device: str | torch.device) -> torch.device:
    """The device of this name.

    Raises:
        DeviceError: an unknown name, or this machine, or this build of torch, does not have it.
    """
    if str(device).split(":")[0] in ("gpu", "nvidia"):
        raise DeviceError(f'device {device!r} cannot be used here: write "cuda"; "cpu" can')
    with told_as(DeviceError, f"device {device!r} cannot be used here", '"cpu" can'):
        return torch.empty(0, device=device).device  # "cuda" → "cuda:0"


def device_for(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """The device of this name, on which the model must be; None: the device of the model.

    Raises:
        DeviceError: no such device, or a parameter on another one.
    """
    if device is None:
        first = next(model.parameters(), None)
        return first.device if first is not None else torch.device("cpu")
    target = find_device(device)
    for name, parameter in model.named_parameters():
        if parameter.device.type != target.type:
            raise DeviceError(f"parameter {name!r} is on another device; use model.to({device!r})")
    return target


class Place(NamedTuple):
    """A place below a module that holds a parameter or a buffer.

    Attributes:
        tensors: the dictionary of its module that holds it.
        attribute: its key there.
        tensor: the parameter or buffer.
        name: its name in the whole model.
    """

    tensors: dict[str, Any]
    attribute: str
    tensor: Tensor
    name: str


def parameter_places(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameter at every place below a module, by the place's name; each place stands once.

    ``functional_call(..., tie_weights=False)`` must be given these. A tied tensor has several
    places. A module that is registered twice has its places once only, because ``functional_call``
    would swap them twice and give back the wrong tensors.
    """
    return {
        place.name: place.tensor
        for place in _places(module)
        if isinstance(place.tensor, nn.Parameter)
    }


def _places(module: nn.Module) -> list[Place]:
    """Every place below a module that holds a parameter or a buffer."""
    places = []
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for tensors in (part._parameters, part._buffers):
            for attribute, tensor in tensors.items():
                if tensor is not None:
                    places.append(Place(tensors, attribute, tensor, prefix + attribute))
    return places


class Entry(NamedTuple):
    """An entry of a dictionary, and the value that it has while a model runs."""

    dictionary: dict[str, Any]
    key: str
    value: Any


@contextmanager
def running_at(model: nn.Module, params: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model has these parameters and buffers, and it can be differentiated.

    Its other tensors are detached. Three things are set so that a backward pass is right:

    * Non-reentrant checkpoints run once. They would run again in the backward pass, when the
      weights are the model's own again.
    * Recurrent layers run by torch's kernels, because cuDNN's have no backward in eval mode.
    * Gradients of embeddings are dense.
    """

    def run_once(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    layers = list(model.modules())
    entries = [
        Entry(checkpoint.__dict__, "_checkpoint_without_reentrant_generator", run_once),
        *_dense_embeddings(layers),
        *_tensors_at(model, params),
    ]
    values_before = [entry.dictionary[entry.key] for entry in entries]
    cudnn: Any = torch.backends.cudnn
    enabled_before = cudnn.enabled
    is_recurrent = any(isinstance(layer, nn.RNNBase) for layer in layers)
    try:
        cudnn.enabled = enabled_before and not is_recurrent
        for entry in entries:
            entry.dictionary[entry.key] = entry.value
        yield
    finally:
        cudnn.enabled = enabled_before
        for entry, value in zip(entries, values_before, strict=True):
            entry.dictionary[entry.key] = value


def _dense_embeddings(layers: list[nn.Module]) -> list[Entry]:
    """The settings at which gradients of embeddings are dense."""
    embeddings = [layer for layer in layers if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    return [Entry(vars(embedding), "sparse", False) for embedding in embeddings]


def _tensors_at(model: nn.Module, params: Mapping[str, Tensor]) -> list[Entry]:
    """The tensor for every place of a model; a tied one is the same at all of its places."""
    entries: list[Entry] = []
    values: dict[int, Tensor] = {}
    for place in _places(model):
        tensor = place.tensor
        if id(tensor) not in values:  # the first place of a tied tensor is its name
            values[id(tensor)] = tensor.detach()
            if place.name in params:
                values[id(tensor)] = stored(params[place.name], tensor).to(tensor.device)
        entries.append(Entry(place.tensors, place.attribute, values[id(tensor)]))
    return entries

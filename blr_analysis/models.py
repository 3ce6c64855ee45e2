"""A user's module: what wraps it, where it is, and how it runs at other weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint

from blr_analysis.checks import instance
from blr_analysis.errors import DeviceError, ModelError, told_as
from blr_analysis.half import stored
from blr_analysis.ranks import check_divided, divided, is_sharded
from blr_analysis.sharded import gathering

# By the name of a device, whether this machine has it.
DEVICES = {
    "cpu": lambda: True,
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
}
CALLED_CUDA = ("gpu", "nvidia")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    inside = getattr(model, "_orig_mod", None)
    return unwrapped(inside) if isinstance(inside, nn.Module) else model


def checked_model(model: Any) -> nn.Module:
    """The model itself, without a wrapper of ``torch.compile`` or of data parallelism.

    Raises:
        InputError: the model is no module.
        ModelError: the model has lazy parameters, or is divided among processes by something else
            than ``fully_shard``.
    """
    instance("model", model, nn.Module, "a torch.nn.Module")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ModelError(f"parameter {lazy[0]!r} is lazy, without a shape; run a batch first")
    inside = unwrapped(model)
    check_divided(inside)
    return inside


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, with its weights.

    Raises:
        ModelError: the model cannot be copied.
    """
    if divided(model):
        raise ModelError(
            "a model divided among processes cannot be copied or trained again; load its full "
            "state dict into a plain model"
        )
    with told_as(ModelError, "the model cannot be copied", "copy.deepcopy must take it"):
        return copy.deepcopy(model)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating-point parameter; float32 if there is none."""
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(dtypes, torch.float32)


def n_parameters(model: nn.Module) -> int:
    """The number of parameters, frozen or not; weights in 4 bits count as what they stand for."""
    total = 0
    for parameter in model.parameters():
        packed = getattr(parameter, "quant_state", None)  # of bitsandbytes
        total += parameter.numel() if packed is None else packed.shape.numel()
    return total


def find_device(device: str | torch.device) -> torch.device:
    """The device of this name.

    Raises:
        DeviceError: the name is unknown, or the machine or this build of torch has no such device.
    """
    address = f"cuda:{device}" if isinstance(device, int) else str(device)
    kind = address.lower().split(":")[0]
    usable = [name for name, is_here in DEVICES.items() if is_here()]
    quoted_names = [f'"{name}"' for name in usable]
    remedy = f"{' and '.join(quoted_names)} can"
    if kind in CALLED_CUDA:
        remedy = f'write "cuda"; {remedy}'
    refusal = f"device {device!r} cannot be used here"
    is_absent = kind in DEVICES and kind not in usable
    if is_absent or not _is_known_to_torch(kind):
        raise DeviceError(f"{refusal}: {remedy}")
    with told_as(DeviceError, refusal, remedy):
        return torch.empty(0, device=device).device  # "cuda" → "cuda:0"


def _is_known_to_torch(kind: str) -> bool:
    """Whether torch, with its extensions, has this kind of device, on whatever machine."""
    try:
        torch.device(kind)
    except RuntimeError:
        return False
    return True


def device_for(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """The device on which the model is.

    Args:
        device: the name of a device that the model must be on; None: any.

    Raises:
        DeviceError: there is no such device, or a parameter is on another one.
    """
    if device is None:
        devices = [p.device for p in model.parameters() if not p.is_meta]  # not offloaded
        return devices[0] if devices else torch.device("cpu")
    target = find_device(device)
    for name, parameter in model.named_parameters():
        if parameter.device.type != target.type:
            raise DeviceError(f"parameter {name!r} is on another device; use model.to({device!r})")
    return target


class Place(NamedTuple):
    """A place in a model that holds a parameter or a buffer.

    Attributes:
        tensors: the dictionary of parameters (or buffers) of a module in the model.
        attribute: the key of the tensor in this dictionary.
        tensor: the parameter or buffer.
        name: the name of the place in the whole model.
    """

    tensors: dict[str, Any]
    attribute: str
    tensor: Tensor
    name: str


def parameter_places(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameter at every place in a module, by the name of the place.

    These are the values of :func:`called_with`. A tied tensor has
    several places. The places of a module that is registered twice are listed once, because
    ``functional_call`` would swap them twice and give back the wrong tensors.
    """
    return {
        place.name: place.tensor
        for place in _places(module)
        if isinstance(place.tensor, nn.Parameter)
    }


def _places(module: nn.Module) -> list[Place]:
    """Every place in a module that holds a parameter or a buffer."""
    places = []
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for tensors in (part._parameters, part._buffers):
            for attribute, tensor in tensors.items():
                if tensor is not None:
                    places.append(Place(tensors, attribute, tensor, prefix + attribute))
    return places


def called_with(
    module: nn.Module, values: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What the module returns with these parameters, one at every place: :func:`parameter_places`.

    The hooks of ``fully_shard`` do not run.
    """
    with gathering(divided(module)):
        return functional_call(module, dict(values), args, kwargs, tie_weights=False)


class Entry(NamedTuple):
    """An entry of a dictionary, and its value while a model runs."""

    dictionary: dict[str, Any]
    key: str
    value: Any


@contextmanager
def running_at(model: nn.Module, params: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model has these parameters and buffers, and it can be differentiated.

    The model's other tensors are detached. Those that are divided among processes are whole while
    their module runs. Three settings make a backward pass right:

    * Non-reentrant checkpoints run once. They would run again in the backward pass, when the model
      has its own weights again.
    * Recurrent layers run by torch's kernels, because cuDNN's have no backward in eval mode.
    * Gradients of embeddings are dense.

    At the end everything is as it was.
    """

    def run_once(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    divided_modules = divided(model)
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
        with gathering(divided_modules):
            yield
    finally:
        cudnn.enabled = enabled_before
        for entry, value in zip(entries, values_before, strict=True):
            entry.dictionary[entry.key] = value


def _dense_embeddings(layers: list[nn.Module]) -> list[Entry]:
    """The settings that make gradients of embeddings dense."""
    embeddings = [layer for layer in layers if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    return [Entry(vars(embedding), "sparse", False) for embedding in embeddings]


def _tensors_at(model: nn.Module, params: Mapping[str, Tensor]) -> list[Entry]:
    """The tensor for every place in a model: the parameter of this name, or the detached tensor.

    A tied tensor has the name of its first place, and all of its places get the same value.
    """
    places = _places(model)
    first_places = {id(place.tensor): place for place in reversed(places)}
    values = {
        identity: _value_at(place, params.get(place.name))
        for identity, place in first_places.items()
    }
    return [Entry(place.tensors, place.attribute, values[id(place.tensor)]) for place in places]


def _value_at(place: Place, value: Tensor | None) -> Tensor:
    """The tensor for a place: this value, if there is one, else the model's own.

    The model's own is detached. What is frozen or divided stays the object that it is, whose class
    and attributes a layer may need.
    """
    tensor = place.tensor
    if value is tensor:
        return tensor
    if value is not None:
        return stored(value, tensor).to(tensor.device)
    needs_detaching = tensor.requires_grad and not is_sharded(tensor)
    return tensor.detach() if needs_detaching else tensor

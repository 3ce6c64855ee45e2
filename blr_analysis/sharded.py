"""Models whose weights ``fully_shard`` has divided among processes, made whole."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from blr_analysis import ranks
from blr_analysis.errors import ModelError


def is_sharded(tensor: Any) -> bool:
    """Whether this process holds a piece of it alone."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Any:
    """All of a tensor that several processes hold in pieces; what is no such tensor as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def held_as(tensor: Tensor, held: Any) -> Tensor:
    """The tensor in the pieces that another is in; all processes have the same."""
    if not is_sharded(held):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    moved = tensor.to(held.device, held.dtype)
    return distribute_tensor(moved, held.device_mesh, held.placements)


def divided(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` divides, their weights in pieces: after a forward pass some
    may still be whole."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody loaded it, there are none
    modules: list[Any] = [m for m in model.modules() if fsdp and isinstance(m, fsdp.FSDPModule)]
    for module in modules:
        module.reshard()
    return modules


def whole_model(model: nn.Module) -> nn.Module:
    """A copy of a sharded model as it was before ``fully_shard`` or ``parallelize_module``, with
    the weights that it has now, all of them on every process; any other model as it is.

    Raises:
        ModelError: on one process alone, or a model that cannot be copied.
    """
    pieces = divided(model)
    if not pieces and not any(map(is_sharded, model.parameters())):
        return model
    if ranks.count() < dist.get_world_size():
        raise ModelError("a sharded model is whole on no process alone: make its Task on all")
    bare: dict[nn.Module, nn.Module] = {}
    memo: dict[int, Any] = {id(p): _plain(p) for p in model.parameters()}
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            memo[id(hooks)] = OrderedDict((k, h) for k, h in hooks.items() if not _gathers(h))
    for module in pieces:  # which refuse to be copied as such
        memo[id(module)] = bare[module] = object.__new__(type(module).__mro__[2])
    try:
        for module, plain in bare.items():
            state = {k: v for k, v in vars(module).items() if not k.startswith("__composable_api")}
            plain.__dict__.update(copy.deepcopy(state, memo))
        return copy.deepcopy(model, memo)
    except Exception as error:  # the user's own code
        raise ModelError(f"the sharded model cannot be copied: {error}") from error


def _plain(p: nn.Parameter) -> nn.Parameter:
    held: Tensor = whole(p.detach())
    return nn.Parameter(held.clone() if held.data_ptr() == p.data_ptr() else held, p.requires_grad)


def _gathers(hook: Any) -> bool:
    """Whether torch put this hook there, to make weights whole and to take them apart again."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")

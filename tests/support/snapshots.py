"""What a call leaves and takes: a model as it was to the bit, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that an analysis must leave alone."""
    state = {f"value of {n}": t.detach().clone() for n, t in model.state_dict().items()}
    for name, p in model.named_parameters(remove_duplicate=False):
        state[f"gradient of {name}"] = None if p.grad is None else p.grad.clone()
        state[f"requires_grad of {name}"] = p.requires_grad
        state[f"identity of {name}"] = id(p)
    for name, module in model.named_modules():
        state[f"mode of {name!r}"] = module.training
        state[f"hooks of {name!r}"] = [len(getattr(module, h)) for h in HOOKS]
    return state


def same(a: Any, b: Any) -> bool:
    """Equal to the bit; NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy(), equal_nan=True)
    return type(a) is type(b) and a == b


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Fail unless the model leaves the block as it came in."""
    before = snapshot(model)
    yield
    after = snapshot(model)
    changed = [k for k in before if k not in after or not same(before[k], after[k])]
    assert not changed and list(before) == list(after), f"the model was changed: {changed}"


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that is held during one call above what was held before; the same on every run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    bytes_now = highest = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            bytes_now += event.nbytes()
            highest = max(highest, bytes_now)
    assert highest > 0, "this build of torch records no allocations"
    return highest

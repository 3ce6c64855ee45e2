"""torch's optimizer, without an import of torch's compiler that nobody asked for.

torch marks some methods of its optimizers, so that ``torch.compile`` leaves them as they are. The
first call of a marked method imports the compiler, which takes two seconds of a processor, and
three times as long where Python has not stored its bytecode yet. As long as nobody else has
imported it, nothing can be compiled, and the methods below are called without their marks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

COMPILER = "torch._dynamo"


class PlainOptimizer(torch.optim.Optimizer):
    """``torch.optim.Optimizer``, whose methods import no compiler."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _without_mark(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        _without_mark(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return _without_mark(torch.optim.Optimizer.state_dict)(self)

    def load_state_dict(self, state_dict: Any) -> None:
        _without_mark(torch.optim.Optimizer.load_state_dict)(self, state_dict)


def _without_mark(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method that torch has marked; with its mark where the compiler is there."""
    if COMPILER in sys.modules:
        return method
    return getattr(method, "__wrapped__", method)

"""Optimizers of the rule do not import torch's compiler, which takes seconds."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import blr_analysis as blr
from blr_analysis.learning_rule.optim.plain import COMPILER

MARKED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


class NoCompiler:
    """A finder of modules that refuses the compiler."""

    def find_spec(self, name: str, *_: Any) -> None:
        assert name != COMPILER


def test_a_training_imports_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[:2] == COMPILER.split(".")]:
        monkeypatch.delitem(sys.modules, module)
    for name in MARKED:  # what a call of torch's method remembers of the compiler
        method: Any = getattr(torch.optim.Optimizer, name)
        monkeypatch.delattr(method.__wrapped__, "__dynamo_disable", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoCompiler(), *sys.meta_path])
    with pytest.raises(AssertionError):  # torch's own do
        torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    model = torch.nn.Linear(2, 1)
    optimizer = blr.IVON(model.parameters(), lr=0.1, ess=10.0)
    optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    with optimizer.sampled_params(train=True):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())

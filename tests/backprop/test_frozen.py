"""What is not asked about costs nothing."""

from __future__ import annotations

import pytest
import torch
from parts import normal
from readings import example
from torch import Tensor, nn

from blr_analysis.backprop.engine import Chunking, chunks
from blr_analysis.backprop.plan import plan_for
from blr_analysis.task import Task


class Counted(nn.Module):
    """A linear layer that counts its backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if x.requires_grad:
            x.register_hook(self._count)
        return x

    def _count(self, grad: Tensor) -> None:
        self.passes += 1


def test_frozen_layers_cost_nothing() -> None:
    """No hook on them, and the backward pass stops at the first trainable layer."""
    frozen, live = Counted(), Counted()
    model = nn.Sequential(frozen, nn.Tanh(), live, nn.Tanh(), Counted()).double()
    frozen.requires_grad_(False)
    task = Task(model, (normal(4, 3), torch.arange(4) % 3))
    seen = []
    register = nn.Module.register_forward_hook

    def spy(self, *args, **kwargs):
        seen.append(self)
        return register(self, *args, **kwargs)

    params = task.parameters()
    plan_for(task, params)
    frozen.passes = live.passes = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "register_forward_hook", spy)
        for chunk in chunks(task, params, Chunking(chunk_size=4, progress=False)):
            chunk.jacobian_terms()
    assert frozen.inner not in seen
    assert live.inner in seen
    assert frozen.passes == 0
    assert live.passes == 3  # one pass for each output, none twice


def test_no_weight_gradient_is_ever_formed() -> None:
    task, _, _ = example("images")
    for chunk in chunks(task, task.parameters(), Chunking(chunk_size=3, progress=False)):
        leaves, waiting = set(), [chunk._recording.outputs.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in leaves:
                leaves.add(node)
                waiting += [parent for parent, _ in node.next_functions]
        kept = [n.variable for n in leaves if n.name().endswith("AccumulateGrad")]
        assert kept
        shapes = {tuple(p.shape) for p in task.model.parameters()}
        assert not any(tuple(v.shape) in shapes for v in kept)

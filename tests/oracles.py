"""Brute force that the tests trust: dense Jacobians, dense Gaussians, exact retraining."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from blr_analysis.task import Task


def dense_jacobian(task: Task, params: dict[str, Tensor]) -> Tensor:
    """Every example's Jacobian by plain autograd, one example at a time, ``[N, C, P]``."""
    training = {m: m.training for m in task.model.modules()}
    task.model.eval()
    rows = []
    for i in range(task.n_data):
        leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
        batch = task.fetch(torch.tensor([i]))

        def call(batch=batch, leaves=leaves):
            class Run(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.model = task.model

                def forward(self, b):
                    return task.forward(self.model, b)

            return functional_call(Run(), {f"model.{n}": v for n, v in leaves.items()}, (batch,))

        outputs = call()[0]
        outputs = getattr(outputs, "logits", outputs).reshape(-1)
        rows.append(
            torch.stack(
                [
                    torch.cat(
                        [
                            g.flatten()
                            for g in torch.autograd.grad(
                                f,
                                list(leaves.values()),
                                retain_graph=True,
                                allow_unused=True,
                                materialize_grads=True,
                            )
                        ]
                    )
                    for f in outputs
                ]
            )
        )
    for module, mode in training.items():
        module.training = mode
    return torch.stack(rows)


def flatten(tree: dict[str, Tensor]) -> Tensor:
    """One vector from a dict of parameter-shaped tensors, in the dict's order."""
    return torch.cat([v.flatten() for v in tree.values()])


def unflatten(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`flatten`; leading dimensions of ``vector`` are kept."""
    parts = vector.split([v.numel() for v in like.values()], dim=-1)
    lead = vector.shape[:-1]
    return {
        n: part.reshape(*lead, *v.shape) for (n, v), part in zip(like.items(), parts, strict=True)
    }

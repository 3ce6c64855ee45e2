"""Brute force that the tests trust: dense Jacobians, dense Gaussians, exact retraining."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd

from blr_analysis.posterior import Posterior, fit_laplace
from blr_analysis.posterior.minimum import Stationarity
from blr_analysis.task import Task


def dense_jacobian(task: Task, params: Mapping[str, Tensor]) -> Tensor:
    """Every example's Jacobian by plain autograd, one example at a time, ``[N, C, P]``; the model
    itself holds the values meanwhile."""
    own = dict(task.model.named_parameters())
    actual = []
    before = {n: own[n].data for n in params}
    with torch.inference_mode(False), task.evaluation(), torch.enable_grad():
        for n, p in params.items():
            own[n].data = p.detach().clone()
        for i in range(task.n_data):
            outputs = task.forward(task.model, copy.deepcopy(task.fetch(torch.tensor([i]))))[0]
            outputs = getattr(outputs, "logits", outputs).reshape(-1)
            actual.append(torch.stack([_gradient(f, {n: own[n] for n in params}) for f in outputs]))
    for n, data in before.items():
        own[n].data = data
    return torch.stack(actual)


def _gradient(output: Tensor, leaves: Mapping[str, Tensor]) -> Tensor:
    how: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(output, list(leaves.values()), **how)
    return torch.cat([g.to_dense().flatten() for g in grads])


def outputs_of(task: Task, params: Mapping[str, Tensor] | None = None) -> Tensor:
    """The model's outputs on the whole task, ``[N, C]``."""
    with torch.no_grad(), task.evaluation():
        values = task.parameters() if params is None else params
        return torch.cat([task.run(batch, values)[0] for _, batch in task.batches()])


def dense_ggn(task: Task, jacobian: Tensor) -> Tensor:
    """Σ_i J_iᵀ Λ_i J_i, ``[P, P]``, with Λ by automatic differentiation of the loss."""
    total = jacobian.new_zeros(jacobian.shape[-1], jacobian.shape[-1])
    for i, f in enumerate(outputs_of(task)):
        _, target = task.run(task.fetch(torch.tensor([i])), task.parameters())
        one = task.likelihood.at(torch.tensor([i]))

        def loss(output: Tensor, target: Tensor = target, one: Any = one) -> Tensor:
            return one.nll(output.unsqueeze(0), target).sum()

        total = total + jacobian[i].mT @ torch.func.hessian(loss)(f) @ jacobian[i]
    return total


def dense_gram(task: Task, params: Mapping[str, Tensor]) -> Tensor:
    """What input moments are, ``[P, P]``: the Jacobians of each layer's own outputs with respect to
    its own weights, by autograd, one example at a time; N for parameters of no such layer."""
    names = {id(p): n for n, p in task.model.named_parameters()}
    place = unflatten(torch.arange(sum(p.numel() for p in params.values())), params)
    total = torch.zeros(2 * flatten(place).shape, dtype=torch.float64)
    kinds = nn.Linear | nn.Embedding | nn.MultiheadAttention | _ConvNd
    layers = {
        m: {k: names[id(p)] for k, p in m._parameters.items() if p is not None}
        for m in task.model.modules()
        if isinstance(m, kinds) or type(m).__name__ == "Conv1D"
    }
    copied = {m: copy.deepcopy(m) for m in layers if not isinstance(m, nn.MultiheadAttention)}
    matrices = {own["weight"] for m, own in layers.items() if isinstance(m, nn.Linear)}

    def seen(module: nn.Module, args: tuple[Tensor, ...], kwargs: object) -> None:
        own = layers[module]
        if isinstance(module, nn.Embedding) and own["weight"] in matrices:
            return

        def outputs(held: dict[str, Tensor]) -> Tensor:
            if isinstance(module, nn.MultiheadAttention):
                return nn.functional.linear(args[0], held["in_proj_weight"], held["in_proj_bias"])
            return functional_call(copied[module], held, args)

        held = {k: params[n] for k, n in own.items()}
        jacobian = torch.func.jacrev(outputs)(held)
        j = torch.cat([x.reshape(-1, held[k].numel()) for k, x in jacobian.items()], 1).detach()
        where = torch.cat([place[n].flatten() for n in own.values()])
        fired.update(own.values())
        total[where.unsqueeze(1), where] += j.mT @ j

    fired: set[str] = set()
    handles = [m.register_forward_pre_hook(seen, with_kwargs=True) for m in layers]
    for i in range(task.n_data):
        with task.evaluation():
            task.run(task.fetch(torch.tensor([i])), dict(params))
    for handle in handles:
        handle.remove()
    for name in params.keys() - fired:
        total[place[name], place[name]] = task.n_data
    return total


def flatten(tree: dict[str, Tensor]) -> Tensor:
    """One vector from a dict of parameter-shaped tensors, in the dict's order."""
    return torch.cat([v.flatten() for v in tree.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`flatten`; leading dimensions of ``vector`` are kept."""
    parts = vector.split([v.numel() for v in like.values()], dim=-1)
    lead = vector.shape[:-1]
    return {
        n: part.reshape((*lead, *v.shape)) for (n, v), part in zip(like.items(), parts, strict=True)
    }


def rows(tree: Mapping[str, Tensor]) -> Tensor:
    """Vectors with one leading dimension, flattened: ``[n, P]``."""
    return torch.cat([v.reshape(len(v), -1) for v in tree.values()], dim=1)


def dense_precision(q: Posterior) -> Tensor:
    """S in the order of the posterior's mean, from its products with unit vectors."""
    eye = torch.eye(sum(m.numel() for m in q.mean.values()), dtype=torch.float64)
    products = q.form.times(unflatten(eye, q.mean))
    return rows({n: products[n] for n in q.mean})


def relative(ours: Tensor, truth: Tensor) -> float:
    """‖ours − truth‖ / ‖truth‖ (the plain norm of ``ours`` where the truth is zero)."""
    assert ours.shape == truth.shape, f"{tuple(ours.shape)} instead of {tuple(truth.shape)}"
    gap = float(torch.linalg.vector_norm(ours - truth))
    return gap / (float(torch.linalg.vector_norm(truth)) or 1.0)


def fit_at_rest(task: Task, **how: Any) -> Posterior:
    """A fit that is said to be at a minimum, whatever the weights: analyses are plain there."""
    at_rest = Stationarity(0.0, 0.0, 1.0, task.n_data, task.likelihood.recorded)
    return fit_laplace(task, **how).changed(stationarity=at_rest)

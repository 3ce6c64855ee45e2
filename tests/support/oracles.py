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
    parameters = dict(task.model.named_parameters())
    jacobians = []
    before = {n: parameters[n].data for n in params}
    with torch.inference_mode(False), task.evaluation(), torch.enable_grad():
        for n, p in params.items():
            parameters[n].data = p.detach().clone()
        for i in range(task.n_data):
            outputs = task.forward(task.model, copy.deepcopy(task.fetch(torch.tensor([i]))))[0]
            outputs = getattr(outputs, "logits", outputs).reshape(-1)
            leaves = {n: parameters[n] for n in params}
            jacobians.append(torch.stack([_gradient(f, leaves) for f in outputs]))
    for n, data in before.items():
        parameters[n].data = data
    return torch.stack(jacobians)


def _gradient(output: Tensor, leaves: Mapping[str, Tensor]) -> Tensor:
    options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(output, list(leaves.values()), **options)
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
        likelihood = task.likelihood.at(torch.tensor([i]))

        def loss(output: Tensor, target: Tensor = target, likelihood: Any = likelihood) -> Tensor:
            return likelihood.nll(output.unsqueeze(0), target).sum()

        total = total + jacobian[i].mT @ torch.func.hessian(loss)(f) @ jacobian[i]
    return total


def layers_with_moments(model: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Layers whose inputs have moments: the full name of each layer's every parameter."""
    names = {id(p): n for n, p in model.named_parameters()}
    kinds = nn.Linear | nn.Embedding | nn.MultiheadAttention | _ConvNd
    return {
        layer: {k: names[id(p)] for k, p in layer._parameters.items() if p is not None}
        for layer in model.modules()
        if isinstance(layer, kinds) or type(layer).__name__ == "Conv1D"
    }


def dense_gram(task: Task, params: Mapping[str, Tensor]) -> Tensor:
    """Input moments as a dense matrix, ``[P, P]``.

    They come from the Jacobians of each layer's outputs with respect to its weights, by autograd,
    one example at a time. A parameter of no such layer has N on the diagonal.
    """
    place = unflatten(torch.arange(sum(p.numel() for p in params.values())), params)
    total = torch.zeros(2 * flatten(place).shape, dtype=torch.float64)
    layers = layers_with_moments(task.model)
    copied = {m: copy.deepcopy(m) for m in layers if not isinstance(m, nn.MultiheadAttention)}
    matrices = {names["weight"] for m, names in layers.items() if isinstance(m, nn.Linear)}
    fired: set[str] = set()

    def add_layer(module: nn.Module, args: tuple[Tensor, ...], kwargs: object) -> None:
        names = layers[module]
        if isinstance(module, nn.Embedding) and names["weight"] in matrices:
            return

        def outputs(weights: dict[str, Tensor]) -> Tensor:
            if isinstance(module, nn.MultiheadAttention):
                projection = weights["in_proj_weight"]
                return nn.functional.linear(args[0], projection, weights["in_proj_bias"])
            return functional_call(copied[module], weights, args)

        weights = {k: params[n] for k, n in names.items()}
        jacobian = torch.func.jacrev(outputs)(weights)
        blocks = [x.reshape(-1, weights[k].numel()) for k, x in jacobian.items()]
        j = torch.cat(blocks, dim=1).detach()
        positions = torch.cat([place[n].flatten() for n in names.values()])
        fired.update(names.values())
        total[positions.unsqueeze(1), positions] += j.mT @ j

    handles = [m.register_forward_pre_hook(add_layer, with_kwargs=True) for m in layers]
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
    """The inverse of :func:`flatten`; leading dimensions of ``vector`` stay."""
    parts = vector.split([v.numel() for v in like.values()], dim=-1)
    lead = vector.shape[:-1]
    pairs = zip(like.items(), parts, strict=True)
    return {name: part.reshape((*lead, *value.shape)) for (name, value), part in pairs}


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
    size = float(torch.linalg.vector_norm(truth))
    return gap / (size or 1.0)


def fit_at_rest(task: Task, **settings: Any) -> Posterior:
    """A fit that is marked as at a minimum, whatever its weights, so that no analysis corrects for
    the gradient."""
    at_rest = Stationarity(0.0, 0.0, 1.0, task.n_data, task.likelihood.recorded)
    return fit_laplace(task, **settings).changed(stationarity=at_rest)

"""The Hessian of a summed loss as products with vectors, v ↦ Σ_i ∇²ℓ_i v, without the matrix.

The model is run once per chunk of examples; its graph then serves any number of vectors, several
at a time, and stays in memory between calls as far as the task's memory budget allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from blr_analysis import ranks
from blr_analysis.backprop.record import SavedBytes, examples_per_pass, indices_of_rank, leaves_of
from blr_analysis.backprop.terms import slices
from blr_analysis.backprop.tree import Tree
from blr_analysis.errors import ModelError
from blr_analysis.progress import track
from blr_analysis.task import Task

RANDOM_VECTORS = 8  # that the matrix is multiplied with to tell whether it is symmetric
MAX_ASYMMETRY = 1e-3  # ‖H − Hᵀ‖ / ‖H‖; rounding makes 4e-6 at most in float32
GRAPH_BYTES = 512 * 2**20  # of graphs that stay between products where the user names no bound


@dataclass(frozen=True)
class SummedGradient:
    """Σ_i ∇ℓ_i of one chunk, with the graph that it was computed by.

    Attributes:
        leaves: the parameters, with respect to which the gradient is differentiated again.
        gradient: Σ_i ∇ℓ_i, in the order of the leaves.
        size: bytes that the graph takes.
    """

    leaves: list[Tensor]
    gradient: tuple[Tensor, ...]
    size: int

    @classmethod
    def of(cls, task: Task, params: Mapping[str, Tensor], indices: Tensor) -> SummedGradient:
        leaves = leaves_of(params)
        saved = SavedBytes(task, params)
        # The fused attention kernels cannot be differentiated twice.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), saved:
            outputs, targets = task.at(leaves).run(indices)
            if not outputs.requires_grad:
                raise ModelError(
                    "the outputs do not depend on the posterior's parameters; is there a "
                    "torch.no_grad in forward?"
                )
            gradient = torch.autograd.grad(
                task.likelihood.at(indices).nll(outputs, targets).sum(),
                [*leaves.values()],
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        return cls([*leaves.values()], gradient, saved.total)

    def times(self, vectors: list[Tensor]) -> list[Tensor]:
        """Σ_i ∇²ℓ_i v for stacked vectors v ``[K, *shape]``, all at once where autograd can."""
        pairs = zip(self.gradient, vectors, strict=True)
        differentiable = [(gradient, v) for gradient, v in pairs if gradient.requires_grad]
        if not differentiable:  # the loss is linear in the parameters
            return [torch.zeros_like(v) for v in vectors]
        gradients, columns = zip(*differentiable, strict=True)
        try:
            products = self._second_derivatives(gradients, columns, batched=True)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, ValueError):
            rows = [
                self._second_derivatives(gradients, column) for column in zip(*columns, strict=True)
            ]
            return [torch.stack(column) for column in zip(*rows, strict=True)]
        triples = zip(products, self.leaves, vectors, strict=True)
        return [_stacked(product, leaf, v) for product, leaf, v in triples]

    def _second_derivatives(
        self, gradients: tuple[Tensor, ...], vectors: tuple[Tensor, ...], batched: bool = False
    ) -> tuple[Tensor, ...]:
        """The derivative of the gradients along the vectors, or along each of a stack of them."""
        return torch.autograd.grad(
            gradients,
            self.leaves,
            vectors,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
            is_grads_batched=batched,
        )


def _stacked(product: Tensor, leaf: Tensor, vectors: Tensor) -> Tensor:
    """The product as ``[K, *shape]``; autograd leaves K out where it does not depend on the
    vectors."""
    return product if product.ndim > leaf.ndim else product.expand_as(vectors)


class Hessian:
    """Σ_i ∇²ℓ_i of a task at fixed weights, without the prior's share.

    Raises:
        ModelError, DataError: as :meth:`Task.run`.

    Source: Pearlmutter, "Fast exact multiplication by the Hessian", 1994.

    Example:
        >>> X, y = torch.randn(9, 3), torch.randn(9)
        >>> task = Task(nn.Linear(3, 1, bias=False), (X, y), likelihood="gaussian")
        >>> columns = Hessian(task, task.parameters()).product({"weight": torch.eye(3)[:, None]})
        >>> torch.allclose(columns["weight"].squeeze(1), X.T @ X, atol=1e-4)
        True
    """

    def __init__(self, task: Task, params: Mapping[str, Tensor]) -> None:
        self._task = task
        self._params = params
        self._order = indices_of_rank(task, params)
        self._budget = task.memory_budget or GRAPH_BYTES
        self._gradients: dict[int, SummedGradient] = {}  # those that stay in memory, by chunk

    @torch.inference_mode(False)
    def product(self, v: Tree) -> Tree:
        """The Hessian times K vectors, ``[K, *shape]`` by name."""
        vectors = [v[name].detach().to(p) for name, p in self._params.items()]
        totals = [torch.zeros_like(x) for x in vectors]
        pieces = self._order.split(examples_per_pass(self._task, self._params, self._order))
        shown = track(pieces, total=len(pieces), label="hessian products", show=self._task.progress)
        for number, indices in enumerate(shown):
            gradient = self._gradient(number, indices)
            try:
                self._add_products(gradient, vectors, totals)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise self._not_twice(error) from error
        ranks.total(totals)
        return dict(zip(self._params, totals, strict=True))

    def _gradient(self, number: int, indices: Tensor) -> SummedGradient:
        """The summed gradient of one chunk, stored for later calls where the budget allows."""
        if number in self._gradients:
            return self._gradients[number]
        gradient = SummedGradient.of(self._task, self._params, indices)
        if gradient.size + sum(g.size for g in self._gradients.values()) <= self._budget:
            self._gradients[number] = gradient
        return gradient

    def _add_products(
        self, gradient: SummedGradient, vectors: list[Tensor], totals: list[Tensor]
    ) -> None:
        """Add a chunk's products to the totals, as many vectors at a time as the budget allows."""
        group = max(1, self._budget // max(1, gradient.size))
        for rows in slices(len(vectors[0]), group):
            shares = gradient.times([v[rows] for v in vectors])
            for total, share in zip(totals, shares, strict=True):
                total[rows] += share

    def check_symmetric(self) -> None:
        """Raise :class:`ModelError` unless uᵀHv = vᵀHu.

        It fails where torch's second derivative of an operation is wrong. For K standard normal
        columns V, E‖VᵀHV − (VᵀHV)ᵀ‖² = K(K − 1) ‖H − Hᵀ‖² and E‖HV‖² = K ‖H‖².
        """
        generator = torch.Generator().manual_seed(0)
        probes = {
            name: torch.randn(RANDOM_VECTORS, *p.shape, generator=generator).to(p)
            for name, p in self._params.items()
        }
        v = _rows(probes)
        hv = _rows(self.product(probes))
        inner = v @ hv.mT
        scale = (RANDOM_VECTORS - 1) ** 0.5 * hv.norm()
        asymmetry = float((inner - inner.mT).norm() / scale)
        parameters = self._task.model.named_parameters()
        dtype = next(p.dtype for name, p in parameters if name in self._params)
        if asymmetry > max(MAX_ASYMMETRY, 100 * torch.finfo(dtype).eps):
            raise ModelError(
                f"the loss's second derivative is not symmetric ({asymmetry:.1%}): torch has an "
                "operation's wrong, as that of weight_norm (remove_parametrizations takes it out); "
                'use curvature="ggn"'
            )

    def _not_twice(self, error: RuntimeError) -> ModelError:
        modules = self._task.model.named_modules()
        bags = [path for path, module in modules if isinstance(module, nn.EmbeddingBag)]
        remedy = f"replace {bags[0]!r} by nn.Embedding and a mean" if bags else "write it otherwise"
        return ModelError(f"torch cannot differentiate the model twice: {error} {remedy}")


def _rows(tree: Tree) -> Tensor:
    """Stacked vectors as one matrix ``[K, P]`` in float64."""
    return torch.cat([x.double().flatten(1) for x in tree.values()], dim=1)

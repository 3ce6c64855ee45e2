"""The Hessian of a summed loss as products with vectors, v ↦ Σ_i ∇²ℓ_i v: no matrix is held.

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
from blr_analysis.backprop.record import SavedBytes, fetched, shared, together
from blr_analysis.backprop.tree import Tree
from blr_analysis.errors import ModelError
from blr_analysis.progress import track
from blr_analysis.task import Task

PROBES = 8  # random vectors that tell whether a matrix is symmetric
ASYMMETRY = 1e-3  # ‖H − Hᵀ‖ / ‖H‖; rounding makes 4e-6 at most in float32
HELD = 512 * 2**20  # bytes of graphs that are kept between products where the user names no bound


@dataclass(frozen=True)
class Slope:
    """Σ_i ∇ℓ_i of one chunk with the graph that it was made by, which holds ``size`` bytes."""

    leaves: list[Tensor]
    gradient: tuple[Tensor, ...]
    size: int

    @classmethod
    def of(cls, task: Task, params: Mapping[str, Tensor], indices: Tensor) -> Slope:
        counted = SavedBytes(task, params)
        # The fused attention kernels cannot be differentiated twice.
        with torch.enable_grad(), task.evaluation(), sdpa_kernel(SDPBackend.MATH), counted:
            leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
            f, y = task.run(fetched(task, indices), leaves, indices)
            if not f.requires_grad:
                raise ModelError(
                    "the outputs do not depend on the posterior's parameters; is there a "
                    "torch.no_grad in forward?"
                )
            gradient = torch.autograd.grad(
                task.likelihood.at(indices).nll(f, y).sum(),
                [*leaves.values()],
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        return cls([*leaves.values()], gradient, counted.total)

    def times(self, v: list[Tensor]) -> list[Tensor]:
        """Σ_i ∇²ℓ_i v for stacked vectors ``[K, *shape]``, all at once where autograd can."""
        pairs = zip(self.gradient, v, strict=True)
        live = [(g, x) for g, x in pairs if g.requires_grad]
        if not live:
            return [torch.zeros_like(x) for x in v]
        ends, columns = zip(*live, strict=True)
        try:
            found = self._bent(ends, columns, several=True)
            # what does not depend on the vectors comes back without their dimension
            return [g if g.ndim > x.ndim else g.expand_as(u)
                    for g, x, u in zip(found, self.leaves, v, strict=True)]  # fmt: skip
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, ValueError):
            rows = [self._bent(ends, one) for one in zip(*columns, strict=True)]
            return [torch.stack(column) for column in zip(*rows, strict=True)]

    def _bent(
        self, ends: tuple[Tensor, ...], vectors: tuple[Tensor, ...], several: bool = False
    ) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            ends,
            self.leaves,
            vectors,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
            is_grads_batched=several,
        )


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
        self._task, self._params, self._order = task, params, shared(task, params)
        self._budget = task.memory_budget or HELD
        self._kept: dict[int, Slope] = {}

    @torch.inference_mode(False)
    def product(self, v: Tree) -> Tree:
        """The Hessian times K vectors, ``[K, *shape]`` by name."""
        flat = [v[n].detach().to(p) for n, p in self._params.items()]
        total = [torch.zeros_like(x) for x in flat]
        pieces = self._order.split(together(self._task, self._params, self._order))
        label = "hessian products"
        shown = track(pieces, total=len(pieces), label=label, show=self._task.progress)
        for i, chosen in enumerate(shown):
            part = self._kept.get(i) or Slope.of(self._task, self._params, chosen)
            if part.size + sum(p.size for k, p in self._kept.items() if k != i) <= self._budget:
                self._kept[i] = part
            group = max(1, self._budget // max(1, part.size))
            try:
                for columns in zip(*(x.split(group) for x in (*flat, *total)), strict=True):
                    shares = part.times([*columns[: len(flat)]])
                    for whole, share in zip(columns[len(flat) :], shares, strict=True):
                        whole += share
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise self._not_twice(error) from error
        ranks.total(total)
        return dict(zip(self._params, total, strict=True))

    def check_symmetric(self) -> None:
        """Raise :class:`ModelError` unless uᵀHv = vᵀHu, as where torch's second derivative of an
        operation is wrong.

        Of K standard normal columns V, E‖VᵀHV − (VᵀHV)ᵀ‖² = K(K − 1) ‖H − Hᵀ‖², and
        E‖HV‖² = K ‖H‖².
        """
        source = torch.Generator().manual_seed(0)
        probes = {
            n: torch.randn(PROBES, *p.shape, generator=source).to(p)
            for n, p in self._params.items()
        }
        v, hv = (
            torch.cat([x.double().reshape(PROBES, -1) for x in tree.values()], dim=1)
            for tree in (probes, self.product(probes))
        )
        inner = v @ hv.mT
        off = float((inner - inner.mT).norm() / ((PROBES - 1) ** 0.5 * hv.norm()))
        dtype = next(p.dtype for n, p in self._task.model.named_parameters() if n in self._params)
        if off > max(ASYMMETRY, 100 * torch.finfo(dtype).eps):
            raise ModelError(
                f"the loss's second derivative is not symmetric ({off:.1%}): torch has an "
                "operation's wrong, as that of weight_norm (remove_parametrizations takes it out); "
                'use curvature="ggn"'
            )

    def _not_twice(self, error: RuntimeError) -> ModelError:
        bags = [n for n, m in self._task.model.named_modules() if isinstance(m, nn.EmbeddingBag)]
        remedy = f"replace {bags[0]!r} by nn.Embedding and a mean" if bags else "write it otherwise"
        return ModelError(f"torch cannot differentiate the model twice: {error} {remedy}")

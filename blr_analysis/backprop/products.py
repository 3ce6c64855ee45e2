"""The curvature of a summed loss as products with vectors: no matrix, no per-example gradient.

    GGN      v ↦ Σ_i J_iᵀ Λ_i J_i v
    Hessian  v ↦ Σ_i ∇²ℓ_i v

The model is run once per chunk of examples; its graph then serves any number of vectors, several
at a time, and stays in memory between calls as far as the budget allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from blr_analysis import ranks
from blr_analysis.backprop.record import SavedBytes, fetched, shared, together
from blr_analysis.backprop.tree import lead_of
from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError, ModelError
from blr_analysis.progress import track
from blr_analysis.task import Task

Tree = dict[str, Tensor]
Product = Callable[[list[Tensor]], list[Tensor]]
KINDS = ("ggn", "hessian")
PROBES = 8  # random vectors that tell whether a matrix is symmetric
ASYMMETRY = 1e-3  # ‖H − Hᵀ‖ / ‖H‖; rounding makes 4e-6 at most in float32
HELD = 512 * 2**20  # bytes of graphs that are kept between products where the user names no bound


@dataclass(frozen=True)
class Linearised:
    """Products of one chunk's curvature with vectors, at fixed weights.

    ``multiply`` takes one stacked tensor ``[K, *shape]`` per parameter and returns the same;
    ``push`` (of kind "ggn") gives J v ``[K, *outputs]``. ``size`` counts the bytes that its graph
    holds.
    """

    multiply: Product
    push: Callable[[list[Tensor]], Tensor]
    outputs: Tensor
    size: int


class Curvature:
    """Σ_i J_iᵀ Λ_i J_i or Σ_i ∇²ℓ_i of a task at fixed weights, without the prior's share.

    Args:
        task: model, data, likelihood; the model is left as it is.
        params: weights by name; those of the model that are not named stay its own.
        indices: examples to sum over; None: all.
        kind: "ggn" (positive semi-definite), "hessian" (of the loss itself).
        memory_budget: bytes of graphs kept between products (default 512 MiB); beyond it a
            chunk's forward pass is made again for every product.

    Attributes:
        products: vectors multiplied so far.
        passes: sweeps over the data so far: one for the forward and backward pass that a chunk
            is linearised with (again for every product where it is not kept), and two, a
            forward- and a reverse-mode derivative, for each vector.

    Raises:
        InputError: an unknown kind, a vector of other names or shapes.
        ModelError, DataError: as :meth:`Task.run`.

    Source: Pearlmutter, 1994; Schraudolph, 2002 (J v by differentiating Jᵀu with respect to u).

    Example:
        >>> import torch
        >>> from blr_analysis import Task
        >>> X, y = torch.randn(9, 3), torch.randn(9)
        >>> task = Task(torch.nn.Linear(3, 1, bias=False), (X, y), likelihood="gaussian")
        >>> curvature = Curvature(task, task.parameters())
        >>> columns = curvature.product({"weight": torch.eye(3).unsqueeze(1)})["weight"]
        >>> torch.allclose(columns.squeeze(1), X.T @ X, atol=1e-4)
        True
    """

    def __init__(
        self,
        task: Task,
        params: Mapping[str, Tensor],
        *,
        indices: Tensor | None = None,
        kind: str = "ggn",
        memory_budget: int | None = None,
    ) -> None:
        self.kind = one_of("kind", kind, KINDS)
        self._task, self._params = task, dict(params)
        self._order = torch.arange(task.n_data) if indices is None else indices
        self._mine = shared(task, self._params, self._order)
        if memory_budget is not None:
            positive_int("memory_budget", memory_budget)
        self._budget = memory_budget or HELD
        self._kept: dict[int, Linearised] = {}
        self.products, self._swept = 0, 0

    @property
    def n_data(self) -> int:
        """How many examples are summed over."""
        return len(self._order)

    @property
    def passes(self) -> float:
        return self._swept / max(1, self.n_data) + 2 * self.products

    @torch.inference_mode(False)
    def product(self, v: Tree, *, progress: bool | None = None) -> Tree:
        """The curvature times v, ``[*K, *shape]`` per name (leading dimensions: several v)."""
        lead = self._lead(v)
        count = max(1, lead.numel())
        flat = [v[n].detach().to(p).reshape((count, *p.shape)) for n, p in self._params.items()]
        total = [torch.zeros_like(x) for x in flat]
        before = self._swept
        for part in self._chunks(f"{self.kind} products", progress):
            group = max(1, self._budget // max(1, part.size))
            for start in range(0, count, group):
                columns = [x[start : start + group] for x in flat]
                try:
                    shares = part.multiply(columns)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    raise self._not_twice(error) from error
                for whole, share in zip(total, shares, strict=True):
                    whole[start : start + group] += share
        swept = torch.tensor([self._swept - before])
        ranks.total([*total, swept])
        self._swept = before + int(swept)
        self.products += count
        return {
            n: t.reshape((*lead, *p.shape))
            for (n, p), t in zip(self._params.items(), total, strict=True)
        }

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
        products = self.product(probes, progress=False)
        v, hv = (
            torch.cat([x.double().reshape(PROBES, -1) for x in tree.values()], dim=1)
            for tree in (probes, products)
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

    def _lead(self, v: Tree) -> torch.Size:
        leads = {}
        for name, p in self._params.items():
            x = v.get(name)
            leads[name] = lead_of(name, x, p.shape)
        if len(set(leads.values())) != 1:
            raise InputError(f"the vectors' leading dimensions differ: {leads}")
        return next(iter(leads.values()))

    def _chunks(self, label: str, progress: bool | None) -> Iterator[Linearised]:
        size = together(self._task, self._params, self._mine)
        pieces = self._mine.split(size) if len(self._mine) else ()
        held = sum(part.size for part in self._kept.values())
        for i, chosen in enumerate(track(pieces, total=len(pieces), label=label, show=progress)):
            part = self._kept.get(i)
            if part is None:
                part = linearised(self._task, self._params, chosen, self.kind)
                self._swept += len(chosen)
                if held + part.size <= self._budget:
                    self._kept[i] = part
                    held += part.size
            yield part


def linearised(task: Task, params: Mapping[str, Tensor], indices: Tensor, kind: str) -> Linearised:
    """Run some examples once and keep what products with their curvature need."""
    counted = SavedBytes()
    likelihood = task.likelihood.at(indices)
    # The fused attention kernels cannot be differentiated twice.
    with torch.enable_grad(), task.evaluation(), sdpa_kernel(SDPBackend.MATH), counted:
        leaves = [p.detach().requires_grad_() for p in params.values()]
        named = dict(zip(params, leaves, strict=True))
        f, y = task.run(fetched(task, indices), named, indices)
        if not f.requires_grad:
            raise ModelError(
                "the outputs do not depend on the posterior's parameters; is there a "
                "torch.no_grad in forward?"
            )
        fixed = f.detach()
        u = torch.zeros_like(fixed, requires_grad=True)
        if kind == "hessian":
            loss = likelihood.nll(f, y).sum()
            slope = torch.autograd.grad(
                loss, leaves, create_graph=True, allow_unused=True, materialize_grads=True
            )
        else:
            slope = torch.autograd.grad(f, leaves, u, create_graph=True, allow_unused=True)

    def hessian_times(v: list[Tensor]) -> list[Tensor]:
        live = [(g, x) for g, x in zip(slope, v, strict=True) if g.requires_grad]
        if not live:
            return [torch.zeros_like(x) for x in v]
        return _batched([g for g, _ in live], leaves, [x for _, x in live])

    def push(v: list[Tensor]) -> Tensor:
        live = [(g, x) for g, x in zip(slope, v, strict=True) if g is not None]
        return _batched([g for g, _ in live], [u], [x for _, x in live])[0]

    def ggn_times(v: list[Tensor]) -> list[Tensor]:
        return _batched([f], leaves, [likelihood.hessian_times(fixed, y, push(v))])

    multiply = hessian_times if kind == "hessian" else ggn_times
    return Linearised(multiply, push, fixed, counted.total)


def _batched(outputs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """Reverse-mode derivatives for K stacked cotangents ``[K, ...]``, all at once where autograd
    can, else one after the other."""

    def one(cotangent: list[Tensor], several: bool) -> list[Tensor]:
        grads = torch.autograd.grad(
            outputs,
            inputs,
            cotangent,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
            is_grads_batched=several,
        )
        return list(grads)

    count = len(cotangents[0])
    if count > 1:
        try:
            return [_full(g, x, count) for g, x in zip(one(cotangents, True), inputs, strict=True)]
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
    rows = [one([c[k] for c in cotangents], False) for k in range(count)]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _full(grad: Tensor, like: Tensor, count: int) -> Tensor:
    """A gradient that does not depend on the cotangent comes back without their dimension."""
    return grad if grad.ndim > like.ndim else grad.expand(count, *like.shape)

"""What the user's own forward and backward pass tells of every example.

The gradient of one example's loss is, layer by layer, a function of the layer's input and of the
gradient at its output; both pass by in training. The rules of
:mod:`blr_analysis.backprop.layers` turn them into G_i, and nothing is computed twice, but for
layers without a rule, which are differentiated by themselves. :class:`Listener` catches both:
forward hooks keep every layer's inputs, hooks on its outputs the gradients that come back to them,
from :meth:`Listener.start` to :meth:`Listener.stop`.

What is read is checked, on the first passes and ever more seldom after them (on the 1st, 2nd,
4th, 8th, …): Σ_i g_i against the gradient that autograd left in ``p.grad``; and whether an
example's outputs depend on its own row of every layer alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from blr_analysis.backprop.layers import Axis
from blr_analysis.backprop.plan import units_of
from blr_analysis.backprop.reading import names_of, read
from blr_analysis.backprop.record import Unit, Visit, counted, warn_of_uncounted
from blr_analysis.backprop.terms import Term, merged
from blr_analysis.checks import one_of, some
from blr_analysis.errors import OptimizerError
from blr_analysis.half import working

NO_GRADIENT = (
    "no parameter has a gradient after sampled_params(train=True): call loss.backward() inside "
    "it, or evaluate inside sampled_params()"
)


class NoGradient(OptimizerError):
    """A draw without a backward pass."""


@dataclass
class Pass:
    """One call of the model on ``batch`` examples: the calls of its layers, and the gradients that
    came back to each."""

    batch: int
    seen: list[tuple[Visit, list[Tensor | None]]] = field(default_factory=list)

    def gradients(self, outputs: Any, cotangents: Any) -> list[list[Tensor | None]]:
        """At every call's outputs, by a backward pass of our own, of which nothing is kept."""
        edges = [edge for visit, _ in self.seen for edge in visit.edges]
        found = iter(
            torch.autograd.grad(outputs, edges, cotangents, retain_graph=True, allow_unused=True)
        )
        for _, grads in self.seen:
            grads[:] = [None] * len(grads)
        return [[next(found) for _ in visit.edges] for visit, _ in self.seen]


class Listener:
    """Reads G_i, the gradients of the examples' losses, from the passes of a model.

    Args:
        model: the module that is called in training.
        algorithm: who asks, for messages.
        reduction: ``"mean"`` or ``"sum"``: how the loss combines the examples of a batch.
    """

    method = "none"

    def __init__(self, model: nn.Module, algorithm: str, reduction: str = "mean") -> None:
        self.model, self.algorithm = model, algorithm
        self.reduction = one_of("loss_reduction", reduction, ("mean", "sum"))
        self._contexts, self._told = 0, False
        self._handles: list[Any] = []
        self.stop()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which hears nothing: a graph cannot be copied."""
        return {**self.__dict__, "_handles": [], "_passes": [], "_params": {}, "_current": None}

    def start(self, params: Sequence[Tensor]) -> None:
        """Put hooks on every layer that owns one of ``params``.

        Raises:
            OptimizerError: a parameter is not the model's.
        """
        self._contexts += 1
        names = names_of(self.model)
        if foreign := [tuple(p.shape) for p in params if id(p) not in names]:
            raise OptimizerError(f"parameters of {foreign[:5]} are not in model=: pass theirs")
        self._params = {names[id(p)]: p for p in params}
        keep = self._handles.append  # one by one: an interrupt leaves none behind
        keep(self.model.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
        for unit in self._units(names):
            keep(unit.module.register_forward_hook(self._hook(unit), with_kwargs=True))
        keep(self.model.register_forward_hook(self._leave, always_call=True))

    def stop(self) -> None:
        """Listen no more, and forget what was heard."""
        self._passes: list[Pass] = []
        self._params: dict[str, Tensor] = {}
        self._current: Pass | None = None
        while self._handles:
            self._handles.pop().remove()

    def finish(self) -> dict[Tensor, Tensor]:
        """The curvature estimates of the parameters that have a gradient.

        Raises:
            OptimizerError: some parameter's per-example gradients cannot be read.
        """
        while self._handles:  # for layers may run again while they are read
            self._handles.pop().remove()
        try:
            got = {name: p for name, p in self._params.items() if p.grad is not None}
            if not got:
                raise NoGradient(NO_GRADIENT)
            passed = [p for p in self._passes if any(g is not None for _, at in p.seen for g in at)]
            if len(passed) != 1:
                said = f"{len(passed)} calls of model= were differentiated in one context"
                raise OptimizerError(f"{said}: call it once in each, and say divided_by=")
            return self._estimates(passed[0], got)
        finally:
            self.stop()

    def _estimates(self, passed: Pass, got: dict[str, Tensor]) -> dict[Tensor, Tensor]:
        """Of the pass that was differentiated, for parameters that got a gradient."""
        raise NotImplementedError

    # Listening -------------------------------------------------------------------------------

    def _units(self, names: Mapping[int, str]) -> list[Unit]:
        units = units_of(self.model, {*self._params})
        for path, module in self.model.named_modules():
            if isinstance(module, nn.MultiheadAttention):  # which never calls its out_proj
                units = [u for u in units if u.module not in {*module.modules()}]
                own = {a: names[id(p)] for a, p in module.named_parameters()}
                own = {a: name for a, name in own.items() if name in self._params}
                units += [Unit(path, module, own, None)] if own else []
        return units

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not self.model or not torch.is_grad_enabled():
            return
        leaves = tree_leaves((args, kwargs))
        sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if not sizes:
            raise OptimizerError("the model was called without a tensor of examples: pass one")
        self._current = Pass(sizes[0])
        self._passes.append(self._current)

    def _hook(self, unit: Unit) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # a copy of the model has copies of its hooks; and in a backward pass activation
            # checkpointing calls layers again
            in_backward = torch._C._current_graph_task_id() != -1
            if module is not unit.module or not torch.is_grad_enabled() or in_backward:
                return
            passed = self._current
            if passed is None:
                raise OptimizerError(f"layer {unit.path!r} was called outside of model='s forward")
            leaves = differentiated(output)
            edges = [get_gradient_edge(leaf) for leaf in leaves]
            args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            values = [leaf.detach() for leaf in leaves]
            grads: list[Tensor | None] = [None] * len(leaves)
            passed.seen.append((Visit(unit, 0, args, kwargs, values, edges), grads))
            for position, leaf in enumerate(leaves):
                leaf.register_hook(_receiver(grads, position))

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        passed = self._current
        if module is self.model and passed is not None:
            self._current = None
            if passed.seen:
                self._look(passed, differentiated(output))

    def _look(self, passed: Pass, outputs: list[Tensor]) -> None:
        """At a pass whose forward is over: half of the examples' outputs must depend on their own
        rows alone of every layer with one."""
        rows = [x for x in outputs if x.shape[:1] == (passed.batch,)]
        if not self._is_due or not rows:
            return
        generator = torch.Generator().manual_seed(self._contexts)
        others = torch.randperm(passed.batch, generator=generator)[: passed.batch // 2]
        cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in rows]
        for cotangent in cotangents:
            cotangent[others.to(cotangent.device)] = 0
        for (visit, _), at in zip(passed.seen, passed.gradients(rows, cotangents), strict=True):
            grads = [g for g in at if g is not None and g.shape[:1] == (passed.batch,)]
            if any(bool(g[others.to(g.device)].any()) for g in grads):
                why = "the model mixes the examples of a batch there (BatchNorm? take GroupNorm)"
                raise self._unreadable(visit.unit.names.values(), why)

    # Reading ---------------------------------------------------------------------------------

    def _read(self, passed: Pass, got: dict[str, Tensor]) -> tuple[list[Term], int]:
        """G_i, and n, the examples that the loss is a mean of."""
        terms = self._terms(passed, [grads for _, grads in passed.seen])
        known = {name for term in terms for name in term.names}
        if unseen := [name for name in got if name not in known]:
            raise self._unreadable(unseen, "no layer that owns it was called with it")
        if self._is_due:
            self._check_sums(got, terms, passed)
        if self.reduction == "sum":
            return terms, passed.batch
        grads = [g for _, at in reversed(passed.seen) for g in at if g is not None]
        counts = counted([g for g in grads if g.shape[:1] == (passed.batch,)], passed.batch)
        if not bool(counts.all()):
            self._told = self._told or warn_of_uncounted(counts)
        return terms, int(counts.sum())

    def _terms(self, passed: Pass, grads: Sequence[Sequence[Tensor | None]]) -> list[Term]:
        """G_i of every layer, for these gradients at the outputs of its calls."""
        values = {name: p.detach() for name, p in self.model.named_parameters()}
        names, batch, terms = names_of(self.model), passed.batch, []
        for (visit, _), at in zip(passed.seen, grads, strict=True):
            if all(g is None for g in at):
                continue
            unit = visit.unit
            inputs = [_axis(leaf, batch) for leaf in tree_leaves((visit.args, visit.kwargs))]
            axes = [_place(x, batch, g) for x, g in zip(visit.outputs, at, strict=True)]
            outputs = [axis for axis in axes if axis is not None]
            lost = unit.rule is not None and (not inputs or inputs[0] is None)
            if lost or len(outputs) < len(axes):
                shapes = [tuple(x.shape) for x in visit.outputs]
                why = f"its outputs {shapes} or inputs do not start with the {batch} examples"
                raise self._unreadable(unit.names.values(), why)
            widen = partial(_widened, dtype=working(values[next(iter(unit.names.values()))].dtype))
            given = (visit.args, visit.kwargs)
            visit.args, visit.kwargs = tree_map_only(Tensor, widen, given)
            columns = [
                [widen(torch.zeros_like(leaf) if g is None else g)]
                for g, leaf in zip(at, visit.outputs, strict=True)
            ]
            try:
                terms += read(names, values, visit, (inputs, outputs), columns, batch)
            except Exception as error:  # whatever a layer makes of one example at a time
                reason = f"differentiating {type(unit.module).__name__} by itself failed ({error})"
                raise self._unreadable(unit.names.values(), reason) from error
        return merged(terms)

    @property
    def _is_due(self) -> bool:
        return self._contexts & (self._contexts - 1) == 0

    def _check_sums(self, got: Mapping[str, Tensor], terms: list[Term], passed: Pass) -> None:
        """Σ_i g_i is p.grad, up to the rounding of the coarsest type on the way. Gradients that are
        not finite pass: step() refuses them, or a GradScaler skips them."""
        truths = {name: p.grad.detach() for name, p in got.items() if p.grad is not None}
        sums = {name: total for term in terms for name, total in term.sum().items()}
        kinds = {x.dtype for visit, _ in passed.seen for x in visit.outputs}
        eps = max(torch.finfo(kind).eps for kind in kinds | {g.dtype for g in truths.values()})
        norms = {name: float(torch.linalg.vector_norm(g)) for name, g in truths.items()}
        for name, truth in truths.items():
            gap = torch.linalg.vector_norm(sums[name].view_as(truth).to(truth.dtype) - truth)
            if float(gap) > eps**0.6 * norms[name] + eps**0.85 * max(norms.values()):
                why = "those of the examples do not add up to p.grad: call zero_grad() first; "
                raise self._unreadable([name], why + "use the weight in its layer only")

    def _unreadable(self, names: Iterable[str], why: str) -> OptimizerError:
        return OptimizerError(
            f"{self.algorithm} cannot read the gradient of each example for {some([*names])}: "
            f"{why}. Freeze it, give it another optimizer, or train with IVON"
        )


class PerExampleSquares(Listener):
    """The mean of g_i² over the examples; of a loss that is a sum, ``p.grad`` becomes the mean over
    examples as well."""

    method = "ggn"

    def _estimates(self, passed: Pass, got: dict[str, Tensor]) -> dict[Tensor, Tensor]:
        terms, n = self._read(passed, got)
        squares = {name: total for term in terms for name, total in term.square_sum().items()}
        means = {}
        for name, param in got.items():
            square = squares[name].to(working(param.dtype)).view_as(param)
            means[param] = square.mul_(n if self.reduction == "mean" else 1 / n)
            if self.reduction == "sum" and param.grad is not None:
                param.grad.div_(n)
        return means


def differentiated(output: Any) -> list[Tensor]:
    """The leaves of an output that have a gradient."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]


def _axis(leaf: Any, batch: int) -> Axis | None:
    """Examples first; None: no tensor, or one that all examples share."""
    return Axis() if isinstance(leaf, Tensor) and leaf.shape[:1] == (batch,) else None


def _place(leaf: Tensor, batch: int, grad: Tensor | None) -> Axis | None:
    """Where the examples are in an output: first, or anywhere if nothing depends on it."""
    dims = [d for d, size in enumerate(leaf.shape) if size == batch]
    return Axis(dim=dims[0]) if dims and (dims[0] == 0 or grad is None) else None


def _widened(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


def _receiver(grads: list[Tensor | None], position: int) -> Any:
    """A hook that adds up what comes back to an output. It holds nothing that leads back to the
    graph: a graph whose hooks know it is never freed."""

    def receive(grad: Tensor) -> None:
        before = grads[position]
        grads[position] = grad.detach() if before is None else before + grad.detach()

    return receive

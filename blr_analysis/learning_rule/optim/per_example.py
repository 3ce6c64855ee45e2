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
from typing import Any, NamedTuple, TypeGuard

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


Gradients = list[Tensor | None]


class LayerCall(NamedTuple):
    """One call of a layer.

    Attributes:
        visit: what went into the layer and came out of it.
        gradients: those that came back, by output; None until then.
    """

    visit: Visit
    gradients: Gradients


@dataclass
class Pass:
    """One call of the model.

    Attributes:
        batch: the number of examples.
        calls: the calls of the model's layers.
    """

    batch: int
    calls: list[LayerCall] = field(default_factory=list)

    @property
    def is_differentiated(self) -> bool:
        """Whether a gradient came back to a layer."""
        return any(grad is not None for call in self.calls for grad in call.gradients)

    def gradients(self, outputs: Any, cotangents: Any) -> list[Gradients]:
        """The gradients at every call's outputs. This backward pass leaves no trace."""
        edges = [edge for call in self.calls for edge in call.visit.edges]
        gradients = iter(
            torch.autograd.grad(outputs, edges, cotangents, retain_graph=True, allow_unused=True)
        )
        for call in self.calls:
            call.gradients[:] = [None] * len(call.gradients)
        return [[next(gradients) for _ in call.visit.edges] for call in self.calls]


class Listener:
    """Reads G_i, the gradients of the examples' losses, from the passes of a model.

    Args:
        model: the module that is called in training.
        algorithm: who asks, for messages.
        reduction: ``"mean"`` or ``"sum"``: how the loss combines the examples of a batch.
    """

    method = "none"

    def __init__(self, model: nn.Module, algorithm: str, reduction: str = "mean") -> None:
        self.model = model
        self.algorithm = algorithm
        self.reduction = one_of("loss_reduction", reduction, ("mean", "sum"))
        self._contexts = 0  # those that were started
        self._has_warned = False
        self._handles: list[Any] = []
        self.stop()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no hooks and no passes, because a graph cannot be copied."""
        return {**self.__dict__, "_handles": [], "_passes": [], "_params": {}, "_current": None}

    def start(self, params: Sequence[Tensor]) -> None:
        """Put hooks on every layer that owns one of ``params``.

        Raises:
            OptimizerError: a parameter is not the model's.
        """
        self._contexts += 1
        names = names_of(self.model)
        foreign_shapes = [tuple(param.shape) for param in params if id(param) not in names]
        if foreign_shapes:
            raise OptimizerError(
                f"parameters of shapes {foreign_shapes[:5]} are not in model=: pass "
                "the model that owns them"
            )
        self._params = {names[id(param)]: param for param in params}
        # Each handle is stored at once, so that an interrupt leaves no hook behind.
        store = self._handles.append
        store(self.model.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
        for unit in self._units(names):
            store(unit.module.register_forward_hook(self._hook(unit), with_kwargs=True))
        store(self.model.register_forward_hook(self._leave, always_call=True))

    def stop(self) -> None:
        """Remove the hooks, and forget the passes."""
        self._passes: list[Pass] = []
        self._params: dict[str, Tensor] = {}
        self._current: Pass | None = None
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def finish(self) -> dict[Tensor, Tensor]:
        """The curvature estimates of the parameters that have a gradient.

        Raises:
            OptimizerError: some parameter's per-example gradients cannot be read.
        """
        self._remove_hooks()  # layers may run again while their gradients are read
        try:
            params = {name: p for name, p in self._params.items() if p.grad is not None}
            if not params:
                raise NoGradient(NO_GRADIENT)
            differentiated_passes = [call for call in self._passes if call.is_differentiated]
            if len(differentiated_passes) != 1:
                raise OptimizerError(
                    f"{len(differentiated_passes)} calls of model= were differentiated in one "
                    "context: call the model once in each context, and give divided_by="
                )
            return self._estimates(differentiated_passes[0], params)
        finally:
            self.stop()

    def _estimates(self, forward: Pass, params: dict[str, Tensor]) -> dict[Tensor, Tensor]:
        """The curvature estimates of ``params``, which have a gradient from this pass."""
        raise NotImplementedError

    # Listening -------------------------------------------------------------------------------

    def _units(self, names: Mapping[int, str]) -> list[Unit]:
        units = units_of(self.model, {*self._params})
        for path, module in self.model.named_modules():
            if not isinstance(module, nn.MultiheadAttention):
                continue
            # Attention never calls its out_proj, so that the whole module is one unit.
            inner_modules = set(module.modules())
            units = [unit for unit in units if unit.module not in inner_modules]
            trained_names = {
                attribute: names[id(param)]
                for attribute, param in module.named_parameters()
                if names[id(param)] in self._params
            }
            if trained_names:
                units.append(Unit(path, module, trained_names, None))
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
            is_of_a_copy = module is not unit.module  # a copied model has copies of the hooks
            # Activation checkpointing calls layers again in the backward pass.
            in_backward = torch._C._current_graph_task_id() != -1
            if is_of_a_copy or in_backward or not torch.is_grad_enabled():
                return
            forward = self._current
            if forward is None:
                raise OptimizerError(
                    f"layer {unit.path!r} was called outside of the forward pass of model=: call "
                    "the whole model"
                )
            leaves = differentiated(output)
            edges = [get_gradient_edge(leaf) for leaf in leaves]
            args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            values = [leaf.detach() for leaf in leaves]
            visit = Visit(unit, 0, args, kwargs, values, edges)
            gradients: Gradients = [None] * len(leaves)
            forward.calls.append(LayerCall(visit, gradients))
            for position, leaf in enumerate(leaves):
                leaf.register_hook(_receiver(gradients, position))

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        forward = self._current
        if module is not self.model or forward is None:
            return
        self._current = None
        if forward.calls:
            self._after_forward(forward, differentiated(output))

    def _after_forward(self, forward: Pass, outputs: list[Tensor]) -> None:
        """Check that an example's outputs depend on no other example's row of any layer.

        Half of the examples' outputs are differentiated; the rows of the others must get 0.
        """
        batch = forward.batch
        by_example = [output for output in outputs if _has_examples_first(output, batch)]
        if not self._check_is_due or not by_example:
            return
        generator = torch.Generator().manual_seed(self._contexts)
        others = torch.randperm(batch, generator=generator)[: batch // 2]
        cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in by_example]
        for cotangent in cotangents:
            cotangent[others.to(cotangent.device)] = 0
        gradients = forward.gradients(by_example, cotangents)
        for call, call_gradients in zip(forward.calls, gradients, strict=True):
            for grad in call_gradients:
                if not _has_examples_first(grad, batch):
                    continue
                mixes_examples = bool(grad[others.to(grad.device)].any())
                if mixes_examples:
                    raise self._unreadable(
                        call.visit.unit.names.values(),
                        "the model mixes the examples of a batch there (replace BatchNorm by "
                        "GroupNorm)",
                    )

    # Reading ---------------------------------------------------------------------------------

    def _read(self, forward: Pass, params: dict[str, Tensor]) -> tuple[list[Term], int]:
        """G_i, and n, the number of examples that the loss is a mean of."""
        terms = self._terms(forward, [call.gradients for call in forward.calls])
        names_read = {name for term in terms for name in term.names}
        unread = [name for name in params if name not in names_read]
        if unread:
            raise self._unreadable(unread, "no layer that owns it was called with it")
        if self._check_is_due:
            self._check_sums(params, terms, forward)
        batch = forward.batch
        if self.reduction == "sum":
            return terms, batch
        gradients = [grad for call in reversed(forward.calls) for grad in call.gradients]
        is_counted = counted([g for g in gradients if _has_examples_first(g, batch)], batch)
        if not bool(is_counted.all()) and not self._has_warned:
            self._has_warned = warn_of_uncounted(is_counted)
        return terms, int(is_counted.sum())

    def _terms(self, forward: Pass, gradients: Sequence[Gradients]) -> list[Term]:
        """G_i of every layer, for these gradients at the outputs of its calls."""
        values = {name: param.detach() for name, param in self.model.named_parameters()}
        names = names_of(self.model)
        batch = forward.batch
        terms: list[Term] = []
        for call, call_gradients in zip(forward.calls, gradients, strict=True):
            if all(grad is None for grad in call_gradients):
                continue
            visit = call.visit
            axes = self._axes(visit, call_gradients, batch)
            columns = _widen(visit, call_gradients, values)
            try:
                terms += read(names, values, visit, axes, columns, batch)
            except Exception as error:  # a layer may raise anything when it runs on one example
                layer = type(visit.unit.module).__name__
                reason = f"differentiating {layer} by itself failed ({error})"
                raise self._unreadable(visit.unit.names.values(), reason) from error
        return merged(terms)

    def _axes(
        self, visit: Visit, gradients: Gradients, batch: int
    ) -> tuple[list[Axis | None], list[Axis]]:
        """Where the examples are in the inputs and in the outputs of a call."""
        inputs = [_input_axis(leaf, batch) for leaf in tree_leaves((visit.args, visit.kwargs))]
        outputs = []
        for output, grad in zip(visit.outputs, gradients, strict=True):
            axis = _output_axis(output, batch, grad)
            if axis is not None:
                outputs.append(axis)
        lacks_input = visit.unit.rule is not None and (not inputs or inputs[0] is None)
        lacks_output = len(outputs) < len(visit.outputs)
        if lacks_input or lacks_output:
            shapes = [tuple(output.shape) for output in visit.outputs]
            raise self._unreadable(
                visit.unit.names.values(),
                f"its outputs {shapes} or inputs do not start with the {batch} examples",
            )
        return inputs, outputs

    @property
    def _check_is_due(self) -> bool:
        is_power_of_two = self._contexts & (self._contexts - 1) == 0
        return is_power_of_two

    def _check_sums(self, params: Mapping[str, Tensor], terms: list[Term], forward: Pass) -> None:
        """Check that Σ_i g_i is p.grad, up to the rounding of the coarsest dtype on the way.

        Gradients that are not finite pass: step() refuses them, or a GradScaler skips them.
        """
        gradients = {name: p.grad.detach() for name, p in params.items() if p.grad is not None}
        sums = {name: total for term in terms for name, total in term.sum().items()}
        dtypes = {output.dtype for call in forward.calls for output in call.visit.outputs}
        dtypes |= {grad.dtype for grad in gradients.values()}
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        norms = {name: float(torch.linalg.vector_norm(g)) for name, g in gradients.items()}
        largest = max(norms.values())
        for name, grad in gradients.items():
            gap = torch.linalg.vector_norm(sums[name].view_as(grad).to(grad.dtype) - grad)
            if float(gap) > eps**0.6 * norms[name] + eps**0.85 * largest:
                raise self._unreadable(
                    [name],
                    "the examples' gradients do not add up to p.grad: call zero_grad() first, and "
                    "use the weight in its layer only",
                )

    def _unreadable(self, names: Iterable[str], reason: str) -> OptimizerError:
        return OptimizerError(
            f"{self.algorithm} cannot read the gradient of each example for {some([*names])}: "
            f"{reason}. Freeze it, give it another optimizer, or train with IVON"
        )


class PerExampleSquares(Listener):
    """The mean of g_i² over the examples.

    Where the loss is a sum over examples, ``p.grad`` becomes their mean as well.
    """

    method = "ggn"

    def _estimates(self, forward: Pass, params: dict[str, Tensor]) -> dict[Tensor, Tensor]:
        terms, n = self._read(forward, params)
        # The gradients of a mean's terms are g_i / n, those of a sum's g_i.
        scale = n if self.reduction == "mean" else 1 / n
        squares = {name: total for term in terms for name, total in term.square_sum().items()}
        means = {}
        for name, param in params.items():
            square = squares[name].to(working(param.dtype)).view_as(param)
            means[param] = square.mul_(scale)
            if self.reduction == "sum" and param.grad is not None:
                param.grad.div_(n)
        return means


def differentiated(output: Any) -> list[Tensor]:
    """The leaves of an output that have a gradient."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]


def _has_examples_first(leaf: Any, batch: int) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.shape[:1] == (batch,)


def _input_axis(leaf: Any, batch: int) -> Axis | None:
    """The first axis; None for what is no tensor, or is shared by all examples."""
    return Axis() if _has_examples_first(leaf, batch) else None


def _output_axis(output: Tensor, batch: int, grad: Tensor | None) -> Axis | None:
    """The axis of the examples: the first one, or any where the loss does not use the output."""
    dims = [dim for dim, size in enumerate(output.shape) if size == batch]
    if not dims:
        return None
    is_usable = dims[0] == 0 or grad is None
    return Axis(dim=dims[0]) if is_usable else None


def _widen(visit: Visit, gradients: Gradients, values: Mapping[str, Tensor]) -> list[list[Tensor]]:
    """Take a call's inputs and its gradients to the dtype of computation.

    Returns:
        The gradients by output, each a list of one column; zeros where none came back.
    """
    first_name = next(iter(visit.unit.names.values()))
    widen = partial(_widened, dtype=working(values[first_name].dtype))
    visit.args, visit.kwargs = tree_map_only(Tensor, widen, (visit.args, visit.kwargs))
    columns = []
    for output, grad in zip(visit.outputs, gradients, strict=True):
        cotangent = torch.zeros_like(output) if grad is None else grad
        columns.append([widen(cotangent)])
    return columns


def _widened(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


def _receiver(gradients: Gradients, position: int) -> Any:
    """A hook that adds up the gradients of an output.

    It has no reference to the graph, because a graph that its own hooks refer to is never freed.
    """

    def receive(grad: Tensor) -> None:
        before = gradients[position]
        gradients[position] = grad.detach() if before is None else before + grad.detach()

    return receive

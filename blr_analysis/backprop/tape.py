"""What goes into every layer and comes out of it while a model trains.

The gradient of one example's loss is, layer by layer, a function of the layer's inputs and of the
gradients at its outputs. The user's own forward and backward pass computes both, and a
:class:`Tape` notes them: hooks on the layers store the inputs, hooks on the layers' outputs store
the gradients that come back to them. The rules of :mod:`blr_analysis.backprop.layers` turn the two
into G_i (:func:`terms_of`). Only layers without a rule are computed twice: they are differentiated
by themselves.

A :class:`Reader` decides which passes a tape notes, and is called when one ends. A training's graph
must stay as the user made it. An analysis, which runs its own passes, uses
:func:`blr_analysis.backprop.record.record` instead: that cuts the graph below the first layer,
gives shared outputs a row for each example, and takes many cotangents. Both note the same
:class:`Visit`, by the same hook.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from blr_analysis.backprop.reading import Axes, names_of, read
from blr_analysis.backprop.record import Unit, Visit, hooked, is_plain, without_numbers
from blr_analysis.backprop.terms import Term, merged
from blr_analysis.errors import ModelError
from blr_analysis.half import working

OWN_ROUNDING = 0.6
"""A gradient may be wrong by eps to this power, relative to its own norm."""
COMMON_ROUNDING = 0.85
"""In addition it may be wrong by eps to this power, relative to the largest norm of a gradient."""

Gradients = list[Tensor | None]
"""The gradients at a layer's outputs, one by one; None where no gradient came back."""


@dataclass(eq=False)
class LayerCall:
    """One call of a layer.

    Attributes:
        visit: what went into the layer and came out of it, without the graph.
        edges: the places of the layer's outputs in autograd's graph.
        gradients: the gradients at the outputs, filled in by the backward pass.
    """

    visit: Visit
    edges: list[Any]
    gradients: Gradients

    def check_inputs(self) -> None:
        """Raise :class:`ModelError` where an input was overwritten after the layer read it."""
        self.visit.note_stale()
        if self.visit.stale:
            path = self.visit.unit.path
            raise ModelError(
                f"layer {path!r} has its input overwritten in place: use inplace=False"
            )


@dataclass(eq=False)
class Pass:
    """One call of the model.

    Attributes:
        batch: the number of examples.
        calls: the calls of the model's layers in the forward pass.
        recomputed: the calls in the backward pass that a gradient came back to, where activations
            are checkpointed and the forward pass itself had no graph.
        outputs: the model's outputs, which a reader may store for a backward pass of its own.
    """

    batch: int
    calls: list[LayerCall] = field(default_factory=list)
    recomputed: list[LayerCall] = field(default_factory=list)
    outputs: Tensor | None = None

    def gradients(
        self, outputs: Any, cotangents: Any, parameters: Sequence[Tensor] = ()
    ) -> tuple[list[Gradients], Gradients]:
        """The gradients at every call's outputs, and of these parameters, for these cotangents of
        the model's outputs.

        This backward pass leaves no trace on the calls.
        """
        edges = [edge for call in self.calls for edge in call.edges]
        before = [list(call.gradients) for call in self.calls]
        try:
            gradients = iter(
                torch.autograd.grad(
                    outputs, [*edges, *parameters], cotangents, retain_graph=True, allow_unused=True
                )
            )
        finally:  # the calls' hooks have added this pass's gradients
            for call, gradients_before in zip(self.calls, before, strict=True):
                call.gradients[:] = gradients_before
        at_calls: list[Gradients] = [
            list(islice(gradients, len(call.edges))) for call in self.calls
        ]
        return at_calls, list(gradients)

    @property
    def differentiated(self) -> list[LayerCall]:
        """The calls that a gradient came back to, the last one of the forward pass first."""
        calls = [*self.recomputed, *reversed(self.calls)]
        return [call for call in calls if any(grad is not None for grad in call.gradients)]

    def with_gradients(self, gradients: Sequence[Gradients]) -> Pass:
        """The pass as if these gradients had come back to its calls, without the calls that have
        none."""
        calls = [
            LayerCall(call.visit, [], call_gradients)
            for call, call_gradients in zip(self.calls, gradients, strict=True)
            if any(grad is not None for grad in call_gradients)
        ]
        return Pass(self.batch, calls)

    @classmethod
    def joined(cls, passes: Sequence[Pass]) -> Pass:
        """Passes of the same layers and shapes as one pass, with the rows of all of them."""
        calls = []
        for same_calls in zip(*(forward.calls for forward in passes), strict=True):
            visits = [call.visit for call in same_calls]
            args, kwargs = _joined_arguments(visits)
            outputs_by_place = zip(*(visit.outputs for visit in visits), strict=True)
            gradients_by_place = zip(*(call.gradients for call in same_calls), strict=True)
            outputs = [_joined_shapes(*same_output) for same_output in outputs_by_place]
            gradients = [_joined_rows(*same_gradient) for same_gradient in gradients_by_place]
            visit = replace(visits[0], args=args, kwargs=kwargs, outputs=outputs)
            calls.append(LayerCall(visit, [], gradients))
        return cls(sum(forward.batch for forward in passes), calls)

    @property
    def layout(self) -> list[Any]:
        """Which layers were called, and the shapes of their outputs for one example."""
        return [
            (call.visit.unit.path, len(output) // self.batch, output.shape[1:])
            for call in self.calls
            for output in call.visit.outputs
        ]

    def of_examples(self, chosen: Tensor) -> Pass:
        """The pass of some of its examples: their rows of the layers' inputs and gradients."""

        def rows(leaf: Tensor | None) -> Tensor | None:
            if not _has_rows(leaf, self.batch):
                return leaf
            if len(leaf) == self.batch:
                return leaf.index_select(0, chosen.to(leaf.device))
            by_example = leaf.unflatten(0, (self.batch, -1))
            return by_example[chosen.to(leaf.device)].flatten(0, 1)

        calls = []
        for call in self.differentiated:
            args, kwargs = tree_map_only(Tensor, rows, (call.visit.args, call.visit.kwargs))
            outputs: Any = [rows(output) for output in call.visit.outputs]
            visit = replace(call.visit, args=args, kwargs=kwargs, outputs=outputs)
            calls.append(LayerCall(visit, [], [rows(grad) for grad in call.gradients]))
        calls.reverse()  # into the order of the forward pass
        return Pass(len(chosen), calls)

    def counted(self) -> Tensor:
        """Which examples count in the loss, ``[batch]``: those that a gradient came back to."""
        gradients = [grad for call in self.differentiated for grad in call.gradients]
        with_rows = [grad for grad in gradients if _has_rows(grad, self.batch)]
        return examples_with_gradient(with_rows, self.batch)


def _joined_arguments(visits: Sequence[Visit]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one layer in several passes, with the rows of all."""
    if visits[0].is_plain:  # walking through a tree takes longer than the rows do
        return (_joined_rows(*[visit.args[0] for visit in visits]),), {}
    return tree_map(_joined_rows, *[(visit.args, visit.kwargs) for visit in visits])


def _joined_rows(*leaves: Any) -> Any:
    """The rows of one leaf in several passes; the first pass's leaf where it has no rows.

    What all examples share has one row for each pass.
    """
    first = leaves[0]
    has_rows = isinstance(first, Tensor) and first.ndim > 0
    return torch.cat(leaves) if has_rows else first


def _joined_shapes(*outputs: Tensor) -> Tensor:
    """A tensor without numbers that has the rows of all outputs."""
    n_rows = sum(len(output) for output in outputs)
    return outputs[0][:1].expand(n_rows, *outputs[0].shape[1:])


class Reader:
    """What a :class:`Tape` calls while a model trains; a subclass overrides what it needs.

    Attributes:
        needs_gradients: whether the tape stores the gradients that come back to the calls of a
            forward pass. Otherwise the reader makes a backward pass of its own.
    """

    needs_gradients = True
    _has_warned = False

    def wants(self, model: nn.Module, batch: int) -> bool:
        """Whether the pass that begins, with this number of examples, is to be noted."""
        return True

    def finished(self, forward: Pass, output: Any) -> None:
        """Called after a forward pass that was noted, with the model's output."""

    def called_outside(self, unit: Unit) -> None:
        """Called when a layer runs while no pass is noted."""

    def counts_of(self, forward: Pass) -> Tensor:
        """Which examples count in the loss, ``[batch]``; warns once where some do not."""
        counts = forward.counted()
        if not self._has_warned and not bool(counts.all()):
            self._has_warned = True
            warnings.warn(
                f"{int((~counts).sum())} of {len(counts)} examples of a minibatch have no "
                "gradient (ignore_index, weights of 0?): the loss is assumed to be the mean "
                "over the others",
                stacklevel=3,
            )
        return counts


class Tape:
    """Notes the passes of a model, from :meth:`start` to :meth:`stop`.

    Activations may be checkpointed, gradients accumulated, losses scaled, and layers called several
    times. Passes without gradients, and copies of the model, leave no trace.

    Attributes:
        passes: the passes that were noted, oldest first.
    """

    def __init__(self, model: nn.Module, reader: Reader) -> None:
        self.model = model
        self.reader = reader
        self.passes: list[Pass] = []
        self._current: Pass | None = None  # the pass that is being noted
        self._handles: list[Any] = []  # of the model's hooks
        self._layers: list[Unit] = []
        self._layer_handles: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no hooks and no passes, because a graph cannot be copied."""
        without_hooks: dict[str, Any] = {"_handles": [], "_layer_handles": []}
        return {**self.__dict__, **without_hooks, "passes": [], "_current": None}

    def start(self, units: Iterable[Unit]) -> None:
        """Put hooks on the model and on these layers of it."""

        # These are functions: with bound methods, a copy of the model would copy the tape, too.
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is self.model:
                self._enter(args, kwargs)

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if module is self.model:
                self._leave(output)

        # Each handle is stored at once, so that an interrupt leaves no hook behind.
        store = self._handles.append
        store(self.model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        self._layers = []
        for unit in units:
            if unit.module is self.model:
                store(hooked(unit, self._call))  # it must run before ``leave``
            else:
                self._layers.append(unit)
        self.watch_layers(True)
        store(self.model.register_forward_hook(leave, always_call=True))

    def watch_layers(self, is_watched: bool) -> None:
        """Put hooks on the layers, or remove them, so that other passes take no time for them.

        While passes are noted, the hooks stay: their backward pass may call the layers again.
        """
        if is_watched and not self._layer_handles:
            for unit in self._layers:
                self._layer_handles.append(hooked(unit, self._call))
        if not is_watched and not self.passes:
            self._remove_layer_hooks()

    def _remove_layer_hooks(self) -> None:
        while self._layer_handles:
            self._layer_handles.pop().remove()

    def remove_hooks(self) -> None:
        """Note no more passes; those that were noted stay."""
        self._remove_layer_hooks()
        while self._handles:
            self._handles.pop().remove()

    def stop(self) -> None:
        """Remove the hooks, and forget the passes."""
        self.passes = []
        self._current = None
        self.remove_hooks()

    def _enter(self, args: Any, kwargs: Any) -> None:
        """Begin a pass, if it has gradients and the reader wants it."""
        self._current = None
        if not torch.is_grad_enabled():
            return
        batch = _batch_of(args, kwargs)
        if self.reader.wants(self.model, batch):
            self._current = Pass(batch)
            self.passes.append(self._current)

    def _leave(self, output: Any) -> None:
        """End the pass that is being noted."""
        forward = self._current
        self._current = None
        if forward is not None and forward.calls:
            self.reader.finished(forward, output)

    def _call(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> None:
        """Note one call of a layer."""
        if not torch.is_grad_enabled():
            return
        # Activation checkpointing calls layers again in the backward pass.
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            if self.passes:
                self._note(unit, args, kwargs, output, recomputed=self.passes[-1].recomputed)
        elif self._current is None:
            self.reader.called_outside(unit)
        else:
            self._current.calls.append(self._note(unit, args, kwargs, output))

    def _note(
        self,
        unit: Unit,
        args: Any,
        kwargs: Any,
        output: Any,
        recomputed: list[LayerCall] | None = None,
    ) -> LayerCall:
        """Note a call of a layer, and put hooks on its outputs.

        Args:
            recomputed: a list to which the call is added when its first gradient comes back.
        """
        if is_plain(args, kwargs):  # walking through a tree takes longer than many a layer
            args = (args[0].detach(),)
            inputs = [*args]
        else:
            args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        leaves = leaves_with_gradient(output)
        outputs = [without_numbers(leaf) for leaf in leaves]
        visit = Visit(unit, occurrence=0, args=args, kwargs=kwargs, outputs=outputs, edges=[])
        with_versions = [tensor for tensor in inputs if not tensor.is_inference()]
        visit.versions = [(tensor, tensor._version) for tensor in with_versions]
        gradients: Gradients = [None] * len(leaves)
        if recomputed is not None or self.reader.needs_gradients:
            without_graph = LayerCall(visit, [], gradients)
            for position, leaf in enumerate(leaves):
                leaf.register_hook(_receiver(without_graph, position, recomputed))
        return LayerCall(visit, [get_gradient_edge(leaf) for leaf in leaves], gradients)


def _batch_of(args: Any, kwargs: Any) -> int:
    """The rows of the first tensor that goes into a model; 0 where none has rows."""
    first = args[0] if args else None
    if isinstance(first, Tensor) and first.ndim > 0:  # which spares a walk through a tree
        return first.shape[0]
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    return 0


def _receiver(
    call: LayerCall, position: int, recomputed: list[LayerCall] | None
) -> Callable[[Tensor], None]:
    """A hook that adds up the gradients of the call's output at this position.

    The hook has no reference to the graph: a graph that its own hooks refer to is never freed.
    """

    def receive(grad: Tensor) -> None:
        before = call.gradients[position]
        is_first = all(gradient is None for gradient in call.gradients)
        call.gradients[position] = grad.detach() if before is None else before + grad.detach()
        if is_first:
            call.check_inputs()
            if recomputed is not None:
                recomputed.append(call)

    return receive


def terms_of(
    model: nn.Module,
    calls: Sequence[LayerCall],
    gradients: Sequence[Gradients],
    axes_of: Callable[[Visit, Gradients], Axes],
    batch: int,
) -> list[Term]:
    """G_i of every layer that gradients came back to.

    Args:
        model: the model that the layers belong to.
        calls: the layers' calls.
        gradients: the gradients at the outputs of each call.
        axes_of: a function that finds the examples in a call's inputs and outputs.
        batch: the number of examples.

    Raises:
        LayerFailed: a layer cannot be differentiated by itself.
    """
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    names = names_of(model)
    terms: list[Term] = []
    for call, call_gradients in zip(calls, gradients, strict=True):
        if all(grad is None for grad in call_gradients):
            continue
        visit = call.visit
        axes = axes_of(visit, call_gradients)
        dtype = _dtype_of_computation(visit, values)
        _widen_inputs(visit, dtype)
        columns = _columns_of(visit, call_gradients, dtype)
        try:
            terms += read(names, values, visit, axes, columns, batch)
        except Exception as error:  # a layer may raise anything when it runs on one example
            raise LayerFailed(visit.unit, error) from error
    return merged(terms)


class LayerFailed(Exception):
    """A layer raised an error when it was differentiated by itself."""

    def __init__(self, unit: Unit, error: Exception) -> None:
        layer = type(unit.module).__name__
        super().__init__(f"differentiating {layer} by itself failed ({error})")
        self.unit = unit


def unlike_autograd(
    terms: Sequence[Term], gradients: Mapping[str, Tensor], outputs: Iterable[Tensor]
) -> list[str]:
    """The parameters whose Σ_i g_i differs from autograd's gradient by more than rounding.

    Gradients that are not finite pass: the optimizer refuses or skips them.

    Args:
        gradients: ``p.grad`` by name.
        outputs: the outputs of the layers. The coarsest dtype of outputs and gradients says how
            large a difference rounding explains.
    """
    sums = {name: total for term in terms for name, total in term.sum().items()}
    dtypes = {output.dtype for output in outputs} | {grad.dtype for grad in gradients.values()}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    norms = {name: float(torch.linalg.vector_norm(g)) for name, g in gradients.items()}
    largest_norm = max(norms.values())
    unlike = []
    for name, grad in gradients.items():
        gap = torch.linalg.vector_norm(sums[name].view_as(grad).to(grad.dtype) - grad)
        tolerance = eps**OWN_ROUNDING * norms[name] + eps**COMMON_ROUNDING * largest_norm
        if float(gap) > tolerance:
            unlike.append(name)
    return unlike


def leaves_with_gradient(output: Any) -> list[Tensor]:
    """The tensors in a module's output that require a gradient."""
    leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _has_rows(leaf: Any, batch: int) -> TypeGuard[Tensor]:
    """Whether a tensor has rows for each example: one, or several that stand together."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) % batch == 0


def examples_with_gradient(grads: Iterable[Tensor], batch: int) -> Tensor:
    """Which examples have a gradient at a layer's output, ``[batch]``; all where no example has.

    An example with ``ignore_index`` has no gradient, and the loss is a mean over the others. With a
    single output an example, all count: there the gradient is also 0 where a logit saturates.

    >>> examples_with_gradient([torch.tensor([[0.0, 0.0], [0.5, -0.5]])], 2)
    tensor([False,  True])
    """
    nonzero = torch.zeros(batch, dtype=torch.bool)
    for grad in grads:
        nonzero = (grad != 0).reshape(batch, -1).any(1).to(nonzero.device) | nonzero
        has_single_output = grad.numel() == batch
        if has_single_output or bool(nonzero.all()):
            return torch.ones_like(nonzero)
    return nonzero if bool(nonzero.any()) else torch.ones_like(nonzero)


def _dtype_of_computation(visit: Visit, values: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of a layer's parameters, or float32 where that is a half precision."""
    first_name = next(iter(visit.unit.names.values()))
    return working(values[first_name].dtype)


def _widen_inputs(visit: Visit, dtype: torch.dtype) -> None:
    """Convert the inputs of a call to the dtype of computation."""
    widen = partial(_widened, dtype=dtype)
    visit.args, visit.kwargs = tree_map_only(Tensor, widen, (visit.args, visit.kwargs))


def _columns_of(visit: Visit, gradients: Gradients, dtype: torch.dtype) -> list[list[Tensor]]:
    """The gradient at each output as a list of one column; zeros where no gradient came back."""
    columns = []
    for output, grad in zip(visit.outputs, gradients, strict=True):
        cotangent = torch.zeros_like(output) if grad is None else grad
        columns.append([_widened(cotangent, dtype)])
    return columns


def _widened(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    return leaf.to(dtype) if leaf.is_floating_point() else leaf

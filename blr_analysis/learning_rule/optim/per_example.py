"""Gradients of single examples, read from the user's own forward and backward pass.

A :class:`blr_analysis.backprop.tape.Tape` notes the passes between :meth:`Listener.start` and
:meth:`Listener.stop`, which surround one draw. Two checks are made in the 1st, 2nd, 4th, 8th, …
draw: Σ_i g_i must be the gradient that autograd left in ``p.grad``, and an example's outputs must
depend on no other example's row of any layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.layers import Axis
from blr_analysis.backprop.plan import units_of
from blr_analysis.backprop.reading import Axes, names_of
from blr_analysis.backprop.record import Unit, Visit
from blr_analysis.backprop.tape import (
    Gradients,
    LayerFailed,
    Pass,
    Reader,
    Tape,
    leaves_with_gradient,
    terms_of,
    unlike_autograd,
)
from blr_analysis.backprop.terms import Term
from blr_analysis.checks import one_of, some
from blr_analysis.errors import OptimizerError
from blr_analysis.half import working

NO_GRADIENT = (
    "no parameter has a gradient after sampled_params(train=True): call loss.backward() inside "
    "it, or evaluate inside sampled_params()"
)


class NoGradient(OptimizerError):
    """A draw without a backward pass."""


class Listener(Reader):
    """Reads G_i, the gradients of the examples' losses, from the passes of a model.

    Args:
        model: the module that is called in training.
        algorithm: the optimizer's name, for messages.
        reduction: ``"mean"`` or ``"sum"``: how the loss combines the examples of a batch.
    """

    method = "none"  # what the estimate is: a key of gathered.DEGREES

    def __init__(self, model: nn.Module, algorithm: str, reduction: str = "mean") -> None:
        self.model = model
        self.algorithm = algorithm
        self.reduction = one_of("loss_reduction", reduction, ("mean", "sum"))
        self.tape = Tape(model, self)
        self._params: dict[str, Tensor] = {}
        self._n_draws = 0  # the number of calls of start()

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins outside of a context."""
        return {**self.__dict__, "_params": {}}

    def start(self, params: Sequence[Tensor]) -> None:
        """Begin to note the passes of every layer that owns one of ``params``.

        Raises:
            OptimizerError: a parameter is not the model's.
        """
        self._n_draws += 1
        names = names_of(self.model)
        foreign_shapes = [tuple(param.shape) for param in params if id(param) not in names]
        if foreign_shapes:
            raise OptimizerError(
                f"parameters of shapes {foreign_shapes[:5]} are not in model=: pass "
                "the model that owns them"
            )
        self._params = {names[id(param)]: param for param in params}
        self.tape.start(self._units(names))

    def stop(self) -> None:
        """Note no further passes, and forget those that were noted."""
        self.tape.stop()
        self._params = {}

    def finish(self) -> dict[Tensor, Tensor]:
        """The curvature estimates of the parameters that have a gradient.

        Raises:
            OptimizerError: some parameter's per-example gradients cannot be read.
        """
        self.tape.remove_hooks()  # layers may run again while their gradients are read
        try:
            params = {name: p for name, p in self._params.items() if p.grad is not None}
            if not params:
                raise NoGradient(NO_GRADIENT)
            passes = [forward for forward in self.tape.passes if forward.differentiated]
            if len(passes) != 1:
                raise OptimizerError(
                    f"{len(passes)} calls of model= were differentiated in one "
                    "context: call the model once in each context, and give divided_by="
                )
            return self._estimates(passes[0], params)
        finally:
            self.stop()

    def _estimates(self, forward: Pass, params: dict[str, Tensor]) -> dict[Tensor, Tensor]:
        """The curvature estimates of ``params``, which have a gradient from this pass."""
        raise NotImplementedError

    def _units(self, names: Mapping[int, str]) -> list[Unit]:
        """The layers that own a parameter."""
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

    # Called by the tape ----------------------------------------------------------------------

    def wants(self, model: nn.Module, batch: int) -> bool:
        """True, because every pass is noted; refuse one without a tensor of examples."""
        if not batch:
            raise OptimizerError("the model was called without a tensor of examples: pass one")
        return True

    def called_outside(self, unit: Unit) -> None:
        """Refuse a layer's call outside of a pass: its number of examples is unknown."""
        raise OptimizerError(
            f"layer {unit.path!r} was called outside of the forward pass of model=: call "
            "the whole model"
        )

    def finished(self, forward: Pass, output: Any) -> None:
        """Check that an example's outputs depend on no other example's row of any layer.

        A random half of the examples is left out: only the outputs of the others are
        differentiated. Their gradient must be 0 at the rows of the examples that are left out.
        """
        batch = forward.batch
        outputs = [x for x in leaves_with_gradient(output) if _has_examples_first(x, batch)]
        if not self._check_is_due or not outputs:
            return
        generator = torch.Generator().manual_seed(self._n_draws)
        left_out = torch.randperm(batch, generator=generator)[: batch // 2]
        cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
        for cotangent in cotangents:
            cotangent[left_out.to(cotangent.device)] = 0
        gradients, _ = forward.gradients(outputs, cotangents)
        for call, call_gradients in zip(forward.calls, gradients, strict=True):
            if any(_reaches(grad, left_out, batch) for grad in call_gradients):
                raise self._unreadable(
                    call.visit.unit.names.values(),
                    "the model mixes the examples of a batch there (replace BatchNorm by "
                    "GroupNorm)",
                )

    # Reading ---------------------------------------------------------------------------------

    def _read(self, forward: Pass, params: dict[str, Tensor]) -> tuple[list[Term], int]:
        """The gradients G_i of a pass, and n, the number of examples that the loss averages."""
        gradients_at_outputs = [call.gradients for call in forward.calls]
        terms = self._terms(forward, gradients_at_outputs)
        names_read = {name for term in terms for name in term.names}
        unread = [name for name in params if name not in names_read]
        if unread:
            raise self._unreadable(unread, "no layer that owns it was called with it")
        if self._check_is_due:
            self._check_sums(params, terms, forward)
        if self.reduction == "sum":
            return terms, forward.batch
        return terms, int(self.counts_of(forward).sum())

    def _terms(self, forward: Pass, gradients: Sequence[Gradients]) -> list[Term]:
        """G_i of every layer, from the gradients at the outputs of each call."""

        def axes_of(visit: Visit, call_gradients: Gradients) -> Axes:
            return self._axes(visit, call_gradients, forward.batch)

        try:
            return terms_of(self.model, forward.calls, gradients, axes_of, forward.batch)
        except LayerFailed as failure:
            raise self._unreadable(failure.unit.names.values(), str(failure)) from failure

    def _axes(self, visit: Visit, gradients: Gradients, batch: int) -> Axes:
        """Where the examples are in the inputs and in the outputs of a call."""
        inputs = [_input_axis(leaf, batch) for leaf in tree_leaves((visit.args, visit.kwargs))]
        outputs = []
        for output, grad in zip(visit.outputs, gradients, strict=True):
            axis = _output_axis(output, batch, grad)
            if axis is not None:
                outputs.append(axis)
        has_rule = visit.unit.rule is not None  # a rule reads the gradient off the first input
        lacks_input = has_rule and (not inputs or inputs[0] is None)
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
        """Whether the number of draws is a power of two."""
        return self._n_draws & (self._n_draws - 1) == 0

    def _check_sums(self, params: Mapping[str, Tensor], terms: list[Term], forward: Pass) -> None:
        """Raise :class:`OptimizerError` where Σ_i g_i is not ``p.grad``."""
        gradients = {name: p.grad.detach() for name, p in params.items() if p.grad is not None}
        outputs = [output for call in forward.calls for output in call.visit.outputs]
        wrong_names = unlike_autograd(terms, gradients, outputs)
        if wrong_names:
            raise self._unreadable(
                wrong_names[:1],
                "the examples' gradients do not add up to p.grad: call zero_grad() first, and "
                "use the weight in its layer only",
            )

    def _unreadable(self, names: Iterable[str], reason: str) -> OptimizerError:
        """The error for parameters whose per-example gradients cannot be read."""
        return OptimizerError(
            f"{self.algorithm} cannot read the gradient of each example for {some([*names])}: "
            f"{reason}. Freeze it, give it another optimizer, or train with IVON"
        )


class PerExampleSquares(Listener):
    """The mean of g_i² over the examples, where g_i is the gradient of an example's loss.

    Where the loss of the batch is a sum, ``p.grad`` becomes the mean of g_i as well.
    """

    method = "ggn"

    def _estimates(self, forward: Pass, params: dict[str, Tensor]) -> dict[Tensor, Tensor]:
        terms, n = self._read(forward, params)
        # Of a mean loss the terms are G_i = g_i / n, so that mean g_i² = n Σ G_i².
        # Of a sum they are G_i = g_i, so that mean g_i² = Σ G_i² / n.
        scale = n if self.reduction == "mean" else 1 / n
        squares = {name: total for term in terms for name, total in term.square_sum().items()}
        means = {}
        for name, param in params.items():
            square = squares[name].to(working(param.dtype)).view_as(param)
            means[param] = square.mul_(scale)
            if self.reduction == "sum" and param.grad is not None:
                param.grad.div_(n)
        return means


def _has_examples_first(leaf: Any, batch: int) -> TypeGuard[Tensor]:
    """Whether this is a tensor whose first axis has the length of the batch."""
    return isinstance(leaf, Tensor) and leaf.shape[:1] == (batch,)


def _reaches(grad: Tensor | None, examples: Tensor, batch: int) -> bool:
    """Whether a gradient with a row for each example is not 0 in the rows of these examples."""
    if not _has_examples_first(grad, batch):
        return False
    return bool(grad[examples.to(grad.device)].any())


def _input_axis(leaf: Any, batch: int) -> Axis | None:
    """The first axis; None where the leaf is no tensor, or all examples share it."""
    return Axis() if _has_examples_first(leaf, batch) else None


def _output_axis(output: Tensor, batch: int, grad: Tensor | None) -> Axis | None:
    """The axis of the examples in a call's output; None where there is none.

    It must be the first one, unless no gradient comes back to the output.
    """
    dims = [dim for dim, size in enumerate(output.shape) if size == batch]
    if not dims:
        return None
    is_usable = dims[0] == 0 or grad is None
    return Axis(dim=dims[0]) if is_usable else None

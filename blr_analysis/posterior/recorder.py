"""Kronecker factors of the curvature, collected by hooks while a model trains.

An optimizer's state knows one number per weight. For a layer that multiplies its inputs a with a
matrix, hooks see what a Kronecker precision is made of (Martens & Grosse, ICML 2015): of some
steps, with d the gradients of the examples' losses at the layer's outputs,

    A = E_i Σ_t a_it a_itᵀ,    G = E_i Σ_t d_it d_itᵀ,    S = N · A ⊗ G / T + δ

over examples i and positions t, T of them, without padding; parameters of other layers (norms,
embeddings, heads of language models) get S = N · E_i g_i² + δ. With labels "given" it is an
empirical Fisher, which at the end of a training has little left of what was learned by heart. With
labels "drawn" from the model's predictions it is the Fisher itself, and no scale of the loss
matters: see :mod:`blr_analysis.posterior.drawn`.
:class:`blr_analysis.Checkpoints` records near its checkpoints alone. On six kinds of networks, its
posteriors predict retraining as well as those of :func:`blr_analysis.fit_laplace`, within .03 in
linear datamodeling score (``python -m benchmarks.field``).
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.fallback import pulled
from blr_analysis.backprop.layers import Axis
from blr_analysis.backprop.matrices import Joint
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.plan import units_of
from blr_analysis.backprop.reading import Axes
from blr_analysis.backprop.record import Unit, Visit, leaves_of
from blr_analysis.backprop.tape import (
    Gradients,
    LayerCall,
    LayerFailed,
    Pass,
    Reader,
    Tape,
    leaves_with_gradient,
    terms_of,
    unlike_autograd,
)
from blr_analysis.backprop.terms import Term
from blr_analysis.checks import instance, one_of, positive_int, positive_number, some
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.half import working
from blr_analysis.models import unwrapped
from blr_analysis.posterior.drawn import drawn_errors
from blr_analysis.posterior.structures.kronecker import (
    LARGEST,
    Kronecker,
    eigenbases,
    is_too_large,
)
from blr_analysis.ranks import is_sharded

EVERY = 100  # one pass in so many is recorded
TOGETHER = 2048  # rows of one product: passes are collected until they have so many
MOST_OUTPUTS = 2**27  # in a pass with drawn labels: more would take too much memory
FEW_MULTIPLICATIONS = 4e6  # in the products of a pass: they take no time beside the rest
COUNTS = ("passes", "recorded", "drawn")
Squares = dict[str, Tensor]  # E_i g_i² by parameter
STATE = {"passes", "recorded", "shapes", "joints", "means"}


class KroneckerRecorder(Reader):
    """Averages of a model's Kronecker factors over its training, for
    :meth:`blr_analysis.Posterior.from_recorder`.

    Make it before training, train as ever, and keep it: hooks look at one of ``every`` passes in
    training mode. It holds as much as the factors, I² + O² numbers for each layer of I inputs and O
    outputs. The loss must be a mean (or sum) over the examples of a batch; what else it is
    multiplied with (``1 / k`` for k accumulated microbatches, a scaler's factor) is ``scale``.

    Args:
        model: what is trained. Its trainable parameters must belong to layers that
            :mod:`blr_analysis.backprop.layers` has a rule for (Linear, convolutions, embeddings,
            norms), or be vectors of modules without buffers, as in norms of any definition. With
            drawn labels the others have S = N · E_i g_i² + δ from the gradient of each pass; with
            given ones freeze them.
        every: passes for each that is recorded. Some 20 recorded passes, or 1,000 examples, should
            come together: take 20 to 50 in a training of 1,000 steps.
        beta2: None: the plain mean over the run; else a running mean that forgets, as IVON's h.
        reduction: of the loss over the examples of a batch, "mean" or "sum".
        scale: what the loss is multiplied with besides; of a mean over the tokens of sequences
            ``1 / tokens per sequence``.
        labels: "given", those of the loss as it is trained; or "drawn" from the model's
            predictions, where the loss is a cross-entropy (:mod:`blr_analysis.posterior.drawn`),
            which takes a backward pass to the layers' outputs more. ``reduction`` and ``scale``
            are then found, the gradient's mean is recorded too, and other losses have given labels.

    Raises:
        ModelError: nothing to train, parameters of a layer without a rule, or a sharded model.
        InputError: settings out of range.

    Example:
        >>> import torch, blr_analysis as blr
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 3))
        >>> recorder = KroneckerRecorder(model, every=1)
        >>> X, y = torch.randn(30, 2), torch.randint(3, (30,))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for _ in range(5):
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(X), y).backward()
        ...     optimizer.step()
        >>> recorder.recorded
        5
        >>> blr.Posterior.from_recorder(recorder, model, n_data=30, prior_precision=1.0).structure
        'kron'
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = EVERY,
        beta2: float | None = None,
        reduction: str = "mean",
        scale: float = 1.0,
        labels: str = "given",
    ) -> None:
        instance("model", model, nn.Module, "the torch.nn.Module that is trained")
        model = unwrapped(model)
        self.every = positive_int("every", every)
        if beta2 is not None and not (isinstance(beta2, float) and 0 < beta2 < 1):
            raise InputError(f"beta2 must be None or between 0 and 1, got {beta2!r}")
        self.beta2 = beta2
        self.reduction = one_of("reduction", reduction, ("mean", "sum"))
        self.scale = positive_number("scale", scale)
        self.labels = one_of("labels", labels, ("given", "drawn"))
        self._model = model
        self._parameters = _trainable(model)
        units = units_of(model, set(self._parameters))
        self._units = [unit for unit in units if _is_readable(unit, model)]
        of_layers = {name for unit in self._units for name in unit.names.values()}
        self._without_rule = [name for name in self._parameters if name not in of_layers]
        _check_recordable(self._parameters, self._units)
        if self._without_rule and self.labels == "given":
            raise ModelError(
                f"no layer rule for {some(self._without_rule)}: freeze them, or use fit_laplace"
            )
        self.passes = 0  # in training mode, so far
        self._recorded = 0  # passes that were recorded
        self._drawn = 0  # those of them with drawn labels
        self._joints: dict[str, Joint] = {}
        # By "KEY.input", "KEY.output" and "KEY.positions" of a layer, or by a parameter's name.
        self._means: dict[str, Tensor] = {}
        self._moved: set[str] = set()  # keys of the means that the last passes moved
        self._read_outs = _read_outs(model, self._units)
        self._has_padding = False  # whether the loss is one of sequences
        self._checked: set[str] = set()  # paths of modules without a rule that were differentiated
        self.accumulates = reduction == "sum" or scale != 1  # no warning where gradients add up
        self._follows_recorded = False  # whether the pass before this one was recorded
        self._is_recorded = False  # whether this pass is recorded
        self._collected: list[Pass] = []  # recorded passes that the means do not hold yet
        # Of parameters without a rule, E_i g_i² in each of the collected passes.
        self._collected_squares: list[Squares] = []
        self._squares_of: dict[Pass, Squares] = {}  # of passes whose loss is none to draw from
        self._layout: list[Any] = []  # layers and shapes of the collected passes
        self._rows_of_example = 1.0  # the most rows that an example of them has in a layer
        self._used: dict[tuple[int, int], Tensor | None] = {}  # the examples that products are of
        self._has_other_labels = False  # whether some loss was not recognised
        self._gradients: dict[str, Tensor] = {}  # Σ over recorded passes of an example's gradient
        self._is_drawing = False  # whether the backward pass of drawn labels is running
        self._gradient_scale: float | None = None  # from a parameter's gradient to an example's
        self._tape = Tape(model, self)
        self._tape.start(self._units)
        self._gradient_handles: list[Any] = []  # of hooks that are there in recorded passes alone

    def __repr__(self) -> str:
        facts = [f"{self._recorded} of {self.passes} passes", f"every={self.every}"]
        facts.append(f"up to {in_bytes(self.nbytes)}")
        return f"KroneckerRecorder({', '.join(facts)})"

    @property
    def nbytes(self) -> int:
        """The bytes that its factors and gradients take, once all layers were recorded."""
        sizes: dict[str, int] = {}  # by name: a table that is also a head counts once
        for unit in self._units:
            for name in unit.names.values():
                weight = self._parameters[name]
                n_numbers = weight.numel()
                if name not in self._read_outs:
                    n_numbers = _numbers_of_factors(unit.module, weight)
                if self.labels == "drawn":
                    n_numbers += weight.numel()  # of the gradient
                sizes[name] = n_numbers * working(weight.dtype).itemsize
        for name in self._without_rule:
            weight = self._parameters[name]
            sizes[name] = 2 * weight.numel() * working(weight.dtype).itemsize
        return sum(sizes.values())

    def remove(self) -> None:
        """Take the hooks off the model; the recorded means stay."""
        self._settle()
        self._multiply()
        self._tape.stop()
        self._watch_gradients(False)

    # Of a tape -------------------------------------------------------------------------------

    def wants(self, model: nn.Module, batch: int) -> bool:
        """Whether the tape notes the pass that begins: one of ``every`` passes in training mode,
        and the next one, which tells whether gradients add up.

        When a pass begins, the pass before it is over.
        """
        if not model.training:
            return False
        if self._tape.passes:
            self._settle()
        self._gradient_scale = None
        self._follows_recorded = self._is_recorded
        self._is_recorded = self.passes % self.every == 0 and batch > 0
        self.passes += 1
        self._watch_gradients(self._is_recorded and self.labels == "drawn")
        if self._is_recorded:
            self._tape.passes.clear()  # passes that no gradient came back to
            self._squares_of.clear()
        is_watching = self.labels == "given" and not self.accumulates
        may_accumulate = self._follows_recorded and is_watching
        is_noted = self._is_recorded or (may_accumulate and batch > 0)
        self._tape.watch_layers(is_noted)
        return is_noted

    def finished(self, forward: Pass, output: Any) -> None:
        """After the forward pass: wait for the loss's gradient at the outputs.

        With given labels, release the graph, and look out for gradients of an earlier pass.
        """
        outputs = outputs_of(output, forward.batch)
        self._has_padding = outputs is not None and outputs.ndim == 3
        if outputs is not None and self.labels == "drawn":
            self._read_by_squares(forward)
            forward.outputs = outputs
            outputs.register_hook(partial(self._loss_met, weakref.ref(forward)))
            return
        if self._without_rule and self._is_recorded:
            raise self._not_recorded("a model of several outputs")
        unit = forward.calls[0].visit.unit
        for call in forward.calls:
            call.edges = []
        if not self.accumulates:
            for leaf in leaves_with_gradient(output):
                leaf.register_hook(lambda _: self._warn_of_accumulation(unit))
        if not self._is_recorded:
            self._tape.passes.remove(forward)

    def _warn_of_accumulation(self, unit: Unit) -> None:
        """Warn, once, where the gradients of an earlier pass are still there."""
        gradients = [self._parameters[name].grad for name in unit.names.values()]
        are_there = any(g is not None and bool(g.any()) for g in gradients)
        if are_there and not self.accumulates:
            self.accumulates = True
            warnings.warn(
                "the gradients of k passes add up: if you divide the loss by k, pass scale=1/k, "
                "or the factors are k² times too small",
                stacklevel=2,
            )

    # Drawn labels ----------------------------------------------------------------------------

    def _read_by_squares(self, forward: Pass) -> None:
        """Record layers whose rows are no examples, as where sequences stand first, by the
        gradients of drawn labels, like parameters without a rule."""
        with_factors = {name for joint in self._joints.values() for name in joint.names}
        paths = set()
        for call in forward.calls:
            unit = call.visit.unit
            has_factors = not with_factors.isdisjoint(unit.names.values())
            if not has_factors and not _rows_are_read(call.visit, forward.batch):
                paths.add(unit.path)
        new_units = [unit for unit in self._units if unit.path in paths]
        if new_units:
            self._multiply()
            self._units = [unit for unit in self._units if unit.path not in paths]
            names = [name for unit in new_units for name in unit.names.values()]
            self._without_rule += [name for name in names if name not in self._without_rule]
        without_rule = set(self._without_rule)
        forward.calls[:] = [
            call
            for call in forward.calls
            if without_rule.isdisjoint(call.visit.unit.names.values())
            and _rows_are_read(call.visit, forward.batch)
        ]

    def _loss_met(self, reference: Callable[[], Pass | None], gradient: Tensor) -> None:
        """When the backward pass begins, at the outputs: run another one, of drawn labels."""
        forward = reference()
        if self._is_drawing or forward is None or forward not in self._tape.passes:
            return
        outputs = forward.outputs
        assert outputs is not None
        drawn = drawn_errors(outputs.detach(), gradient, self.passes)
        gradients = None if drawn is None else self._backward(forward, outputs, drawn.errors)
        if drawn is not None and gradients is not None:
            examples = None
            n_examples = forward.batch
            if not drawn.all_counted:
                examples = gradient.reshape(forward.batch, -1).any(1).nonzero().flatten()
                n_examples = len(examples)
            at_calls, of_parameters = gradients
            squares = self._mean_squares(of_parameters, n_examples)
            self._collect(forward.with_gradients(at_calls), examples, squares)
            self._gradient_scale = 1 / (drawn.weight * n_examples)
            self.needs_gradients = self._has_other_labels
            self._tape.passes.remove(forward)
        elif not bool(gradient.isfinite().all()):  # a gradient scaler skips the step
            self._tape.passes.remove(forward)
        else:
            self._has_other_labels = True
            self.needs_gradients = True
            if self._without_rule:
                self._squares_of[forward] = self._squares_of_given(forward, outputs, gradient)
        forward.outputs = None
        for call in forward.calls:
            call.edges = []

    def _backward(
        self, forward: Pass, outputs: Tensor, errors: Tensor
    ) -> tuple[list[Gradients], Gradients] | None:
        """The gradients of these errors at the layers' outputs, and of the parameters without a
        rule; None where there is no second backward pass, as through reentrant checkpoints."""
        parameters = [self._parameters[name] for name in self._without_rule]
        self._is_drawing = True
        try:
            gradients = forward.gradients([outputs], [errors], parameters)
            for call in forward.calls:
                call.check_inputs()
            return gradients
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            forward.recomputed.clear()
            return None
        finally:
            self._is_drawing = False

    def _squares_of_given(self, forward: Pass, outputs: Tensor, gradient: Tensor) -> Squares:
        """E_i g_i² of the labels of the loss, for parameters without a rule.

        With a random sign s_i for each example, E (Σ_i s_i g_i)² = Σ_i g_i².
        """
        counted = gradient.reshape(forward.batch, -1).any(1)
        n_examples = max(int(counted.sum()), 1)
        factor = 1 / self.scale
        if self.reduction == "mean":
            factor = n_examples / self.scale
        generator = torch.Generator(gradient.device).manual_seed(self.passes)
        bits = torch.randint(2, counted.shape, generator=generator, device=gradient.device)
        signs = (2 * bits - 1).to(gradient.dtype)
        by_example = signs.reshape(-1, *[1] * (gradient.ndim - 1))
        gradients = self._backward(forward, outputs, gradient * by_example)
        if gradients is None:
            raise self._not_recorded("a model with reentrant checkpoints")
        return self._mean_squares(_scaled(gradients[1], factor), n_examples)

    def _mean_squares(self, gradients: Gradients, n_examples: int) -> Squares:
        """E_i g_i² of the parameters without a rule, from their gradients Σ_i g_i.

        Examples' gradients are independent with mean 0, because their labels, or signs, are drawn.
        """
        squares = {}
        for name, gradient in zip(self._without_rule, gradients, strict=True):
            if gradient is None:
                gradient = torch.zeros_like(self._parameters[name])
            wide = gradient.detach().to(working(gradient.dtype))
            squares[name] = wide.square().div_(n_examples)
        return squares

    def _not_recorded(self, cause: str) -> ModelError:
        return ModelError(
            f"{some(self._without_rule)} of {cause} cannot be recorded: freeze them, or use "
            "fit_laplace"
        )

    def _collect(self, forward: Pass, counted: Tensor | None, squares: Squares) -> None:
        """Collect a pass with drawn labels: products of several passes at once are faster.

        An output that all examples share has the sum of their gradients. Their labels are drawn
        independently, so the mean square of that sum is the sum of the examples' mean squares.

        Args:
            counted: the indices of the examples with a loss; None: all.
            squares: E_i g_i² of parameters without a rule.
        """
        n_counted = forward.batch if counted is None else len(counted)
        for call in forward.calls:
            if len(call.visit.outputs[0]) == 1 < forward.batch:
                call.gradients = _scaled(call.gradients, n_counted**-0.5)
        layout = forward.layout
        if self._layout != layout:
            self._multiply()
            self._layout = layout
            self._used = {}
            rows = [len(call.visit.outputs[0]) * positions_of(call.visit) for call in forward.calls]
            self._rows_of_example = max(rows, default=0) / forward.batch
        self._collected_squares.append(squares)
        if any(isinstance(call.visit.unit.module, nn.RNNBase) for call in forward.calls):
            self._collected.append(forward)  # examples are not first in a layer's last states
            self._multiply()
            return
        used = self._used_examples(forward, n_counted)
        if used is not None:
            examples = used if counted is None else counted[used.to(counted.device)]
            forward = forward.of_examples(examples)
        elif counted is not None and n_counted < forward.batch:
            forward = forward.of_examples(counted)
        self._collected.append(forward)
        is_first = self._recorded == 0  # what cannot be recorded is said at once
        if is_first or len(self._collected) * forward.batch * self._rows_of_example >= TOGETHER:
            self._multiply()

    def _used_examples(self, forward: Pass, n_counted: int) -> Tensor | None:
        """Numbers of the examples with a loss that products are made of; None: all of them."""
        batch = forward.batch
        if (batch, n_counted) not in self._used:
            n_used = self._affordable(forward, n_counted)
            spread = torch.arange(n_used) * n_counted // n_used
            self._used[batch, n_counted] = spread if n_used < n_counted else None
        return self._used[batch, n_counted]

    def _affordable(self, forward: Pass, n_examples: int) -> int:
        """How many examples the products are made of: at least a quarter of them.

        If the products need many multiplications, they need at most a quarter of the pass's own.
        """
        of_pass = 0.0
        of_products = 0.0
        for call in forward.calls:
            visit = call.visit
            weight = self._parameters[next(iter(visit.unit.names.values()))]
            if weight.ndim > 1 and not isinstance(visit.unit.module, nn.Embedding):
                rows = weight.shape[0]
                columns = weight.numel() // rows
                positions = positions_of(visit) * len(visit.outputs[0]) / forward.batch
                of_pass += 6 * positions * rows * columns
                of_products += 2 * positions * (rows**2 + columns**2)
        allowed = max(of_pass * n_examples / 4, FEW_MULTIPLICATIONS)
        most = allowed / max(of_products, 1.0)
        return min(n_examples, max(math.ceil(most), math.ceil(n_examples / 4)))

    @torch.no_grad()
    def _multiply(self) -> None:
        """Move the means by the collected passes."""
        if self._collected:
            n_passes = len(self._collected)
            forward = Pass.joined(self._collected)
            self._collected = []
            self._drawn += n_passes
            self._average(self._terms_of_drawn(forward, n_passes), n_passes)
            for name in self._without_rule:
                squares = [of_pass[name] for of_pass in self._collected_squares]
                self._move_mean(name, torch.stack(squares).mean(0), n_passes)
            self._count_absent(n_passes)
            self._collected_squares = []

    def _terms_of_drawn(self, forward: Pass, n_passes: int) -> list[Term]:
        """G_i of the layers that have a row for each example, or one row for each pass.

        Layers with other rows have no G_i and are skipped.
        """
        terms: list[Term] = []
        for batch in dict.fromkeys((forward.batch, n_passes)):
            calls = [call for call in forward.calls if _rows_stand_for(call.visit, batch)]
            if batch == n_passes != forward.batch:
                calls = [call for call in calls if len(call.visit.outputs[0]) == n_passes]
            counts = torch.ones(batch, dtype=torch.bool)
            terms += self._terms(Pass(batch, calls), counts, factor=1.0)
        return terms

    def _watch_gradients(self, is_watched: bool) -> None:
        """Put hooks on the parameters, or remove them: they cost time in passes that are not
        recorded."""
        if is_watched and not self._gradient_handles:
            for name, parameter in self._parameters.items():
                take = partial(self._take_gradient, name)
                self._gradient_handles.append(parameter.register_hook(take))
        while self._gradient_handles and not is_watched:
            self._gradient_handles.pop().remove()

    def _take_gradient(self, name: str, gradient: Tensor) -> None:
        """Add up a parameter's gradients in passes with drawn labels."""
        if self._gradient_scale is None or self._is_drawing:
            return
        gradient = gradient.detach()
        if name not in self._gradients:
            wide = working(gradient.dtype)
            self._gradients[name] = torch.zeros_like(gradient, dtype=wide)
        self._gradients[name].add_(gradient, alpha=self._gradient_scale)

    # Reading ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _settle(self) -> None:
        """Move the means by the recorded passes whose backward pass is over."""
        for forward in list(self._tape.passes):
            has_calls = bool(forward.differentiated)
            if has_calls or forward in self._squares_of:
                self._tape.passes.remove(forward)
                self._average(self._given(forward) if has_calls else [])
                for name, squares in self._squares_of.pop(forward, {}).items():
                    self._move_mean(name, squares, 1)
                self._count_absent(1)

    def _given(self, forward: Pass) -> list[Term]:
        """G_i of the labels of the loss."""
        if self.reduction == "sum":
            all_examples = torch.ones(forward.batch, dtype=torch.bool)
            return self._terms(forward, all_examples, factor=1 / self.scale)
        counts = self.counts_of(forward)
        return self._terms(forward, counts, factor=int(counts.sum()) / self.scale)

    @torch.no_grad()
    def _terms(self, forward: Pass, counts: Tensor, factor: float) -> list[Term]:
        """G_i of the examples that count, ``factor`` times the gradients that came back."""
        if not bool(counts.all()):
            forward = forward.of_examples(counts.nonzero().flatten())
        calls = forward.differentiated
        gradients = [_scaled(call.gradients, factor) for call in calls]
        with torch.autocast(counts.device.type, enabled=False):
            axes_of = partial(_axes, forward.batch)
            try:
                terms = terms_of(self._model, calls, gradients, axes_of, forward.batch)
            except LayerFailed as failure:
                path = failure.unit.path
                raise ModelError(
                    f"layer {path!r} cannot be recorded: {failure}; freeze it, or use fit_laplace"
                ) from failure
            self._check_without_rule(calls, gradients, terms)
            return terms

    def _check_without_rule(
        self, calls: Sequence[LayerCall], gradients: Sequence[Gradients], terms: Sequence[Term]
    ) -> None:
        """Raise :class:`ModelError` unless Σ_i G_i of modules without a rule is the gradient of
        all examples at once, when they are recorded first."""
        unchecked = [
            (call, cotangents)
            for call, cotangents in zip(calls, gradients, strict=True)
            if call.visit.unit.rule is None and call.visit.unit.path not in self._checked
        ]
        if not unchecked:
            return
        totals: dict[str, Tensor] = {}
        for call, cotangents in unchecked:
            for name, total in _gradient_of_module(call.visit, cotangents).items():
                totals[name] = totals[name] + total if name in totals else total
        outputs = [output for call, _ in unchecked for output in call.visit.outputs]
        own_terms = [term for term in terms if not totals.keys().isdisjoint(term.names)]
        if names := unlike_autograd(own_terms, totals, outputs):
            raise ModelError(
                f"{some(names)} cannot be recorded: their module is random or mixes examples; "
                "freeze them, or use fit_laplace"
            )
        self._checked.update(call.visit.unit.path for call, _ in unchecked)

    @torch.no_grad()
    def _average(self, terms: Sequence[Term], n_passes: int = 1) -> None:
        """Move the means by the G_i of so many passes."""
        self._recorded += n_passes
        self._moved.clear()
        for term in terms:
            is_read_out = not self._read_outs.isdisjoint(term.names)
            if not isinstance(term, Outer) or is_read_out or is_too_large(term):
                for name, squares in term.square_sum().items():
                    self._move_mean(name, squares.div_(term.n_examples), n_passes)
                continue
            right, left = term.second_moments(padded=self._has_padding)
            n_positions = right.new_tensor(term.n_positions * term.n_examples)
            if self._has_padding:
                n_positions = term.used_positions().sum().to(right)
            key = term.joint.key
            self._joints[key] = term.joint
            self._move_mean(f"{key}.input", right.div_(term.n_examples), n_passes)
            self._move_mean(f"{key}.output", left.div_(term.n_examples), n_passes)
            self._move_mean(f"{key}.positions", n_positions.div_(term.n_examples), n_passes)

    def _move_mean(self, key: str, values: Tensor, n_passes: int) -> None:
        """The mean of all passes, or one that forgets, without the bias of its start."""
        if key not in self._means:
            self._means[key] = torch.zeros_like(values)
        self._means[key].lerp_(values.to(self._means[key]), self._weight(n_passes))
        self._moved.add(key)

    def _count_absent(self, n_passes: int) -> None:
        """Count 0 for what no example of these passes reached, as an expert without tokens."""
        if not self._moved:
            return
        for key in self._means.keys() - self._moved:
            self._means[key].mul_(1 - self._weight(n_passes))

    def _weight(self, n_passes: int) -> float:
        """The weight of the last passes in the means."""
        if self.beta2 is None:
            return n_passes / self._recorded
        return (1 - self.beta2) / (1 - self.beta2**self._recorded)

    @property
    def recorded(self) -> int:
        """How many passes were recorded."""
        self._settle()
        self._multiply()
        return self._recorded

    @property
    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A ``[g, I', I']`` (1 joined to a for the bias) and G ``[g, O, O]`` by the layer's weight:
        means over the recorded examples."""
        self._settle()
        self._multiply()
        return {k: (self._means[f"{k}.input"], self._means[f"{k}.output"]) for k in self._joints}

    @property
    def gradient(self) -> dict[str, Tensor] | None:
        """The mean of an example's gradient, by parameter; None where it was not recorded."""
        if self._gradients.keys() != self._parameters.keys():
            return None
        return {name: self._gradients[name] / self.recorded for name in self._parameters}

    @property
    def labels_used(self) -> str:
        """In words: how many recorded passes had labels of their own."""
        recorded = self.recorded
        if not self._drawn:
            return "of the loss as trained"
        drawn = "drawn from the predictions"
        if self._drawn == recorded:
            return drawn
        return f"{drawn} in {self._drawn} of {recorded} passes, else of the loss as trained"

    def structure(self, model: nn.Module, n_data: int) -> Kronecker:
        """N · A ⊗ G / T, without a prior.

        Raises:
            ModelError: the model is not the one that was recorded, as it was.
            PosteriorError: nothing was recorded, or not of all parameters, or it is not finite.
        """
        parameters = _trainable(model)
        factors = self.factors
        self._check_model(parameters)
        self._check_recorded(parameters)
        joined = {key: (self._joints[key], *pair) for key, pair in factors.items()}
        blocks = eigenbases(joined, parameters, n_data)
        form = Kronecker.empty(blocks, parameters)
        values = {n: n_data * self._means[n].to(parameters[n]) for n in form.plain}
        for block in blocks:
            assert block.left is not None
            input_factor, output_factor = factors[block.key]
            of_rows = _eigenvalues(output_factor, block.left)
            of_columns = _eigenvalues(input_factor, block.right)
            scale = n_data / float(self._means[f"{block.key}.positions"])
            values[block.key] = scale * of_rows.unsqueeze(-1) * of_columns.unsqueeze(-2)
        return form.with_values(values)

    def _check_model(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise :class:`ModelError` where the recorded model is another now, or not this one."""
        shapes = {name: p.shape for name, p in parameters.items()}
        recorded_shapes = {name: p.shape for name, p in self._parameters.items()}
        tensors_now = [id(p) for p in _trainable(self._model).values()]
        recorded_tensors = [id(p) for p in self._parameters.values()]
        if shapes != recorded_shapes or tensors_now != recorded_tensors:
            raise ModelError("the model changed since its recorder was made: make a new one")

    def _check_recorded(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise :class:`PosteriorError` unless every parameter has finite means."""
        if not self._recorded:
            raise PosteriorError("nothing was recorded: make the recorder before training")
        names = set(self._means)
        for joint in self._joints.values():
            names.update(joint.names)
        if missing := [name for name in parameters if name not in names]:
            raise PosteriorError(f"{some(missing)} took no part in recorded passes: freeze them")
        for key, mean in self._means.items():
            if not bool(mean.isfinite().all()):
                raise PosteriorError(f"the recorded {key!r} is not finite; was training stable?")

    def state_dict(self) -> dict[str, Any]:
        """All that was recorded: tensors and numbers, to be saved beside the optimizer's state."""
        self._settle()
        self._multiply()
        return {
            "passes": self.passes,
            "recorded": self._recorded,
            "drawn": self._drawn,
            "shapes": {n: list(p.shape) for n, p in self._parameters.items()},
            "joints": [joint.record() for joint in self._joints.values()],
            "means": {k: m.clone() for k, m in self._means.items()},
            "gradients": {k: g.clone() for k, g in self._gradients.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            ModelError: it is another model's.
            InputError: it is no such state.
        """
        if not isinstance(state, Mapping) or not state.keys() >= STATE:
            raise InputError("this is no state of a KroneckerRecorder; pass its state_dict()")
        shapes = {name: list(p.shape) for name, p in self._parameters.items()}
        saved_shapes = state["shapes"]
        names = shapes | saved_shapes
        if odd := [name for name in names if shapes.get(name) != saved_shapes.get(name)]:
            raise ModelError(f"the state was recorded on another model: {some(sorted(odd))}")
        device = next(iter(self._parameters.values())).device
        self.passes = int(state["passes"])
        self._recorded = int(state["recorded"])
        self._drawn = int(state.get("drawn", 0))
        self._means = {key: mean.to(device, copy=True) for key, mean in state["means"].items()}
        gradients = state.get("gradients", {})
        self._gradients = {key: g.to(device, copy=True) for key, g in gradients.items()}
        self._joints = {joint.key: joint for joint in map(Joint.read, state["joints"])}
        self._collected = []
        self._collected_squares = []
        self._squares_of = {}
        self._tape.passes.clear()


def between(earlier: Mapping[str, Any] | None, later: Mapping[str, Any]) -> dict[str, Any]:
    """What a recorder without ``beta2`` saw between two of its states; None: from the beginning.

    Where nothing was recorded between them it is all that was seen before.
    """
    n_earlier = earlier["recorded"] if earlier else 0
    n_between = later["recorded"] - n_earlier
    if earlier is None or n_between <= 0:
        return dict(later)
    means = {}
    for key, mean in later["means"].items():
        total = later["recorded"] * mean
        if key in earlier["means"]:
            total = total - n_earlier * earlier["means"][key].to(mean)
        means[key] = total / n_between
    before = earlier["gradients"]
    gradients = {
        name: total - before[name].to(total) if name in before else total
        for name, total in later["gradients"].items()
    }
    return {
        **later,
        "recorded": n_between,
        "drawn": later["drawn"] - earlier["drawn"],
        "means": means,
        "gradients": gradients,
    }


def is_recordable(model: nn.Module) -> bool:
    """Whether a recorder sees all that is trained in a model."""
    model = unwrapped(model)
    parameters = _trainable(model)
    units = units_of(model, set(parameters))
    try:
        _check_recordable(parameters, [unit for unit in units if _is_readable(unit, model)])
    except ModelError:
        return False
    return True


def _numbers_of_factors(module: nn.Module, weight: Tensor) -> int:
    """How many numbers a layer's matrix has in A, G and T; any other parameter has its squares."""
    is_matrix = weight.ndim > 1 and not isinstance(module, nn.Embedding)
    if not is_matrix:
        return weight.numel()
    groups = int(getattr(module, "groups", 1))
    rows = weight.shape[0] // groups
    columns = weight.numel() // weight.shape[0]
    if max(rows, columns) > LARGEST:
        return weight.numel()
    return groups * ((columns + 1) ** 2 + rows**2) + 1


def in_bytes(count: int) -> str:
    """In words.

    >>> in_bytes(3_000), in_bytes(5 * 2**20)
    ('2.9 KiB', '5.0 MiB')
    """
    for unit in ("KiB", "MiB"):
        count /= 1024  # type: ignore[assignment]
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


def _check_recordable(parameters: Mapping[str, nn.Parameter], units: Sequence[Unit]) -> None:
    """Raise :class:`ModelError` where hooks cannot see all that is trained."""
    if not parameters:
        raise ModelError("the model has no trainable parameters to record")
    if sharded := [name for name, p in parameters.items() if is_sharded(p)]:
        raise ModelError(
            f"{some(sharded)} are sharded over processes, where layers see no whole weights: "
            "record under DistributedDataParallel, or use fit_laplace"
        )
    if not units:
        raise ModelError(f"no layer rule for {some(list(parameters))}: use fit_laplace")


def _is_readable(unit: Unit, model: nn.Module) -> bool:
    """Whether hooks see what each example contributes to the parameters of a module.

    The others are recorded by the gradient of drawn labels. They are modules without a rule,
    recurrent layers whose examples are not first, and the projections of
    ``torch.nn.MultiheadAttention``, which runs them without calling them.
    """
    module = unit.module
    parent = model.get_submodule(unit.path.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return False
    if isinstance(module, nn.RNNBase) and not module.batch_first:
        return False
    return unit.rule is not None or _is_small(unit)


def _is_small(unit: Unit) -> bool:
    """Whether a module without a rule is differentiated by itself: its parameters are vectors, and
    it has neither modules inside of it nor buffers that a call may change."""
    module = unit.module
    has_vectors = all(p.ndim <= 1 for p in module.parameters())
    has_children = next(module.children(), None) is not None
    has_buffers = next(module.buffers(), None) is not None
    return has_vectors and not has_children and not has_buffers


def _read_outs(model: nn.Module, units: Sequence[Unit]) -> set[str]:
    """The parameters of language models' heads, which get a diagonal: a factor would have the
    square of the vocabulary.

    The weight of such a head has the shape of an embedding's table.
    """
    tables = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Embedding)}
    names: set[str] = set()
    for unit in units:
        weight = unit.module._parameters.get("weight")
        is_table = isinstance(unit.module, nn.Embedding)
        if weight is not None and tuple(weight.shape) in tables and not is_table:
            names.update(unit.names.values())
    return names


def positions_of(visit: Visit) -> int:
    """The positions in one row of a layer's output: pixels of channels first, tokens, else 1."""
    output = visit.outputs[0]
    channels = output.shape[1] if output.ndim > 1 else 1
    is_convolution = isinstance(visit.unit.module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if not is_convolution and output.ndim > 1:
        channels = output.shape[-1]
    return max(1, output.shape[1:].numel() // channels)


def outputs_of(output: Any, batch: int) -> Tensor | None:
    """The one output that the loss is taken of: ``logits``, or all that there is; None: several."""
    logits = getattr(output, "logits", None)
    leaves = [leaf for leaf in leaves_with_gradient(output) if leaf.ndim and len(leaf) == batch]
    if isinstance(logits, Tensor) and logits.requires_grad:
        leaves = [logits]
    if len(leaves) != 1 or leaves[0].numel() > MOST_OUTPUTS:
        return None
    return leaves[0]


def _scaled(gradients: Gradients, factor: float) -> Gradients:
    """In a precision that bears the factor."""
    return [None if g is None else g.to(working(g.dtype)) * factor for g in gradients]


def _rows_stand_for(visit: Visit, batch: int) -> bool:
    """Whether so many examples stand first in what goes in and out of a layer."""
    x = tree_leaves((visit.args, visit.kwargs))[0]
    rows = len(visit.outputs[0])
    return rows > 0 and rows % batch == 0 and len(x) == rows


def _rows_are_read(visit: Visit, batch: int) -> bool:
    """Whether a layer has rows for each example, or one row that all examples share.

    No rows at all, as of an expert without tokens, say nothing of the rows of later passes.
    """
    is_shared = len(visit.outputs[0]) == 1 and _rows_stand_for(visit, 1)
    return is_shared or _rows_stand_for(visit, batch)


def _axes(batch: int, visit: Visit, gradients: Gradients) -> Axes:
    """Examples stand first, in one row each or in several that stand together."""
    leaves = tree_leaves((visit.args, visit.kwargs))
    rows = len(visit.outputs[0])
    if not _rows_stand_for(visit, batch):
        raise ModelError(
            f"layer {visit.unit.path!r} sees {len(leaves[0])} rows for {batch} examples: put "
            "examples first"
        )
    axis = Axis(repeats=rows // batch)
    inputs = [axis if _has_rows(leaf, rows) else None for leaf in leaves]
    return inputs, [axis] * len(visit.outputs)


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == rows


def _gradient_of_module(visit: Visit, cotangents: Gradients) -> dict[str, Tensor]:
    """The gradient of a module's own parameters for all examples at once, by name."""
    module = visit.unit.module
    wide = {a: p.to(working(p.dtype)) for a, p in module.named_parameters()}
    leaves = leaves_of({attribute: wide[attribute] for attribute in visit.unit.names})
    with torch.enable_grad():
        output = functional_call(module, {**wide, **leaves}, visit.args, visit.kwargs)
    outputs = leaves_with_gradient(output)
    shaped = [
        torch.zeros_like(f) if cotangent is None else cotangent.to(f.dtype)
        for f, cotangent in zip(outputs, cotangents, strict=True)
    ]
    gradients = pulled(outputs, shaped, leaves, last=True)
    return dict(zip(visit.unit.names.values(), gradients, strict=True))


def _eigenvalues(factor: Tensor, basis: Tensor) -> Tensor:
    """The diagonal of a factor in its eigenbasis."""
    rotated = basis.mT @ factor.to(basis) @ basis
    return rotated.diagonal(0, -2, -1).clamp_min(0)


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}

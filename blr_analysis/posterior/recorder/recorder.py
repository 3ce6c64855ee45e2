"""Kronecker factors of the curvature, collected by hooks while a model trains.

An optimizer's state knows one number per weight. For a layer that multiplies its inputs a with a
matrix, hooks see what a Kronecker precision is made of (Martens & Grosse, ICML 2015): of some
steps, with d the gradients of the examples' losses at the layer's outputs,

    A = E_i Σ_t a_it a_itᵀ,    G = E_i Σ_t d_it d_itᵀ,    S = N · A ⊗ G / T + δ

over examples i and positions t, T of them, without padding; in recurrent layers 1/T is replaced by
E_i ‖g_i‖² / (tr A · tr G); parameters of other layers (norms, embeddings, heads of language models)
get S = N · E_i g_i² + δ. With labels "given" it is an empirical Fisher, which at the end of a
training has little left of what was learned by heart. With labels "drawn" from the model's
predictions it is the Fisher itself, and no scale of the loss matters: see
:mod:`blr_analysis.posterior.drawn`.
:class:`blr_analysis.Checkpoints` records near its checkpoints alone. On six kinds of networks, its
posteriors predict retraining as well as those of :func:`blr_analysis.fit_laplace`, within .03 in
linear datamodeling score (``python -m benchmarks.field``).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.backprop.matrices import Joint
from blr_analysis.backprop.record import Unit, Visit
from blr_analysis.backprop.tape import Gradients, Pass, Reader, Tape, leaves_with_gradient
from blr_analysis.backprop.terms import Term
from blr_analysis.checks import instance, one_of, positive_int, positive_number, some
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.models import unwrapped
from blr_analysis.posterior.drawn import Drawn, drawn_errors
from blr_analysis.posterior.recorder.collected import CollectedPasses
from blr_analysis.posterior.recorder.gradient_sums import GradientSums
from blr_analysis.posterior.recorder.layer_terms import LayerTerms, scaled
from blr_analysis.posterior.recorder.means import Means
from blr_analysis.posterior.recorder.recordable import (
    bytes_of_recording,
    check_recordable,
    in_bytes,
    read_outs_of,
    readable_units,
    recurrent_names,
    trainable,
)
from blr_analysis.posterior.recorder.rows import (
    call_with_gradient,
    n_terms_of_loss,
    outputs_of,
    rows_are_read,
    rows_stand_for,
)
from blr_analysis.posterior.recorder.second_pass import (
    SecondPass,
    Squares,
    mean_squares,
    with_random_signs,
)
from blr_analysis.posterior.recorder.states import check_state, shapes_of
from blr_analysis.posterior.structures.kronecker import Kronecker

EVERY = 100  # one pass in so many is recorded


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
            are then found, the gradient's mean is recorded too, and other losses have given labels:
            they must be a mean over examples, of sequences over tokens.

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
        self.passes = 0  # in training mode, so far
        self.accumulates = reduction == "sum" or scale != 1  # no warning where gradients add up
        self._choose_layers(model)
        self._drawn = 0  # recorded passes with drawn labels
        self._follows_recorded = False  # whether the pass before this one was recorded
        self._is_recorded = False  # whether this pass is recorded
        self._has_padding = False  # whether the loss is one of sequences
        self._has_other_labels = False  # whether some loss was not recognised
        self._means = Means(beta2, self._read_outs, recurrent_names(self._units))
        self._layer_terms = LayerTerms(model)
        self._second_pass = SecondPass()
        self._gradient_sums = GradientSums(self._parameters, self._second_pass)
        self._collected = CollectedPasses(self._parameters)
        # Of passes whose loss is none to draw labels from:
        self._squares_of: dict[Pass, Squares] = {}
        self._n_terms_of: dict[Pass, int] = {}  # how many terms their loss is a mean of
        self._tape = Tape(model, self)
        self._tape.start(self._units)

    def _choose_layers(self, model: nn.Module) -> None:
        """Find the layers with a rule, and the parameters of the others.

        Raises:
            ModelError: nothing can be recorded, or not with labels "given".
        """
        self._model = model
        self._parameters = trainable(model)
        self._units = readable_units(model)
        names_of_layers = {name for unit in self._units for name in unit.names.values()}
        self._without_rule = [name for name in self._parameters if name not in names_of_layers]
        check_recordable(self._parameters, self._units)
        if self._without_rule and self.labels == "given":
            raise ModelError(
                f"no layer rule for {some(self._without_rule)}: freeze them, or use fit_laplace"
            )
        self._read_outs = read_outs_of(model, self._units)

    def __repr__(self) -> str:
        facts = [f"{self._means.recorded} of {self.passes} passes", f"every={self.every}"]
        facts.append(f"up to {in_bytes(self.nbytes)}")
        return f"KroneckerRecorder({', '.join(facts)})"

    @property
    def nbytes(self) -> int:
        """The bytes that its factors and gradients take, once all layers were recorded."""
        return bytes_of_recording(
            self._parameters,
            self._units,
            self._read_outs,
            self._without_rule,
            has_gradients=self.labels == "drawn",
        )

    def remove(self) -> None:
        """Take the hooks off the model; the recorded means stay."""
        self._complete()
        self._tape.stop()
        self._gradient_sums.watch(False)

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
        self._gradient_sums.scale = None
        self._follows_recorded = self._is_recorded
        self._is_recorded = self.passes % self.every == 0 and batch > 0
        self.passes += 1
        self._gradient_sums.watch(self._is_recorded and self.labels == "drawn")
        if self._is_recorded:
            self._tape.passes.clear()  # passes that no gradient came back to
            self._squares_of.clear()
            self._n_terms_of.clear()
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
            self._read_by_squares(forward, rows_are_read)
            forward.outputs = outputs
            call_with_gradient(outputs, partial(self._loss_met, weakref.ref(forward)))
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
            remedy = "pass scale=1/k" if self.labels == "given" else "use fit_laplace"
            warnings.warn(
                f"the gradients of k passes add up: if you divide the loss by k, {remedy}, or the "
                "factors are k² times too small",
                stacklevel=2,
            )

    def _read_by_squares(self, forward: Pass, are_read: Callable[[Visit, int], bool]) -> None:
        """Record layers whose rows are no examples, as where sequences stand first, by the
        gradients of whole passes, like parameters without a rule.

        Args:
            are_read: whether a call of a layer has rows from which so many examples are read.
                Rows that all examples share are read with drawn labels alone.
        """
        with_factors = {name for joint in self._means.joints.values() for name in joint.names}
        paths = set()
        for call in forward.calls:
            unit = call.visit.unit
            has_factors = not with_factors.isdisjoint(unit.names.values())
            if not has_factors and not are_read(call.visit, forward.batch):
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
            and are_read(call.visit, forward.batch)
        ]

    # When the backward pass begins -----------------------------------------------------------

    def _loss_met(self, reference: Callable[[], Pass | None], gradient: Tensor) -> None:
        """When the backward pass begins, at the outputs: run another one, of drawn labels."""
        forward = reference()
        if forward is None or self._second_pass.is_running:
            return
        outputs = forward.outputs
        if forward not in self._tape.passes or outputs is None:
            return
        drawn = drawn_errors(outputs.detach(), gradient, self.passes)
        is_recorded = drawn is not None and self._record_drawn(forward, drawn, gradient)
        if is_recorded:
            self.needs_gradients = self._has_other_labels
            self._tape.passes.remove(forward)
        elif not bool(gradient.isfinite().all()):  # a gradient scaler skips the step
            self._tape.passes.remove(forward)
        else:
            self._has_other_labels = True
            self.needs_gradients = True
            self._n_terms_of[forward] = max(1, n_terms_of_loss(gradient))
            self._read_by_squares(forward, rows_stand_for)
            if not self.accumulates and forward.calls:
                self._warn_of_accumulation(forward.calls[0].visit.unit)
            if self._without_rule:
                self._squares_of[forward] = self._squares_of_given(forward, gradient)
        forward.outputs = None
        for call in forward.calls:
            call.edges = []

    def _record_drawn(self, forward: Pass, drawn: Drawn, gradient: Tensor) -> bool:
        """Collect a pass with drawn labels; return whether it could be differentiated again.

        Args:
            gradient: of the loss as it is trained, at the outputs.
        """
        gradients = self._second_gradients(forward, drawn.errors)
        if gradients is None:
            return False
        at_calls, of_parameters = gradients
        examples = None
        n_examples = forward.batch
        if not drawn.all_counted:
            examples = gradient.reshape(forward.batch, -1).any(1).nonzero().flatten()
            n_examples = len(examples)
        squares = mean_squares(self._parameters_without_rule, of_parameters, n_examples)
        self._collect(forward.with_gradients(at_calls), examples, squares)
        self._gradient_sums.scale = 1 / (drawn.weight * n_examples)
        return True

    def _squares_of_given(self, forward: Pass, gradient: Tensor) -> Squares:
        """E_i g_i² of the labels of the loss, for parameters without a rule."""
        counted = gradient.reshape(forward.batch, -1).any(1)
        n_examples = max(int(counted.sum()), 1)
        factor = 1 / self.scale
        if self.reduction == "mean":
            factor = self._n_terms_of[forward] / self.scale
        signed = with_random_signs(gradient, seed=self.passes)
        gradients = self._second_gradients(forward, signed)
        if gradients is None:
            raise self._not_recorded("a model with reentrant checkpoints")
        _, of_parameters = gradients
        return mean_squares(
            self._parameters_without_rule, scaled(of_parameters, factor), n_examples
        )

    def _second_gradients(
        self, forward: Pass, errors: Tensor
    ) -> tuple[list[Gradients], Gradients] | None:
        """As :meth:`SecondPass.gradients`, of the parameters without a rule."""
        assert forward.outputs is not None
        parameters = list(self._parameters_without_rule.values())
        return self._second_pass.gradients(forward, forward.outputs, errors, parameters)

    @property
    def _parameters_without_rule(self) -> dict[str, nn.Parameter]:
        return {name: self._parameters[name] for name in self._without_rule}

    def _not_recorded(self, cause: str) -> ModelError:
        return ModelError(
            f"{some(self._without_rule)} of {cause} cannot be recorded: freeze them, or use "
            "fit_laplace"
        )

    # After the backward pass -----------------------------------------------------------------

    def _collect(self, forward: Pass, counted: Tensor | None, squares: Squares) -> None:
        """Collect a pass with drawn labels, and move the means where there are enough.

        Args:
            counted: the indices of the examples with a loss; None: all.
            squares: E_i g_i² of parameters without a rule.
        """
        layout = forward.layout
        if layout != self._collected.layout:
            self._multiply()
            self._collected.begin(forward, layout)
        are_enough = self._collected.add(forward, counted, squares)
        is_first = self._means.recorded == 0  # what cannot be recorded is said at once
        if are_enough or is_first:
            self._multiply()

    @torch.no_grad()
    def _multiply(self) -> None:
        """Move the means by the collected passes."""
        if not self._collected.passes:
            return
        forward, n_passes = self._collected.emptied()
        squares = self._collected.emptied_squares()
        self._drawn += n_passes
        terms = self._layer_terms.of_drawn(forward, n_passes)
        self._means.add(terms, squares, n_passes, has_padding=self._has_padding)

    @torch.no_grad()
    def _settle(self) -> None:
        """Move the means by the recorded passes whose backward pass is over."""
        for forward in list(self._tape.passes):
            has_calls = bool(forward.differentiated)
            if not has_calls and forward not in self._squares_of:
                continue
            self._tape.passes.remove(forward)
            terms = self._given(forward) if has_calls else []
            squares = self._squares_of.pop(forward, {})
            self._means.add(terms, squares, 1, has_padding=self._has_padding)

    def _given(self, forward: Pass) -> list[Term]:
        """G_i of the labels of the loss."""
        if self.reduction == "sum":
            counts = torch.ones(forward.batch, dtype=torch.bool)
            factor = 1 / self.scale
        else:
            counts = self.counts_of(forward)
            n_terms = self._n_terms_of.pop(forward, int(counts.sum()))
            factor = n_terms / self.scale
        return self._layer_terms.of_examples(forward, counts, factor)

    def _complete(self) -> None:
        """Move the means by every pass that is over."""
        self._settle()
        self._multiply()

    # What was recorded -----------------------------------------------------------------------

    @property
    def recorded(self) -> int:
        """How many passes were recorded."""
        self._complete()
        return self._means.recorded

    @property
    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A ``[g, I', I']`` (1 joined to a for the bias) and G ``[g, O, O]`` by the layer's weight:
        means over the recorded examples."""
        self._complete()
        return self._means.factors

    @property
    def gradient(self) -> dict[str, Tensor] | None:
        """The mean of an example's gradient, by parameter; None where it was not recorded."""
        return self._gradient_sums.mean(self.recorded)

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
        self._complete()
        parameters = trainable(model)
        self._check_model(parameters)
        self._check_recorded(parameters)
        return self._means.structure(parameters, n_data)

    def _check_model(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise :class:`ModelError` where the recorded model is another now, or not this one."""
        tensors_now = [id(p) for p in trainable(self._model).values()]
        recorded_tensors = [id(p) for p in self._parameters.values()]
        has_same_shapes = shapes_of(parameters) == shapes_of(self._parameters)
        if not has_same_shapes or tensors_now != recorded_tensors:
            raise ModelError("the model changed since its recorder was made: make a new one")

    def _check_recorded(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise :class:`PosteriorError` unless every parameter has finite means."""
        if not self._means.recorded:
            raise PosteriorError("nothing was recorded: make the recorder before training")
        recorded_names = self._means.recorded_names
        if missing := [name for name in parameters if name not in recorded_names]:
            raise PosteriorError(f"{some(missing)} took no part in recorded passes: freeze them")
        for key, mean in self._means.values.items():
            if not bool(mean.isfinite().all()):
                raise PosteriorError(f"the recorded {key!r} is not finite; was training stable?")

    def state_dict(self) -> dict[str, Any]:
        """All that was recorded: tensors and numbers, to be saved beside the optimizer's state."""
        self._complete()
        means = self._means
        return {
            "passes": self.passes,
            "recorded": means.recorded,
            "drawn": self._drawn,
            "shapes": shapes_of(self._parameters),
            "joints": [joint.record() for joint in means.joints.values()],
            "means": {key: mean.clone() for key, mean in means.values.items()},
            "gradients": {name: g.clone() for name, g in self._gradient_sums.sums.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            ModelError: it is another model's.
            InputError: it is no such state.
        """
        check_state(state, self._parameters)
        device = next(iter(self._parameters.values())).device
        self.passes = int(state["passes"])
        self._drawn = int(state.get("drawn", 0))
        means = Means(self.beta2, self._read_outs, recurrent_names(self._units))
        means.recorded = int(state["recorded"])
        means.values = {key: mean.to(device, copy=True) for key, mean in state["means"].items()}
        means.joints = {joint.key: joint for joint in map(Joint.read, state["joints"])}
        self._means = means
        gradients = state.get("gradients", {})
        sums = {name: gradient.to(device, copy=True) for name, gradient in gradients.items()}
        self._gradient_sums.sums = sums
        self._collected.forget()
        self._squares_of = {}
        self._n_terms_of = {}
        self._tape.passes.clear()

"""Kronecker factors of the curvature, collected by hooks while a model trains.

An optimizer's state knows one number per weight. For a layer that multiplies its inputs a with a
matrix, hooks see what a Kronecker precision is made of (Martens & Grosse, ICML 2015): of some
steps, with d the gradients of the examples' losses at the layer's outputs,

    A = E_i Σ_t a_it a_itᵀ,    G = E_i Σ_t d_it d_itᵀ,    S = N · A ⊗ G / T + δ

over examples i and positions t, T of them; parameters of other layers (norms, embeddings) get
S = N · E_i g_i² + δ. The labels are those of the loss as it is trained: an empirical Fisher, which
at the end of a training has little left of what was learned by heart. The mean over the run has:
on two small networks for digits, influence under what was recorded agreed with retraining as under
the factors of :func:`blr_analysis.fit_laplace` at the same δ (linear datamodeling scores of .46 and
.59 for both with every fifth pass recorded, .44 and .58 with every 25th), without a pass over the
data after training; under AdamW's own diagonal the second scored .25.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.layers import Axis
from blr_analysis.backprop.matrices import Joint
from blr_analysis.backprop.plan import units_of
from blr_analysis.backprop.reading import Axes
from blr_analysis.backprop.record import Unit, Visit
from blr_analysis.backprop.tape import (
    Gradients,
    Pass,
    Reader,
    Tape,
    differentiated,
    terms_of,
    warn_of_uncounted,
)
from blr_analysis.backprop.terms import Term
from blr_analysis.checks import instance, one_of, positive_int, positive_number, some
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.half import working
from blr_analysis.posterior.structures.kronecker import Kronecker, eigenbases
from blr_analysis.ranks import is_sharded
from blr_analysis.task import unwrapped

EVERY = 100  # passes for each that is recorded
STATE = {"passes", "recorded", "shapes", "joints", "positions", "means"}


class KroneckerRecorder(Reader):
    """Averages of a model's Kronecker factors over its training, for
    :meth:`blr_analysis.Posterior.from_recorder`.

    Make it before training, train as ever, and keep it: hooks look at one of ``every`` passes in
    training mode. It holds as much as the factors, I² + O² numbers for each layer of I inputs and O
    outputs. The loss must be a mean (or sum) over the examples of a batch; what else it is
    multiplied with (``1 / k`` for k accumulated microbatches, a scaler's factor) is ``scale``.

    Args:
        model: what is trained. Its trainable parameters must belong to layers that
            :mod:`blr_analysis.backprop.layers` has a rule for: Linear, convolutions, embeddings,
            norms; freeze others.
        every: passes for each that is recorded. Some 20 recorded passes, or 1,000 examples, should
            come together: take 20 to 50 in a training of 1,000 steps.
        beta2: None: the plain mean over the run; else a running mean that forgets, as IVON's h.
        reduction: of the loss over the examples of a batch, "mean" or "sum".
        scale: what the loss is multiplied with besides; of a mean over the tokens of sequences
            ``1 / tokens per sequence``.

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
    ) -> None:
        instance("model", model, nn.Module, "the torch.nn.Module that is trained")
        model = unwrapped(model)
        self.every = positive_int("every", every)
        if beta2 is not None and not (isinstance(beta2, float) and 0 < beta2 < 1):
            raise InputError(f"beta2 must be None or between 0 and 1, got {beta2!r}")
        self.beta2 = beta2
        self.reduction = one_of("reduction", reduction, ("mean", "sum"))
        self.scale = positive_number("scale", scale)
        self._model = model
        self._parameters = _trainable(model)
        self._units = units_of(model, set(self._parameters))
        _check_recordable(self._parameters, self._units)
        self.passes = 0  # in training mode, so far
        self._recorded = 0  # passes that were recorded
        self._joints: dict[str, Joint] = {}
        self._means: dict[str, Tensor] = {}  # "KEY.input", "KEY.output", or a parameter's name
        self._positions: dict[str, float] = {}
        self._has_warned = False
        self.accumulates = reduction == "sum" or scale != 1  # no warning where gradients add up
        self._follows_recorded = False  # whether the pass before this one was recorded
        self._is_recorded = False  # whether this one is
        self._tape = Tape(model, self)
        self._tape.start(self._units)

    def __repr__(self) -> str:
        return f"KroneckerRecorder({self._recorded} of {self.passes} passes, every={self.every})"

    def remove(self) -> None:
        """Take the hooks off the model; what was recorded stays."""
        self._settle()
        self._tape.stop()

    # Of a tape -------------------------------------------------------------------------------

    def wants(self, model: nn.Module, batch: int) -> bool:
        """One of ``every`` passes in training mode; and the next one, which tells whether gradients
        add up. When a pass begins, the pass before it is over."""
        if not model.training:
            return False
        self._settle()
        self._follows_recorded = self._is_recorded
        self._is_recorded = self.passes % self.every == 0 and batch > 0
        self.passes += 1
        if self._is_recorded:
            self._tape.passes.clear()  # of some no gradient came back
        may_accumulate = self._follows_recorded and not self.accumulates
        return self._is_recorded or (may_accumulate and batch > 0)

    def finished(self, forward: Pass, output: Any) -> None:
        """Let go of the graph, and look out for gradients of an earlier pass."""
        unit = forward.calls[0].visit.unit
        for call in forward.calls:
            call.edges = []
        if not self.accumulates:
            for leaf in differentiated(output):
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
                "gradients of k passes add up: where the loss is divided by k, give scale=1/k, "
                "else factors are k² times too small",
                stacklevel=2,
            )

    # Reading ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _settle(self) -> None:
        """Average in the recorded passes whose backward pass is over."""
        for forward in list(self._tape.passes):
            if forward.differentiated:
                self._tape.passes.remove(forward)
                self._average(self._terms(forward))

    def _terms(self, forward: Pass) -> list[Term]:
        """G_i of the examples of the pass that count in its loss, which is their mean."""
        if self.reduction == "mean":
            counts = forward.counted()
            if not bool(counts.all()):
                if not self._has_warned:
                    self._has_warned = warn_of_uncounted(counts)
                forward = forward.of_examples(counts.nonzero().flatten())
        calls = forward.differentiated
        factor = (forward.batch if self.reduction == "mean" else 1) / self.scale
        gradients = [_scaled(call.gradients, factor) for call in calls]
        return terms_of(self._model, calls, gradients, partial(_axes, forward.batch), forward.batch)

    def _average(self, terms: Sequence[Term]) -> None:
        """Average in what a pass showed."""
        self._recorded += 1
        for term in terms:
            factors = term.factors()
            if factors is None:
                for name, squares in term.square_sum().items():
                    self._move_mean(name, squares.div_(term.n_examples))
                continue
            joint, right, left = factors
            self._joints[joint.key] = joint
            self._move_mean(f"{joint.key}.input", right.div_(term.n_examples))
            self._move_mean(f"{joint.key}.output", left.div_(term.n_examples))
            self._positions[joint.key] = float(getattr(term, "positions", 1))

    def _move_mean(self, key: str, values: Tensor) -> None:
        """The mean of all passes, or one that forgets, without the bias of its start."""
        if key not in self._means:
            self._means[key] = values
            return
        if self.beta2 is None:
            weight = 1 / self._recorded
        else:
            weight = (1 - self.beta2) / (1 - self.beta2**self._recorded)
        self._means[key].lerp_(values.to(self._means[key]), weight)

    @property
    def recorded(self) -> int:
        """How many passes were recorded."""
        self._settle()
        return self._recorded

    @property
    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A ``[g, I', I']`` (1 joined to a for the bias) and G ``[g, O, O]`` by the layer's weight:
        means over the recorded examples."""
        self._settle()
        return {k: (self._means[f"{k}.input"], self._means[f"{k}.output"]) for k in self._joints}

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
            scale = n_data / self._positions[block.key]
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
        return {
            "passes": self.passes,
            "recorded": self._recorded,
            "shapes": {n: list(p.shape) for n, p in self._parameters.items()},
            "joints": [joint.record() for joint in self._joints.values()],
            "positions": dict(self._positions),
            "means": {k: m.clone() for k, m in self._means.items()},
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
        self._positions = dict(state["positions"])
        self._means = {key: mean.to(device, copy=True) for key, mean in state["means"].items()}
        self._joints = {joint.key: joint for joint in map(Joint.read, state["joints"])}
        self._tape.passes.clear()


def _check_recordable(parameters: Mapping[str, nn.Parameter], units: Sequence[Unit]) -> None:
    """Raise :class:`ModelError` where hooks cannot see all that is trained."""
    if not parameters:
        raise ModelError("the model has no trainable parameters to record")
    if sharded := [name for name, p in parameters.items() if is_sharded(p)]:
        raise ModelError(
            f"{some(sharded)} are sharded over processes, where layers see no whole weights: "
            "record under DistributedDataParallel, or use fit_laplace"
        )
    without_rule = [name for u in units if u.rule is None for name in u.names.values()]
    if without_rule:
        raise ModelError(f"no layer rule for {some(without_rule)}: freeze them, or use fit_laplace")


def _scaled(gradients: Gradients, factor: float) -> Gradients:
    """In a precision that bears the factor."""
    return [None if g is None else g.to(working(g.dtype)) * factor for g in gradients]


def _axes(batch: int, visit: Visit, gradients: Gradients) -> Axes:
    """Examples stand first, in one row each or in several that stand together."""
    x = tree_leaves((visit.args, visit.kwargs))[0]
    rows = len(visit.outputs[0])
    if rows % batch or len(x) != rows:
        raise ModelError(
            f"layer {visit.unit.path!r} sees {len(x)} rows for {batch} examples: put examples first"
        )
    axis = Axis(repeats=rows // batch)
    return [axis], [axis]


def _eigenvalues(factor: Tensor, basis: Tensor) -> Tensor:
    """The diagonal of a factor in its eigenbasis."""
    rotated = basis.mT @ factor.to(basis) @ basis
    return rotated.diagonal(0, -2, -1).clamp_min(0)


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}

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
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.layers import Axis, Call
from blr_analysis.backprop.matrices import Joint
from blr_analysis.backprop.plan import units_of
from blr_analysis.backprop.record import Unit, counted, warn_of_uncounted
from blr_analysis.backprop.terms import Term, merged
from blr_analysis.checks import instance, one_of, positive_int, positive_number, some
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.posterior.structures.kronecker import Kronecker, eigenbases
from blr_analysis.ranks import is_sharded
from blr_analysis.task import unwrapped

EVERY = 100  # passes for each that is recorded
STATE = {"passes", "recorded", "shapes", "joints", "positions", "means"}


class KroneckerRecorder:
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
        self.beta2, self.reduction = beta2, one_of("reduction", reduction, ("mean", "sum"))
        self.scale = positive_number("scale", scale)
        self._model, self._parameters = model, _trainable(model)
        self._units = units_of(model, set(self._parameters))
        if not self._parameters:
            raise ModelError("the model has no trainable parameters to record")
        if sharded := [n for n, p in self._parameters.items() if is_sharded(p)]:
            said = f"{some(sharded)} are sharded over processes, where layers see no whole weights"
            raise ModelError(f"{said}: record under DistributedDataParallel, or use fit_laplace")
        if odd := [n for u in self._units if u.rule is None for n in u.names.values()]:
            raise ModelError(f"no layer rule for {some(odd)}: freeze them, or use fit_laplace")
        self.passes = 0  # in training mode, seen so far
        self._recorded = 0  # of them
        self._joints: dict[str, Joint] = {}
        self._means: dict[str, Tensor] = {}  # "KEY.input", "KEY.output", or a parameter's name
        self._positions: dict[str, float] = {}
        self._batch = 0  # examples of the pass that is recorded now; 0: none is
        self._seen: list[tuple[Unit, Tensor, Tensor, int]] = []  # layer, a, d, examples
        self._warned = False
        self.accumulates = reduction == "sum" or scale != 1  # no warning where gradients add up
        self._watched = False
        hooks = [
            u.module.register_forward_hook(self._visit(u), with_kwargs=True) for u in self._units
        ]
        self._handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True), *hooks]

    def __repr__(self) -> str:
        return f"KroneckerRecorder({self._recorded} of {self.passes} passes, every={self.every})"

    def remove(self) -> None:
        """Take the hooks off the model; what was recorded stays."""
        self._settle()
        self._batch = 0
        for handle in self._handles:
            handle.remove()

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A pass begins: the one before is over."""
        if not (model.training and torch.is_grad_enabled()):
            self._batch = 0
            return
        after = bool(self._seen)  # a recorded pass was the one before
        self._settle()
        self.passes += 1
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim]
        record = (self.passes - 1) % self.every == 0 and bool(inputs)
        self._batch = len(inputs[0]) if record else 0
        self._watched = (record or after) and not self.accumulates

    def _visit(self, unit: Unit) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not output.requires_grad:
                return
            if self._watched:
                self._watched = False
                output.register_hook(lambda _: self._look(unit))
            if not self._batch:
                return
            if module is not unit.module:  # of a copy of the model, which took the hooks along
                return
            batch = self._batch
            x = (args[0] if args else next(iter(kwargs.values()))).detach()
            version = x._version

            def gradient(grad: Tensor) -> None:
                if x._version != version:
                    said = f"layer {unit.path!r} has its input overwritten in place"
                    raise ModelError(f"{said}; use inplace=False, or fit_laplace")
                self._take(unit, x, grad.detach(), batch)

            output.register_hook(gradient)

        return hook

    def _look(self, unit: Unit) -> None:
        """Warn, once, where the gradients of an earlier pass are still there: accumulation."""
        held = [self._parameters[n].grad for n in unit.names.values()]
        if not self.accumulates and any(g is not None and bool(g.any()) for g in held):
            self.accumulates = True
            said = "gradients of k passes add up: where the loss is divided by k, give scale=1/k"
            warnings.warn(f"{said}, else factors are k² times too small", stacklevel=2)

    @torch.no_grad()
    def _take(self, unit: Unit, x: Tensor, grad: Tensor, batch: int) -> None:
        like = self._parameters[next(iter(unit.names.values()))].detach()
        if x.is_floating_point():
            x = x.to(like)
        grad = grad.to(like)
        if len(grad) % batch or len(x) != len(grad):
            seen = f"{len(x)} rows for {batch} examples"
            raise ModelError(f"layer {unit.path!r} sees {seen}: put examples first")
        self._seen.append((unit, x, grad, batch))

    @torch.no_grad()
    def _terms(self) -> list[Term]:
        """G_i of the examples of the pass that count in its loss, which is their mean."""
        (seen, self._seen), terms = (self._seen, []), []
        chosen = None
        if self.reduction == "mean" and len({batch for *_, batch in seen}) == 1:
            counts = counted([grad for _, _, grad, _ in seen], seen[0][-1])
            if not bool(counts.all()):
                chosen = counts.nonzero().flatten().to(seen[0][2].device)
                self._warned = self._warned or warn_of_uncounted(counts)
        for unit, x, grad, batch in seen:
            axis = Axis(repeats=len(grad) // batch)
            if chosen is not None:
                x, grad = (v.unflatten(0, (batch, -1))[chosen].flatten(0, 1) for v in (x, grad))
                batch = len(chosen)
            grad = grad * ((batch if self.reduction == "mean" else 1) / self.scale)
            own = {a: self._parameters[n].detach() for a, n in unit.names.items()}
            call = Call(unit.module, (x,), {}, batch, axis, axis, unit.names, own)
            assert unit.rule is not None
            terms += unit.rule(call, [grad])
        return merged(terms)

    @torch.no_grad()
    def _settle(self) -> None:
        """Average in what the last recorded pass showed, once its backward pass is over."""
        if not self._seen:
            return
        terms = self._terms()
        self._recorded += 1
        for term in terms:
            factors = term.factors()
            b = term.n_examples
            if factors is None:
                for name, squares in term.square_sum().items():
                    self._average(name, squares.div_(b))
                continue
            joint, right, left = factors
            self._joints[joint.key] = joint
            self._average(f"{joint.key}.input", right.div_(b))
            self._average(f"{joint.key}.output", left.div_(b))
            self._positions[joint.key] = float(getattr(term, "positions", 1))

    def _average(self, key: str, new: Tensor) -> None:
        """The mean of all, or one that forgets, without the bias of its start."""
        if key not in self._means:
            self._means[key] = new
            return
        k, b = self._recorded, self.beta2
        weight = 1 / k if b is None else (1 - b) / (1 - b**k)
        self._means[key].lerp_(new.to(self._means[key]), weight)

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
        own, factors = _trainable(model), self.factors
        ours = [*map(id, self._parameters.values())]
        shapes = {n: p.shape for n, p in own.items()}
        now = [*map(id, _trainable(self._model).values())]
        if shapes != {n: p.shape for n, p in self._parameters.items()} or now != ours:
            raise ModelError("the model changed since its recorder was made: make a new one")
        if not self._recorded:
            raise PosteriorError("nothing was recorded: make the recorder before training")
        names = {n for j in self._joints.values() for n in j.names} | set(self._means)
        if missing := [n for n in own if n not in names]:
            raise PosteriorError(f"{some(missing)} took no part in recorded passes: freeze them")
        if odd := [k for k, m in self._means.items() if not bool(m.isfinite().all())]:
            raise PosteriorError(f"the recorded {odd[0]!r} is not finite; was training stable?")
        blocks = eigenbases(
            {k: (self._joints[k], *pair) for k, pair in factors.items()}, own, n_data
        )
        form = Kronecker.empty(blocks, own)
        values = {n: n_data * self._means[n].to(own[n]) for n in form.plain}
        for b in blocks:
            assert b.left is not None
            down, across = (
                (u.mT @ m.to(u) @ u).diagonal(0, -2, -1).clamp_min(0)
                for u, m in zip((b.left, b.right), reversed(factors[b.key]), strict=True)
            )
            scale = n_data / self._positions[b.key]
            values[b.key] = scale * down.unsqueeze(-1) * across.unsqueeze(-2)
        return form.with_values(values)

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
        ours, theirs = {n: list(p.shape) for n, p in self._parameters.items()}, state["shapes"]
        if odd := [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]:
            raise ModelError(f"the state was recorded on another model: {some(sorted(odd))}")
        self.passes, self._recorded = int(state["passes"]), int(state["recorded"])
        self._positions = dict(state["positions"])
        like = next(iter(self._parameters.values()))
        self._means = {k: m.to(like.device, copy=True) for k, m in state["means"].items()}
        self._joints = {joint.key: joint for joint in map(Joint.read, state["joints"])}
        self._seen = []


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}

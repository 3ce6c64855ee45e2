"""How a model is read: which module answers for which parameter, and that the answer is right.

A plan is made once per task and set of parameters, on a handful of its examples, and checked
there against autograd: every example's gradient of every parameter. A parameter that a layer rule
gets wrong (used outside its module, say) is handed to the nearest module that runs all of its
uses, and differentiated there by ``torch.func``; where that is wrong too, to the whole model. The
engine is therefore exact on any model, or says why it cannot be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.backprop.cost import batch_numbers, cost_of
from blr_analysis.backprop.fallback import task_columns
from blr_analysis.backprop.layers import Rule, inherited, rule_for
from blr_analysis.backprop.layout import Layout, agrees, layout_of, norm_of, probe_indices, within
from blr_analysis.backprop.reading import Plan, names_of, read, values_of
from blr_analysis.backprop.record import Unit, watched
from blr_analysis.backprop.recurrent import RECURRENT, recurrence
from blr_analysis.backprop.terms import HELD, Term, TermCost, Tree, merged, slices
from blr_analysis.backprop.truth import (
    Truth,
    autograd_gradients,
    check_independent,
    cotangent_of,
    not_differentiable,
)
from blr_analysis.errors import ModelError
from blr_analysis.half import working
from blr_analysis.task import Task


def plan_for(task: Task, params: Mapping[str, Tensor]) -> Plan:
    """The task's plan for these parameters, made on first use and kept with the task.

    Raises:
        ModelError: the model fails, treats examples together, is random, keeps state between
            calls, or cannot be differentiated.
    """
    modules = list(task.model.modules())
    forwards = [_forward_of(module) for module in modules]
    states = [
        (id(m), type(m), len(m._forward_hooks), len(m._forward_pre_hooks), id(forward))
        for m, forward in zip(modules, forwards, strict=True)
    ]
    key = (tuple(params), tuple(states))
    if key not in task.plans:
        with torch.inference_mode(False), _single_precision(task.device), task.frozen.off():
            plan = _make(task, task.cast(params))
        task.frozen.look(task, params)
        task.plans[key] = (plan, forwards)  # no other function gets the id of one that lives on
    return task.plans[key][0]


def _forward_of(module: nn.Module) -> Any:
    return module.__dict__.get("forward", getattr(type(module), "forward", None))


@contextmanager
def _single_precision(device: torch.device) -> Iterator[None]:
    """Inside, a GPU multiplies float32 in full precision. In TF32, the default of convolutions, two
    ways to the same gradient differ by more than the check allows."""
    if device.type == "cpu":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    backends: list[Any] = []
    if hasattr(matmul, "fp32_precision"):  # once it is set, torch refuses to read older settings
        backends = [cudnn.conv, cudnn.rnn, matmul]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _make(task: Task, params: Mapping[str, Tensor]) -> Plan:
    """At most three passes over the probe: a forward and a backward pass by autograd, the same by
    the rules, and forward passes of other batches."""
    units = units_of(task.model, set(params))  # first: an embedding with max_norm may not run
    probe = probe_indices(task.n_data)[0]
    truth, plain = autograd_gradients(task, params, probe)
    _check_finite(truth)
    unchecked = [plain]
    del plain  # the check below frees it: outputs of a language model are large

    def check_once(larger: Tensor) -> None:
        if unchecked:
            check_independent(task, params, probe, unchecked.pop(), larger, truth.eps)

    routes = Routes(units, frozenset(), frozenset())
    while True:
        layout = layout_of(task, params, routes.units, check_once)
        plan = Plan(
            units=tuple(routes.units),
            whole_model=tuple(sorted(routes.whole_model)),
            axes=layout.axes,
            shared=layout.shared,
            floats=lambda _: 1.0,
        )
        moves_rows = layout.recording.routes()
        comparison = _compared(plan, task, values_of(task, params), layout, probe, truth)
        if not comparison.wrong:
            outputs = layout.recording.outputs
            return replace(
                plan,
                floats=cost_of(task, params, layout.recording, layout.saved, comparison.costs),
                numbers=batch_numbers(task.fetch(probe)) / len(probe),
                outputs=1 if task.likelihood.is_sequence else outputs.shape[-1],
                routes=moves_rows,
            )
        if wrong := sorted(comparison.wrong & routes.whole_model):
            raise ModelError(
                f"per-example gradients of {wrong[:5]} disagree with autograd's; "
                "the forward pass may mix examples, be random or keep state"
            )
        routes = _rerouted(task, params, routes, comparison.wrong)


def _check_finite(truth: Truth) -> None:
    for name, gradient in truth.sums.items():
        if not bool(gradient.isfinite().all()):
            dtype = str(gradient.dtype).removeprefix("torch.")
            raise ModelError(f"gradients of {name!r} are NaN or inf in {dtype}: use model.float()")


def units_of(model: nn.Module, wanted: set[str]) -> list[Unit]:
    """Every module with parameters of its own among the ``wanted`` ones, and its rule if it has
    one."""
    canonical = names_of(model)
    units = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(path, module)
        names = {
            attribute: canonical[id(p)]
            for attribute, p in module._parameters.items()
            if p is not None and canonical[id(p)] in wanted
        }
        if names and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            units.append(Unit(path, module, names, _rule_of(module, names)))
    return units


def _check_embedding(path: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option):
            raise ModelError(f"{option} of embedding {path!r} changes its gradients: unset it")


def _rule_of(module: nn.Module, names: Collection[str]) -> Rule | None:
    if inherited(module, RECURRENT):
        return recurrence
    if set(names) <= {"weight", "bias"}:
        return rule_for(module)
    return None


@dataclass
class Comparison:
    """What terms give for the probe, beside autograd's sums."""

    truth: Truth
    unreadable: set[str]  # parameters with a visit that cannot be read
    disagreeing: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    costs: list[TermCost] = field(default_factory=list)

    @cached_property
    def floor(self) -> float:
        """The norm of a gap that is rounding of the largest gradient."""
        largest = max(norm_of(gradient) for gradient in self.truth.sums.values())
        return self.truth.eps**0.85 * largest

    @property
    def wrong(self) -> set[str]:
        """The parameters whose gradients are not read, or read wrong."""
        unread = {
            name
            for name, gradient in self.truth.sums.items()
            if name not in self.read and not agrees(None, gradient, self.truth.eps, self.floor)
        }
        return self.unreadable | self.disagreeing | unread

    def add(self, terms: list[Term]) -> None:
        """Compare these terms, and let go of them."""
        distinct = merged(terms)
        terms.clear()
        for term in distinct:
            if self.unreadable.isdisjoint(term.names):
                self.read.update(term.names)
                self.costs.append(term.cost())
                self.disagreeing |= self._disagreeing(term)

    def _disagreeing(self, term: Term) -> set[str]:
        """The parameters whose gradients the term gets wrong."""
        gaps = dict.fromkeys(term.names, 0.0)
        sizes = dict.fromkeys(term.names, 0.0)
        weights = self.truth.weights.view(-1, 1, 1)
        for part, expected in _blocks(term, {name: self.truth.sums[name] for name in term.names}):
            found = {
                name: t.new_zeros(1, *t.shape, dtype=working(t.dtype))
                for name, t in expected.items()
            }
            try:
                part.combined(weights, found)
            except RuntimeError:  # gradients of another shape than the parameter
                return set(term.names)
            for name, t in expected.items():
                gaps[name] = math.hypot(gaps[name], norm_of(found[name][0].sub_(t)))
                sizes[name] = math.hypot(sizes[name], norm_of(t))
        eps = self.truth.eps
        return {n for n, gap in gaps.items() if not within(gap, sizes[n], eps, self.floor)}


def _blocks(term: Term, sums: Tree) -> Iterator[tuple[Term, Tree]]:
    """The term and the sums that are expected of it; a large matrix some rows at a time, so that
    no second table of all words is made."""
    layout = term.matrix
    shapes = [tuple(t.shape) for t in sums.values()]
    if layout is None or shapes != [layout.shape]:
        yield term, sums
        return
    ((name, gradient),) = sums.items()
    matrix = gradient.reshape(layout.rows, layout.columns)
    for rows in slices(layout.rows, HELD // layout.columns):
        yield term.rows(rows), {name: matrix[rows]}


def _compared(
    plan: Plan,
    task: Task,
    values: Mapping[str, Tensor],
    layout: Layout,
    probe: Tensor,
    truth: Truth,
) -> Comparison:
    """The probe's terms beside autograd's sums.

    One layer's numbers after the other are read, compared and let go; those of weights that several
    calls share at the end.
    """
    comparison = Comparison(truth, set(layout.unknown))
    recording = layout.recording
    canonical = names_of(task.model)
    calls = Counter(n for visit in recording.visits for n in visit.unit.names.values())
    terms_of_several_calls: list[Term] = []
    try:
        grads = recording.backward([cotangent_of(recording.outputs)], last=True)
    except RuntimeError as error:
        raise not_differentiable(error) from error
    with torch.no_grad(), task.evaluation():
        for number, visit in enumerate(recording.visits):
            columns = grads[number]
            grads[number] = []
            names = set(visit.unit.names.values())
            axes = plan.axes_of(visit, len(probe))
            if axes is None or names & comparison.unreadable:
                comparison.unreadable |= names
                continue
            try:
                terms = read(canonical, values, visit, axes, columns, len(probe))
            except Exception:  # whatever a layer makes of inputs that its rule did not expect
                comparison.unreadable |= names
                continue
            if visit.unit.rule is not None:  # the others are called again, to measure their cost
                visit.shrink()
            if any(calls[name] > 1 for name in names):
                terms_of_several_calls += terms
            else:
                comparison.add(terms)
        comparison.add(terms_of_several_calls)
    if plan.whole_model:
        cotangent = cotangent_of(recording.outputs)
        comparison.add([task_columns(task, values, plan.whole_model, probe, [cotangent])])
    return comparison


@dataclass(frozen=True)
class Routes:
    """Which units answer for which parameters."""

    units: list[Unit]
    adopted: frozenset[str]  # parameters that a module above their own answers for
    whole_model: frozenset[str]  # parameters that are differentiated through the whole model


def _rerouted(task: Task, params: Mapping[str, Tensor], routes: Routes, wrong: set[str]) -> Routes:
    """Each wrong parameter given to the nearest called module above all modules that hold it.

    E.g. ``MultiheadAttention`` uses ``out_proj``'s weight without calling ``out_proj``. A weight
    that such a module gets wrong too is left to the whole model.
    """
    modules = dict(task.model.named_modules(remove_duplicate=False))
    adopters = _adopters(task, params, modules, wrong - routes.adopted)
    adopted = {name for names in adopters.values() for name in names}
    units: list[Unit] = []
    for unit in routes.units:
        names = {a: name for a, name in unit.names.items() if name not in wrong}
        adopted_here = adopters.pop(unit.path, None)
        if adopted_here is not None:
            units.append(replace(unit, names=names | adopted_here, rule=None))
        elif names:
            units.append(replace(unit, names=names))
    units += [Unit(path, modules[path], names, None) for path, names in adopters.items()]
    whole_model = routes.whole_model | (wrong - adopted)
    return Routes(units, routes.adopted | adopted, whole_model)


def _adopters(
    task: Task,
    params: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    names: Collection[str],
) -> dict[str, dict[str, str]]:
    """Paths of the modules that these parameters are given to, with the names for each."""
    canonical = names_of(task.model)
    ids = _called(task, params)
    called = [
        path
        for path, module in modules.items()
        if id(module) in ids and not isinstance(module, torch.jit.ScriptModule)
    ]
    result: dict[str, dict[str, str]] = {}
    for name in names:
        holders = [
            path
            for path, module in modules.items()
            for p in module._parameters.values()
            if p is not None and canonical[id(p)] == name
        ]
        above = [path for path in called if all(_is_above(path, h) for h in holders)]
        if above:
            nearest = max(above, key=len)
            result.setdefault(nearest, {})[name] = name
    return result


def _is_above(path: str, other: str) -> bool:
    """Whether the module at a path contains the one at another; the model's own path is "".

    >>> _is_above("", "layer"), _is_above("layer", "layer.0"), _is_above("layer", "layers.0")
    (True, True, False)
    """
    if path == other:
        return False
    return path == "" or other.startswith(f"{path}.")


def _called(task: Task, params: Mapping[str, Tensor]) -> set[int]:
    """The ids of the modules that are called in a forward pass."""
    modules = [
        Unit(path, module, {}, None)
        for path, module in task.model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
    ]
    ids: set[int] = set()

    def visit(unit: Unit, *_: Any) -> None:
        ids.add(id(unit.module))

    with torch.no_grad(), watched(modules, visit):
        task.at(params).run(torch.zeros(1, dtype=torch.long))
    return ids

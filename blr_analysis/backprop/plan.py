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
from blr_analysis.backprop.record import Recording, Unit, Visit, watched
from blr_analysis.backprop.recurrent import RECURRENT, recurrence
from blr_analysis.backprop.terms import TEMPORARY_NUMBERS, Term, TermCost, Tree, merged, slices
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
        # The functions are stored too: while they live, no other function gets one of their ids.
        task.plans[key] = (plan, forwards)
    return task.plans[key][0]


def _forward_of(module: nn.Module) -> Any:
    """The function that a call of the module runs: its own, or that of its class."""
    return module.__dict__.get("forward", getattr(type(module), "forward", None))


@contextmanager
def _single_precision(device: torch.device) -> Iterator[None]:
    """Inside, a GPU multiplies float32 in full precision.

    In TF32, the default of convolutions, two ways to compute the same gradient differ by more than
    the check allows.
    """
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
    """The plan, from three passes over the probe or more.

    These are a forward and a backward pass by autograd, the same two by the rules, and a forward
    pass of a larger batch. The rules are tried again where they gave a wrong gradient.
    """
    units = units_of(task.model, set(params))  # first: an embedding with max_norm may not run
    probe = probe_indices(task.n_data)[0]
    truth, outputs_and_targets = autograd_gradients(task, params, probe)
    _check_finite(truth)
    unchecked = [outputs_and_targets]
    del outputs_and_targets  # freed by the check below: outputs of a language model are large

    def check_once(larger: Tensor) -> None:
        if unchecked:
            check_independent(task, params, probe, unchecked.pop(), larger, truth.eps)

    routes = Routes(units, frozenset(), frozenset())
    while True:
        layout = layout_of(task, params, routes.units, check_once)
        plan = _uncosted_plan(routes, layout)
        comparison = _compared(plan, task, values_of(task, params), layout, probe, truth)
        if not comparison.wrong:
            return _with_costs(plan, task, params, layout, comparison.costs)
        wrong_in_whole_model = sorted(comparison.wrong & routes.whole_model)
        if wrong_in_whole_model:
            raise ModelError(
                f"per-example gradients of {wrong_in_whole_model[:5]} disagree with autograd's; "
                "the forward pass may mix examples, be random or keep state"
            )
        routes = _rerouted(task, params, routes, comparison.wrong)


def _uncosted_plan(routes: Routes, layout: Layout) -> Plan:
    """The plan of these routes, before it is known what an example costs."""
    return Plan(
        units=tuple(routes.units),
        whole_model=tuple(sorted(routes.whole_model)),
        axes=layout.axes,
        shared=layout.shared,
        floats=lambda _: 1.0,
        routes=layout.recording.routes(),  # before a backward pass frees the graph
    )


def _with_costs(
    plan: Plan,
    task: Task,
    params: Mapping[str, Tensor],
    layout: Layout,
    costs: list[TermCost],
) -> Plan:
    """The plan with what one example of it costs, as measured on the probe."""
    outputs = layout.recording.outputs
    probe = probe_indices(task.n_data)[0]
    return replace(
        plan,
        floats=cost_of(task, params, layout.recording, layout.saved, costs),
        numbers=batch_numbers(task.fetch(probe)) / len(probe),
        outputs=1 if task.likelihood.is_sequence else outputs.shape[-1],
        tokens=outputs.shape[1] if task.likelihood.is_sequence else 1,
    )


def _check_finite(truth: Truth) -> None:
    for name, gradient in truth.sums.items():
        if not bool(gradient.isfinite().all()):
            dtype = str(gradient.dtype).removeprefix("torch.")
            raise ModelError(f"gradients of {name!r} are NaN or inf in {dtype}: use model.float()")


def units_of(model: nn.Module, names: set[str]) -> list[Unit]:
    """Every module that owns one of the parameters ``names``, with its rule if it has one."""
    canonical = names_of(model)
    units = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(path, module)
        by_attribute = {
            attribute: canonical[id(p)]
            for attribute, p in module._parameters.items()
            if p is not None and canonical[id(p)] in names
        }
        if by_attribute and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            units.append(Unit(path, module, by_attribute, _rule_of(module, by_attribute)))
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
    """The terms' gradients for the probe, compared with autograd's sums.

    Attributes:
        truth: autograd's sums.
        unreadable: parameters with a visit that cannot be read.
        disagreeing: parameters whose gradients were compared and are wrong.
        compared: parameters whose gradients were compared.
        costs: of the terms that were compared.
    """

    truth: Truth
    unreadable: set[str]
    disagreeing: set[str] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)
    costs: list[TermCost] = field(default_factory=list)

    @cached_property
    def floor(self) -> float:
        """The norm of a gap that is rounding of the largest gradient."""
        largest = max(norm_of(gradient) for gradient in self.truth.sums.values())
        return self.truth.eps**0.85 * largest

    @property
    def wrong(self) -> set[str]:
        """The parameters whose gradients are missing or wrong."""
        missing = {
            name
            for name, gradient in self.truth.sums.items()
            if name not in self.compared and not agrees(None, gradient, self.truth.eps, self.floor)
        }
        return self.unreadable | self.disagreeing | missing

    def add(self, terms: list[Term]) -> None:
        """Compare these terms; the list is emptied, so that their memory is freed."""
        distinct = merged(terms)
        terms.clear()
        for term in distinct:
            if self.unreadable.isdisjoint(term.names):
                self.compared.update(term.names)
                self.costs.append(term.cost())
                self.disagreeing |= self._disagreeing(term)

    def _disagreeing(self, term: Term) -> set[str]:
        """The parameters whose gradients the term gets wrong."""
        gaps = dict.fromkeys(term.names, 0.0)
        sizes = dict.fromkeys(term.names, 0.0)
        weights = self.truth.weights.view(-1, 1, 1)
        for part, expected in _blocks(term, {name: self.truth.sums[name] for name in term.names}):
            sums = {
                name: gradient.new_zeros(1, *gradient.shape, dtype=working(gradient.dtype))
                for name, gradient in expected.items()
            }
            try:
                part.combined(weights, sums)
            except RuntimeError:  # gradients of another shape than the parameter
                return set(term.names)
            for name, gradient in expected.items():
                gaps[name] = math.hypot(gaps[name], norm_of(sums[name][0].sub_(gradient)))
                sizes[name] = math.hypot(sizes[name], norm_of(gradient))
        eps = self.truth.eps
        return {n for n, gap in gaps.items() if not within(gap, sizes[n], eps, self.floor)}


def _blocks(term: Term, sums: Tree) -> Iterator[tuple[Term, Tree]]:
    """The term and autograd's ``sums`` for it; a large matrix comes some rows at a time.

    No second table of all words is made in this way.
    """
    layout = term.matrix
    shapes = [tuple(t.shape) for t in sums.values()]
    if layout is None or shapes != [layout.shape]:
        yield term, sums
        return
    ((name, gradient),) = sums.items()
    matrix = gradient.reshape(layout.rows, layout.columns)
    for rows in slices(layout.rows, TEMPORARY_NUMBERS // layout.columns):
        yield term.rows(rows), {name: matrix[rows]}


def _compared(
    plan: Plan,
    task: Task,
    values: Mapping[str, Tensor],
    layout: Layout,
    probe: Tensor,
    truth: Truth,
) -> Comparison:
    """Compare the probe's terms with autograd's sums.

    One layer's numbers after the other are read, compared and freed. Weights that several calls
    share are compared at the end.
    """
    comparison = Comparison(truth, set(layout.unknown))
    recording = layout.recording
    calls = Counter(n for visit in recording.visits for n in visit.unit.names.values())
    terms_of_several_calls: list[Term] = []
    grads = _probe_gradients(recording)
    with torch.no_grad(), task.evaluation():
        for number, visit in enumerate(recording.visits):
            columns = grads[number]
            grads[number] = []  # freed with this layer
            names = set(visit.unit.names.values())
            terms = None
            if comparison.unreadable.isdisjoint(names):
                terms = _probe_terms(plan, task, values, visit, columns, len(probe))
            if terms is None:
                comparison.unreadable |= names
            elif any(calls[name] > 1 for name in names):
                terms_of_several_calls += terms
            else:
                comparison.add(terms)
        comparison.add(terms_of_several_calls)
    if plan.whole_model:
        cotangent = cotangent_of(recording.outputs)
        comparison.add([task_columns(task, values, plan.whole_model, probe, [cotangent])])
    return comparison


def _probe_gradients(recording: Recording) -> list[list[list[Tensor]]]:
    """The gradients at every visit's outputs, as :meth:`Recording.backward` gives them.

    Raises:
        ModelError: autograd cannot differentiate the model.
    """
    try:
        return recording.backward([cotangent_of(recording.outputs)], last=True)
    except RuntimeError as error:
        raise not_differentiable(error) from error


def _probe_terms(
    plan: Plan,
    task: Task,
    values: Mapping[str, Tensor],
    visit: Visit,
    columns: list[list[Tensor]],
    batch: int,
) -> list[Term] | None:
    """The terms of one visit of the probe; None where it cannot be read.

    The visit's inputs are freed, but for a module without a rule: that is called again, to measure
    its cost.
    """
    axes = plan.axes_of(visit, batch)
    if axes is None:
        return None
    try:
        terms = read(names_of(task.model), values, visit, axes, columns, batch)
    except Exception:  # whatever a layer makes of inputs that its rule did not expect
        return None
    if visit.unit.rule is not None:
        visit.shrink()
    return terms


@dataclass(frozen=True)
class Routes:
    """How each parameter is differentiated.

    Attributes:
        units: modules with the parameters whose gradients are read there.
        adopted: parameters whose gradients are read at a module above the one that owns them.
        whole_model: parameters that are differentiated through the whole model.
    """

    units: list[Unit]
    adopted: frozenset[str]
    whole_model: frozenset[str]


def _rerouted(task: Task, params: Mapping[str, Tensor], routes: Routes, wrong: set[str]) -> Routes:
    """Routes in which other modules differentiate the ``wrong`` parameters.

    Each parameter goes to the nearest called module above all modules that own it. For example,
    ``MultiheadAttention`` uses ``out_proj``'s weight without calling ``out_proj``. A weight that
    such a module gets wrong too goes to the whole model.
    """
    modules = dict(task.model.named_modules(remove_duplicate=False))
    adopters = _adopters(task, params, modules, wrong - routes.adopted)
    adopted = {name for names in adopters.values() for name in names}
    units: list[Unit] = []
    for unit in routes.units:
        right_names = {a: name for a, name in unit.names.items() if name not in wrong}
        adopted_here = adopters.pop(unit.path, None)
        if adopted_here is not None:
            units.append(replace(unit, names=right_names | adopted_here, rule=None))
        elif right_names:
            units.append(replace(unit, names=right_names))
    units += [Unit(path, modules[path], names, None) for path, names in adopters.items()]
    whole_model = routes.whole_model | (wrong - adopted)
    return Routes(units, routes.adopted | adopted, whole_model)


def _adopters(
    task: Task,
    params: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    names: Collection[str],
) -> dict[str, dict[str, str]]:
    """The nearest called module above each parameter's owners: parameters by the module's path.

    A parameter without such a module is left out. Every name stands as key and as value, like the
    ``names`` of a :class:`Unit`.
    """
    canonical = names_of(task.model)
    called_ids = _called(task, params)
    called_paths = [
        path
        for path, module in modules.items()
        if id(module) in called_ids and not isinstance(module, torch.jit.ScriptModule)
    ]
    adopters: dict[str, dict[str, str]] = {}
    for name in names:
        owner_paths = [
            path
            for path, module in modules.items()
            for p in module._parameters.values()
            if p is not None and canonical[id(p)] == name
        ]
        above = [
            path for path in called_paths if all(_is_above(path, owner) for owner in owner_paths)
        ]
        if above:
            nearest = max(above, key=len)
            adopters.setdefault(nearest, {})[name] = name
    return adopters


def _is_above(path: str, inner_path: str) -> bool:
    """Whether the module at ``path`` contains the one at ``inner_path``; the model's path is "".

    >>> _is_above("", "layer"), _is_above("layer", "layer.0"), _is_above("layer", "layers.0")
    (True, True, False)
    """
    if path == inner_path:
        return False
    return path == "" or inner_path.startswith(f"{path}.")


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

"""How a model is read: which module answers for which parameter, and that the answer is right.

A plan is made once per task and set of parameters, on a handful of its examples, and checked
there against autograd: every example's gradient of every parameter. A parameter that a layer rule
gets wrong (used outside its module, say) is handed to the nearest module that runs all of its
uses, to be differentiated there by ``torch.func``, and else to the whole model; so the engine is
exact on any model or says why it cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from blr_analysis.backprop.cost import batch_numbers, cost_of
from blr_analysis.backprop.fallback import task_columns
from blr_analysis.backprop.layers import rule_for
from blr_analysis.backprop.layout import Layout, agrees, layout_of, probe_indices
from blr_analysis.backprop.reading import Plan, read
from blr_analysis.backprop.record import Unit, fetched
from blr_analysis.backprop.terms import Term, merged
from blr_analysis.backprop.truth import (
    autograd_gradients,
    check_independent,
    not_differentiable,
)
from blr_analysis.errors import ModelError
from blr_analysis.task import Task


def plan_for(task: Task, params: Mapping[str, Tensor]) -> Plan:
    """The task's plan for these parameters, made on first use and kept with the task.

    Raises:
        ModelError: the model fails, treats examples together, is random, keeps state between
            calls, or cannot be differentiated.
    """
    key = (
        tuple(params),
        tuple(
            (id(m), type(m), len(m._forward_hooks), len(m._forward_pre_hooks))
            for m in task.model.modules()
        ),
    )
    if key not in task.plans:
        with torch.inference_mode(False):
            task.plans[key] = _make(task, params)
    return task.plans[key]


def _make(task: Task, params: Mapping[str, Tensor]) -> Plan:
    probe = probe_indices(task.n_data)[0]
    check_independent(task, params, probe)
    units, whole = units_of(task.model, set(params)), frozenset[str]()
    truth, cotangents = autograd_gradients(task, params, probe)
    adopted: set[str] = set()
    while True:
        layout = layout_of(task, params, units)
        plan = Plan(tuple(units), tuple(sorted(whole)), layout.axes, layout.shared, lambda _: 1.0)
        terms, broken = _read_all(plan, task, params, layout, probe, cotangents)
        floor = torch.finfo(cotangents[0].dtype).eps ** 0.85 * max(
            float(torch.linalg.vector_norm(t)) for t in truth.values()
        )
        wrong = broken | _disagreeing(terms, truth, floor)
        if not wrong:
            cost = cost_of(plan, task, params, layout.recording, terms)
            return replace(
                plan,
                floats=cost,
                numbers=batch_numbers(fetched(task, probe)) / len(probe),
                outputs=1 if task.likelihood.is_sequence else cotangents[0].shape[-1],
                routes=layout.recording.routes(),
            )
        if wrong & whole:
            raise ModelError(
                f"per-example gradients of {sorted(wrong & whole)[:5]} disagree with autograd's; "
                "the forward pass may mix examples, be random or keep state"
            )
        units, adopted, whole = _rerouted(task, params, units, wrong, adopted, whole)


def _disagreeing(terms: Sequence[Term], truth: Mapping[str, Tensor], floor: float) -> set[str]:
    """The parameters whose gradients the terms get wrong; one term's are held at a time."""
    unread = set(truth) - {n for term in terms for n in term.names}
    wrong = {n for n in unread if not agrees(None, truth[n], floor)}
    for term in terms:
        for name, gradient in term.jacobian().items():
            if name in truth and not agrees(gradient, truth[name], floor):
                wrong.add(name)
    return wrong


def units_of(model: nn.Module, wanted: set[str]) -> list[Unit]:
    """Every module with parameters of its own that are asked about, and its rule if it has one."""
    canonical = {id(p): n for n, p in model.named_parameters()}
    units = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            _check_embedding(path, module)
        own = {
            a: canonical[id(p)]
            for a, p in module._parameters.items()
            if p is not None and canonical[id(p)] in wanted
        }
        if own and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            rule = rule_for(module) if set(own) <= {"weight", "bias"} else None
            units.append(Unit(path, module, own, rule))
    return units


def _check_embedding(path: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.max_norm is not None:
        raise ModelError(
            f"embedding {path!r} renormalises its rows in place; build it with max_norm=None"
        )
    if module.scale_grad_by_freq:
        raise ModelError(
            f"embedding {path!r} scales its gradients by frequency; set scale_grad_by_freq=False"
        )


def _read_all(
    plan: Plan,
    task: Task,
    params: Mapping[str, Tensor],
    layout: Layout,
    probe: Tensor,
    cotangents: list[Tensor],
) -> tuple[list[Term], set[str]]:
    """The probe's terms, and the names that some visit could not read at all."""
    broken = set(layout.unknown)
    terms_read: list[Term] = []
    values = {**{n: p.detach() for n, p in task.model.named_parameters()}, **params}
    try:
        grads = layout.recording.backward(cotangents)
    except RuntimeError as error:
        raise not_differentiable(error) from error
    with torch.no_grad(), task.evaluation():
        for visit, visited in zip(layout.recording.visits, grads, strict=True):
            axes = plan.axes_of(visit, len(probe))
            names = set(visit.unit.names.values())
            if axes is None or names & broken:
                broken |= names
                continue
            try:
                terms = read(task.model, values, visit, axes, visited, len(probe))
                merged(terms)[0].jacobian()
                terms_read += terms
            except Exception:  # whatever a layer makes of inputs that its rule did not expect
                broken |= names
    kept = [term for term in merged(terms_read) if broken.isdisjoint(term.names)]
    if plan.whole_model:
        kept.append(task_columns(task, values, plan.whole_model, probe, cotangents))
    return kept, broken


def _rerouted(
    task: Task,
    params: Mapping[str, Tensor],
    units: Sequence[Unit],
    wrong: set[str],
    adopted: set[str],
    whole: frozenset[str],
) -> tuple[list[Unit], set[str], frozenset[str]]:
    """Each wrong parameter given to the nearest called module above all of its holders.

    E.g. ``MultiheadAttention`` uses ``out_proj``'s weight without calling ``out_proj``; a weight
    that such a module gets wrong too is left to the whole model.
    """
    called = _called(task, params)
    modules = dict(task.model.named_modules(remove_duplicate=False))
    canonical = {id(p): n for n, p in task.model.named_parameters()}
    given: dict[str, dict[str, str]] = {}
    for name in wrong - adopted:
        holders = [
            path
            for path, module in modules.items()
            for p in module._parameters.values()
            if p is not None and canonical[id(p)] == name
        ]
        adopter = _adopter(holders, {path for path, m in modules.items() if id(m) in called})
        if adopter is not None:
            given.setdefault(adopter, {})[name] = name
    taken = {n for names in given.values() for n in names.values()}
    result: list[Unit] = []
    for unit in units:
        names = {a: n for a, n in unit.names.items() if n not in wrong}
        more = given.pop(unit.path, {})
        if names or more:
            rule = None if more else unit.rule
            result.append(replace(unit, names={**names, **more}, rule=rule))
    result += [Unit(path, modules[path], names, None) for path, names in given.items()]
    return result, adopted | taken, whole | (wrong - taken)


def _adopter(holders: Sequence[str], called: set[str]) -> str | None:
    """The deepest called path above all holders (for one holder, above itself)."""
    split = [path.split(".") if path else [] for path in holders]
    common = split[0][:-1] if len(split) == 1 else []
    if len(split) > 1:
        for level in zip(*split, strict=False):
            if len(set(level)) > 1:
                break
            common.append(level[0])
    elif not split[0]:
        return None
    for depth in range(len(common), -1, -1):
        path = ".".join(common[:depth])
        if path in called:
            return path
    return None


def _called(task: Task, params: Mapping[str, Tensor]) -> set[int]:
    """The ids of the modules that are called in a forward pass."""
    seen: set[int] = set()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(task.evaluation())
        for module in task.model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            handle = module.register_forward_hook(lambda m, *_: seen.add(id(m)))
            stack.callback(handle.remove)
        first = torch.zeros(1, dtype=torch.long)
        task.run(task.fetch(first), params, first)
    return seen

"""How a model is read: which module answers for which parameter, and that the answer is right.

A plan is made once per task and set of parameters, on a handful of its examples, and checked
there against autograd: every example's gradient of every parameter. A parameter that a layer rule
gets wrong (used outside its module, say) is handed to the nearest module that runs all of its
uses, to be differentiated there by ``torch.func``, and else to the whole model; so the engine is
exact on any model or says why it cannot be.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from blr_analysis.backprop.affine import affine, is_affine
from blr_analysis.backprop.cost import batch_numbers, cost_of
from blr_analysis.backprop.fallback import task_columns
from blr_analysis.backprop.layers import rule_for, upcast
from blr_analysis.backprop.layout import Layout, agrees, layout_of, probe_indices, small
from blr_analysis.backprop.reading import Plan, names_of, read
from blr_analysis.backprop.record import Unit, Visit, fetched
from blr_analysis.backprop.recurrent import RECURRENT, recurrence
from blr_analysis.backprop.terms import Term, merged
from blr_analysis.backprop.truth import (
    Truth,
    autograd_gradients,
    check_independent,
    not_differentiable,
)
from blr_analysis.errors import ModelError
from blr_analysis.task import Task

LARGE = 2**26  # bytes of parameters


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
        params = task.cast(params)
        with torch.inference_mode(False):
            task.plans[key] = _make(task, params)
        _give_back(params)
    return task.plans[key]


def _give_back(params: Mapping[str, Tensor]) -> None:
    """What a large model's plan freed and glibc keeps, while a pass asks for other sizes."""
    if sum(p.nbytes for p in params.values()) > LARGE and sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _make(task: Task, params: Mapping[str, Tensor]) -> Plan:
    """At most three passes over the probe: a forward and a backward pass by autograd, the same by
    the rules, and forward passes of other batches."""
    probe = probe_indices(task.n_data)[0]
    units, whole = units_of(task.model, set(params)), frozenset[str]()
    truth = autograd_gradients(task, params, probe)
    _give_back(params)
    sizes = [float(torch.linalg.vector_norm(upcast(t))) for t in truth.sums.values()]
    floor = truth.eps**0.85 * max(sizes)
    values = {**{n: p.detach() for n, p in task.model.named_parameters()}, **params}
    adopted: set[str] = set()
    checked = False
    while True:
        layout = layout_of(task, params, units)
        if not checked:
            check_independent(task, params, probe, layout, truth.eps)
            checked = True
        layout = replace(layout, plain=None)  # a language model's are large
        units = _with_affine(task, units, layout, values, len(probe))
        plan = Plan(tuple(units), tuple(sorted(whole)), layout.axes, layout.shared, lambda _: 1.0)
        terms, broken = _read_all(plan, task, values, layout, probe, truth.cotangent)
        wrong = broken | _disagreeing(terms, truth, floor)
        if not wrong:
            head = plan.head_of(layout.recording)
            return replace(
                plan,
                floats=cost_of(task, params, layout.recording, layout.saved, terms),
                numbers=batch_numbers(fetched(task, probe)) / len(probe),
                outputs=1 if task.likelihood.is_sequence else truth.cotangent.shape[-1],
                head=0 if head is None else values[head].shape[1],
                routes=layout.recording.routes(),
            )
        if wrong & whole:
            raise ModelError(
                f"per-example gradients of {sorted(wrong & whole)[:5]} disagree with autograd's; "
                "the forward pass may mix examples, be random or keep state"
            )
        units, adopted, whole = _rerouted(task, params, units, wrong, adopted, whole)


def _with_affine(
    task: Task, units: Sequence[Unit], layout: Layout, values: Mapping[str, Tensor], batch: int
) -> list[Unit]:
    """The units with the affine rule for those layers without one that the probe shows to be so."""
    seen: dict[str, list[Visit]] = {}
    for visit in layout.recording.visits:
        seen.setdefault(visit.unit.path, []).append(visit)
    result = []
    with torch.no_grad(), task.evaluation():
        for unit in units:
            visits = seen.get(unit.path, [])
            own = set(unit.names) <= set(unit.module._parameters)
            if unit.rule is None and own and visits:
                held = {a: values[n] for a, n in unit.names.items()}
                places = [layout.axes.get((v.unit.path, v.occurrence)) for v in visits]
                if all(
                    p is not None and len(p[1]) == 1 and is_affine(v, held, p[1][0])
                    for v, p in zip(visits, places, strict=True)
                ):
                    unit = replace(unit, rule=affine)
                    for visit in visits:
                        visit.unit = unit
            result.append(unit)
    return result


def _disagreeing(terms: Sequence[Term], truth: Truth, floor: float) -> set[str]:
    """The parameters whose gradients the terms get wrong; one term's are held at a time."""
    unread = set(truth.sums) - {n for term in terms for n in term.names}
    wrong = {n for n in unread if not agrees(None, truth.sums[n], truth.eps, floor)}
    weights = truth.weights.view(-1, 1, 1)
    for term in terms:
        ours = {n: upcast(torch.zeros_like(truth.sums[n])).unsqueeze(0) for n in term.names}
        try:
            term.combined(weights, ours)
        except RuntimeError:  # gradients of another shape than the parameter
            wrong.update(term.names)
            continue
        for name, sums in ours.items():
            own = truth.sums[name]
            if not small(sums[0].sub_(own), own, truth.eps, floor):  # nothing is held twice
                wrong.add(name)
    return wrong


def units_of(model: nn.Module, wanted: set[str]) -> list[Unit]:
    """Every module with parameters of its own that are asked about, and its rule if it has one."""
    canonical = names_of(model)
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
            rule = recurrence if type(module) in RECURRENT else rule
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
    values: Mapping[str, Tensor],
    layout: Layout,
    probe: Tensor,
    cotangent: Tensor,
) -> tuple[list[Term], set[str]]:
    """The probe's terms, and the names that some visit could not read at all."""
    broken, canonical = set(layout.unknown), names_of(task.model)
    terms_read: list[Term] = []
    try:
        grads = layout.recording.backward([cotangent], last=True)
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
                terms_read += read(canonical, values, visit, axes, visited, len(probe))
            except Exception:  # whatever a layer makes of inputs that its rule did not expect
                broken |= names
    kept = [term for term in merged(terms_read) if broken.isdisjoint(term.names)]
    if plan.whole_model:
        kept.append(task_columns(task, values, plan.whole_model, probe, [cotangent]))
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
    canonical = names_of(task.model)
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

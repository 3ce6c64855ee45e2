"""How a model is read: which module answers for which parameter, and that the answer is right.

A plan is made once per task and set of parameters, on a handful of its examples, and checked
there against autograd: every example's gradient of every parameter. A parameter that a layer rule
gets wrong (used outside its module, say) is handed to the nearest module that runs all of its
uses, to be differentiated there by ``torch.func``, and else to the whole model; so the engine is
exact on any model or says why it cannot be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from blr_analysis.backprop.cost import batch_numbers, cost_of
from blr_analysis.backprop.fallback import task_columns
from blr_analysis.backprop.layers import inherited, rule_for, upcast
from blr_analysis.backprop.layout import Layout, agrees, layout_of, probe_indices, within
from blr_analysis.backprop.reading import Plan, names_of, read
from blr_analysis.backprop.record import Unit, fetched
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
    forwards = [m.__dict__.get("forward", getattr(type(m), "forward", None)) for m in modules]
    states = [
        (id(m), type(m), len(m._forward_hooks), len(m._forward_pre_hooks), id(forward))
        for m, forward in zip(modules, forwards, strict=True)
    ]
    key = tuple(params), tuple(states)
    if key not in task.plans:
        params = task.cast(params)
        with torch.inference_mode(False), _single_precision(task.device):
            task.plans[key] = _make(task, params), forwards  # held: no other has their ids
    return task.plans[key][0]


@contextmanager
def _single_precision(device: torch.device) -> Iterator[None]:
    """float32 products of a GPU as such: in TF32, which it takes for convolutions unless told
    otherwise, two ways to one gradient differ by more than the check allows."""
    if device.type == "cpu":
        yield
        return
    name = "fp32_precision"  # torch refuses to read what came before it, once it was set
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    places: list[Any] = [cudnn.conv, cudnn.rnn, matmul] if hasattr(matmul, name) else []
    before = [getattr(place, name) for place in places]
    for place in places:
        setattr(place, name, "ieee")
    try:
        yield
    finally:
        for place, kind in zip(places, before, strict=True):
            setattr(place, name, kind)


def _make(task: Task, params: Mapping[str, Tensor]) -> Plan:
    """At most three passes over the probe: a forward and a backward pass by autograd, the same by
    the rules, and forward passes of other batches."""
    probe = probe_indices(task.n_data)[0]
    units, whole = units_of(task.model, set(params)), frozenset[str]()
    truth, plain = autograd_gradients(task, params, probe)
    sizes = [float(torch.linalg.vector_norm(upcast(t))) for t in truth.sums.values()]
    for size, (name, t) in zip(sizes, truth.sums.items(), strict=True):
        if not math.isfinite(size) and not bool(t.isfinite().all()):
            kind = str(t.dtype).removeprefix("torch.")
            raise ModelError(f"gradients of {name!r} are NaN or inf in {kind}: use model.float()")
    floor = truth.eps**0.85 * max(sizes)
    values = {**{n: p.detach() for n, p in task.model.named_parameters()}, **params}
    adopted: set[str] = set()
    unchecked = [plain]
    del plain

    def check(larger: Tensor) -> None:
        if unchecked:  # once; outputs of a language model are large
            check_independent(task, params, probe, unchecked.pop(), larger, truth.eps)

    while True:
        layout = layout_of(task, params, units, check)
        plan = Plan(tuple(units), tuple(sorted(whole)), layout.axes, layout.shared, lambda _: 1.0)
        routes = layout.recording.routes()
        costs, wrong = _compared(plan, task, values, layout, probe, truth, floor)
        if not wrong:
            return replace(
                plan,
                floats=cost_of(task, params, layout.recording, layout.saved, costs),
                numbers=batch_numbers(fetched(task, probe)) / len(probe),
                outputs=1 if task.likelihood.is_sequence else layout.recording.outputs.shape[-1],
                routes=routes,
            )
        if wrong & whole:
            raise ModelError(
                f"per-example gradients of {sorted(wrong & whole)[:5]} disagree with autograd's; "
                "the forward pass may mix examples, be random or keep state"
            )
        units, adopted, whole = _rerouted(task, params, units, wrong, adopted, whole)


def _disagreeing(term: Term, truth: Truth, floor: float) -> set[str]:
    """The parameters whose gradients the term gets wrong."""
    own = {n: truth.sums[n] for n in term.names}
    layout = term.matrix
    blocks: Iterator[tuple[Term, Tree]] = iter([(term, own)])
    if layout is not None and [tuple(t.shape) for t in own.values()] == [layout.shape]:
        ((name, whole),) = own.items()  # no second table of all words is made
        matrix = whole.reshape(layout.rows, layout.columns)
        rows = slices(layout.rows, HELD // layout.columns)
        blocks = ((term.rows(chosen), {name: matrix[chosen]}) for chosen in rows)
    gaps, sizes = (dict.fromkeys(own, 0.0) for _ in range(2))
    for part, theirs in blocks:
        ours = {n: t.new_zeros(1, *t.shape, dtype=working(t.dtype)) for n, t in theirs.items()}
        try:
            part.combined(truth.weights.view(-1, 1, 1), ours)
        except RuntimeError:  # gradients of another shape than the parameter
            return set(term.names)
        for n, t in theirs.items():
            gaps[n] = math.hypot(gaps[n], float(torch.linalg.vector_norm(ours[n][0].sub_(t))))
            sizes[n] = math.hypot(sizes[n], float(torch.linalg.vector_norm(upcast(t))))
    return {n for n, gap in gaps.items() if not within(gap, sizes[n], truth.eps, floor)}


def units_of(model: nn.Module, wanted: set[str]) -> list[Unit]:
    """Every module with parameters of its own that are asked about, and its rule if it has one."""
    canonical = names_of(model)
    units = []
    for path, module in model.named_modules():
        for option in ("max_norm", "scale_grad_by_freq"):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and getattr(module, option):
                raise ModelError(f"{option} of embedding {path!r} changes its gradients: unset it")
        own = {
            a: canonical[id(p)]
            for a, p in module._parameters.items()
            if p is not None and canonical[id(p)] in wanted
        }
        if own and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            rule = rule_for(module) if set(own) <= {"weight", "bias"} else None
            rule = recurrence if inherited(module, RECURRENT) else rule
            units.append(Unit(path, module, own, rule))
    return units


def _compared(
    plan: Plan,
    task: Task,
    values: Mapping[str, Tensor],
    layout: Layout,
    probe: Tensor,
    truth: Truth,
    floor: float,
) -> tuple[list[TermCost], set[str]]:
    """What the probe's terms cost, and the names that they get wrong or that some visit could not
    read at all. One layer's numbers after the other are read, compared and let go; those of weights
    that several calls share at the end."""
    broken, canonical = set(layout.unknown), names_of(task.model)
    visits, outputs = layout.recording.visits, layout.recording.outputs
    calls = Counter(n for visit in visits for n in visit.unit.names.values())
    costs: list[TermCost] = []
    wrong, read_names = set[str](), set[str]()
    apart: list[Term] = []

    def compare(terms: list[Term]) -> None:
        whole = merged(terms)
        terms.clear()
        for term in whole:
            if broken.isdisjoint(term.names):
                read_names.update(term.names)
                costs.append(term.cost())
                wrong.update(_disagreeing(term, truth, floor))

    try:
        grads = layout.recording.backward([cotangent_of(outputs)], last=True)
    except RuntimeError as error:
        raise not_differentiable(error) from error
    with torch.no_grad(), task.evaluation():
        for k, visit in enumerate(visits):
            axes, visited = plan.axes_of(visit, len(probe)), grads[k]
            grads[k] = []
            names = set(visit.unit.names.values())
            if axes is None or names & broken:
                broken |= names
                continue
            try:
                terms = read(canonical, values, visit, axes, visited, len(probe))
            except Exception:  # whatever a layer makes of inputs that its rule did not expect
                broken |= names
                continue
            if visit.unit.rule is not None:  # others are called again, for what they cost
                visit.shrink()
            if any(calls[n] > 1 for n in names):
                apart += terms
            else:
                compare(terms)
        compare(apart)
    if plan.whole_model:
        cotangent = cotangent_of(outputs)
        compare([task_columns(task, values, plan.whole_model, probe, [cotangent])])
    unread = truth.sums.keys() - read_names
    wrong |= {n for n in unread if not agrees(None, truth.sums[n], truth.eps, floor)}
    return costs, broken | wrong


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
    modules = dict(task.model.named_modules(remove_duplicate=False))
    ids, canonical = _called(task, params), names_of(task.model)
    hooked = {p: m for p, m in modules.items() if not isinstance(m, torch.jit.ScriptModule)}
    called = [path for path, module in hooked.items() if id(module) in ids]
    given: dict[str, dict[str, str]] = {}
    for name in wrong - adopted:
        holders = [
            path
            for path, module in modules.items()
            for p in module._parameters.values()
            if p is not None and canonical[id(p)] == name
        ]
        above = [a for a in called
                 if all(h != a and h.startswith(a and f"{a}.") for h in holders)]  # fmt: skip
        if above:
            given.setdefault(max(above, key=len), {})[name] = name
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


def _called(task: Task, params: Mapping[str, Tensor]) -> set[int]:
    """The ids of the modules that are called in a forward pass."""
    seen: set[int] = set()
    first = torch.zeros(1, dtype=torch.long)
    handle = register_module_forward_hook(lambda module, *_: seen.add(id(module)))
    try:
        with torch.no_grad(), task.evaluation():
            task.run(task.fetch(first), params, first)
    finally:
        handle.remove()
    return seen

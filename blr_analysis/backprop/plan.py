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

from blr_analysis.backprop.cost import cost_of
from blr_analysis.backprop.fallback import pulled, task_columns
from blr_analysis.backprop.layers import rule_for
from blr_analysis.backprop.layout import Layout, agrees, layout_of, probe_indices
from blr_analysis.backprop.reading import Plan, read
from blr_analysis.backprop.record import Unit, fetched
from blr_analysis.backprop.terms import Term, merged
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
    _check_independent(task, params, probe)
    units, whole = _units(task.model, set(params)), frozenset[str]()
    truth, cotangent = _autograd(task, params, probe)
    adopted: set[str] = set()
    while True:
        layout = layout_of(task, params, units)
        plan = Plan(tuple(units), tuple(sorted(whole)), layout.axes, layout.shared, lambda _: 1.0)
        terms, broken = _read_all(plan, task, params, layout, probe, cotangent)
        ours = {n: g[:, 0] for term in terms for n, g in term.jacobian().items()}
        floor = torch.finfo(cotangent.dtype).eps ** 0.85 * max(
            float(torch.linalg.vector_norm(t)) for t in truth.values()
        )
        wrong = broken | {n for n in params if not agrees(ours.get(n), truth[n], floor)}
        if not wrong:
            cost = cost_of(plan, task, params, layout.recording.visits, terms)
            return replace(plan, floats=cost, outputs=cotangent.shape[-1])
        if wrong & whole:
            raise ModelError(
                f"per-example gradients of {sorted(wrong & whole)[:5]} disagree with autograd's "
                "on a batch; the model's forward pass may mix examples, be random or keep state "
                "between calls"
            )
        units, adopted, whole = _rerouted(task, params, units, wrong, adopted, whole)


def _units(model: nn.Module, wanted: set[str]) -> list[Unit]:
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
        if own:
            rule = rule_for(module) if set(own) <= {"weight", "bias"} else None
            units.append(Unit(path, module, own, rule))
    return units


def _check_embedding(path: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.max_norm is not None:
        raise ModelError(
            f"embedding {path!r} renormalises its rows in place (max_norm); build it with "
            "max_norm=None to analyse it"
        )
    if module.scale_grad_by_freq:
        raise ModelError(
            f"embedding {path!r} scales its gradients by the words' frequency in a batch, so that "
            "they are not those of the loss; set scale_grad_by_freq=False to analyse it"
        )


def _read_all(
    plan: Plan,
    task: Task,
    params: Mapping[str, Tensor],
    layout: Layout,
    probe: Tensor,
    cotangent: Tensor,
) -> tuple[list[Term], set[str]]:
    """The probe's terms, and the names that some visit could not read at all."""
    broken = set(layout.unknown)
    found: list[Term] = []
    values = {**{n: p.detach() for n, p in task.model.named_parameters()}, **params}
    try:
        grads = layout.recording.backward([cotangent])
    except RuntimeError as error:
        raise _not_differentiable(error) from error
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
                found += terms
            except Exception:  # whatever a layer makes of inputs that its rule did not expect
                broken |= names
    kept = [term for term in merged(found) if broken.isdisjoint(term.names)]
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
            below = modules[adopter].named_parameters(remove_duplicate=False)
            alias = next(a for a, p in below if canonical[id(p)] == name)
            given.setdefault(adopter, {})[alias] = name
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
            handle = module.register_forward_hook(lambda m, *_: seen.add(id(m)))
            stack.callback(handle.remove)
        first = torch.zeros(1, dtype=torch.long)
        task.run(task.fetch(first), params, first)
    return seen


def _autograd(
    task: Task, params: Mapping[str, Tensor], probe: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Every probe example's gradient of a random combination of outputs, by plain autograd.

    ``[k, *shape]`` per name, and the combination ``[k, C]``.
    """
    with torch.enable_grad(), task.evaluation():
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        outputs, _ = task.run(fetched(task, probe), leaves, probe)
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs)
    try:
        rows = [pulled([outputs[i]], [cotangent[i]], leaves) for i in range(len(probe))]
    except RuntimeError as error:
        raise _not_differentiable(error) from error
    columns = zip(*rows, strict=True)
    return {n: torch.stack(c) for n, c in zip(leaves, columns, strict=True)}, cotangent


def _not_differentiable(error: RuntimeError) -> ModelError:
    return ModelError(
        f"autograd cannot differentiate the model: {error}; operations in place on what the "
        "backward pass needs, and gradient checkpointing, must be switched off for the analysis"
    )


def _check_independent(task: Task, params: Mapping[str, Tensor], probe: Tensor) -> None:
    """Raise :class:`ModelError` when an example's output depends on its batch or on chance."""
    with torch.no_grad(), task.evaluation():
        together, _ = task.run(task.fetch(probe), params, probe)
        alone, _ = task.run(task.fetch(probe[:1]), params, probe[:1])
    if len(together) != len(probe) or len(alone) != 1:
        raise ModelError(
            f"the model returned {len(together)} rows of outputs for {len(probe)} examples; "
            "return one row per example (forward= can reshape)"
        )
    if alone.shape[1:] != together.shape[1:]:
        raise ModelError("the number of outputs of an example changes with its batch")
    scale = together.abs().amax().clamp_min(1e-30)
    if bool((together[0] - alone[0]).abs().amax() > 1e-2 * scale):
        raise ModelError(
            "the output of an example changes with the batch it comes in, or from call to call; "
            "the analyses need a deterministic dataset and model that treat examples one by one"
        )

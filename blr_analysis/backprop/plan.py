"""How a model is read: which module answers for which parameter, and that the answer is right.

A plan is made once per task and set of parameters, on a handful of its examples, and checked
there against autograd: every example's gradient of every parameter. A parameter that a layer rule
gets wrong (used outside its module, say) is handed to a safer way, so that the engine is exact on
any model or says why it cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from blr_analysis.backprop.fallback import module_columns, task_columns
from blr_analysis.backprop.layers import Axis, Call, rule_for
from blr_analysis.backprop.record import Recording, Unit, Visit, batch_axis, record
from blr_analysis.backprop.terms import Outer, Rows, Term, merged
from blr_analysis.errors import ModelError
from blr_analysis.task import Task

Axes = tuple[list[Axis | None], list[Axis]]
PROBE = 3  # examples that a plan is checked on; odd, so that it is rarely another dimension's size


@dataclass(frozen=True)
class Plan:
    """Units with their rules, the batch axes of what they see, and the cost of one example."""

    units: tuple[Unit, ...]
    whole_model: tuple[str, ...]  # parameters differentiated through the whole model
    axes: dict[tuple[str, int], Axes]
    shared: frozenset[tuple[str, int, int]]
    floats: Callable[[int], float]  # K columns → numbers held per example

    def chunk_size(self, columns: int, budget: int, itemsize: int, n_data: int) -> int:
        """Examples per chunk so that the working memory stays within ``budget`` bytes."""
        return int(max(1, min(n_data, budget // (itemsize * max(1.0, self.floats(columns))))))

    def terms(
        self,
        task: Task,
        params: Mapping[str, Tensor],
        recording: Recording,
        indices: Tensor,
        cotangents: list[Tensor],
    ) -> list[Term]:
        """G_ic of every unit for these cotangents, each parameter in exactly one term."""
        grads = recording.backward(cotangents)
        found: list[Term] = []
        values = {**{n: p.detach() for n, p in task.model.named_parameters()}, **params}
        with torch.no_grad(), task.evaluation():
            for visit, visited in zip(recording.visits, grads, strict=True):
                found += self._visit_terms(task, values, visit, visited, len(indices))
        result = merged(found)
        if self.whole_model:
            result.append(task_columns(task, values, self.whole_model, indices, cotangents))
        return result

    def _visit_terms(
        self,
        task: Task,
        values: Mapping[str, Tensor],
        visit: Visit,
        grads: list[list[Tensor]],
        batch: int,
    ) -> list[Term]:
        in_axes, out_axes = self.axes.get((visit.unit.path, visit.occurrence)) or _axes(visit, batch)
        unit = visit.unit
        if unit.rule is None:
            canonical = _canonical_below(task.model, unit.module)
            return [module_columns(visit, values, canonical, (in_axes, out_axes), grads, batch)]
        axis = in_axes[0]
        assert axis is not None
        call = Call(
            unit.module,
            visit.args,
            visit.kwargs,
            batch,
            axis,
            out_axes[0],
            unit.names,
            {a: values[n] for a, n in unit.names.items()},
        )
        return unit.rule(call, grads[0])


def plan_for(task: Task, params: Mapping[str, Tensor]) -> Plan:
    """The task's plan for these parameters, made on first use and kept with the task."""
    key = (
        tuple(params),
        tuple((id(m), type(m)) for m in task.model.modules()),
    )
    if key not in task.plans:
        task.plans[key] = _make(task, params)
    return task.plans[key]


def _make(task: Task, params: Mapping[str, Tensor]) -> Plan:
    probe = torch.arange(min(PROBE, task.n_data))
    _check_independent(task, params, probe)
    units = _units(task.model, set(params))
    whole: tuple[str, ...] = ()
    for _ in range(3):
        plan, wrong = _tried(task, params, probe, units, whole)
        if not wrong:
            return plan
        units, whole = _rerouted(units, whole, wrong)
    raise ModelError(
        f"per-example gradients of {sorted(wrong)[:5]} disagree with autograd's; "
        "the model's forward pass may be random or keep state between calls"
    )


def _units(model: nn.Module, wanted: set[str]) -> list[Unit]:
    canonical = {id(p): n for n, p in model.named_parameters()}
    units = []
    for path, module in model.named_modules():
        own = {
            a: canonical[id(p)]
            for a, p in module._parameters.items()
            if p is not None and canonical[id(p)] in wanted
        }
        if own:
            rule = rule_for(module) if set(own) <= {"weight", "bias"} else None
            if isinstance(module, nn.Embedding) and module.max_norm is not None:
                raise ModelError(
                    f"Embedding {path!r} renormalises its rows in place (max_norm); build it "
                    "with max_norm=None to analyse it"
                )
            units.append(Unit(path, module, own, rule))
    return units


def _tried(
    task: Task, params: Mapping[str, Tensor], probe: Tensor, units: list[Unit], whole: tuple[str, ...]
) -> tuple[Plan, set[str]]:
    """A plan, and the parameters whose gradients it gets wrong on the probe."""
    batch, k = task.fetch(probe), len(probe)
    first = record(task, params, batch, units, size=k, indices=probe)
    shared = _shared_outputs(first, k)
    recording = first
    if shared:
        recording = record(task, params, batch, units, size=k, indices=probe, shared=shared)
    axes = {(v.unit.path, v.occurrence): _axes(v, k) for v in recording.visits}
    plan = Plan(tuple(units), whole, axes, shared, lambda columns: 1.0)
    generator = torch.Generator().manual_seed(0)
    outputs = recording.outputs
    cotangent = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    cotangent = cotangent.to(outputs)
    truth = _autograd(task, params, probe, cotangent)
    try:
        terms = plan.terms(task, params, recording, probe, [cotangent])
        ours = {n: g[:, 0] for term in terms for n, g in term.jacobian().items()}
    except ModelError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError):
        terms = []
        ours = _piecewise(plan, task, params, recording, cotangent)
    wrong = {
        n for n in params if not _agrees(ours.get(n), truth[n])
    }
    return replace(plan, floats=_cost(recording, terms, k)), wrong


def _piecewise(
    plan: Plan, task: Task, params: Mapping[str, Tensor], recording: Recording, cotangent: Tensor
) -> dict[str, Tensor]:
    """The gradients of the visits that can be read; a visit that raises counts as wrong."""
    values = {**{n: p.detach() for n, p in task.model.named_parameters()}, **params}
    found: list[Term] = []
    broken: set[str] = set()
    with torch.no_grad(), task.evaluation():
        for visit, grads in zip(recording.visits, recording.backward([cotangent]), strict=True):
            try:
                terms = plan._visit_terms(task, values, visit, grads, len(cotangent))
                for term in terms:
                    term.jacobian()
                found += terms
            except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError):
                broken |= set(visit.unit.names.values())
    ours: dict[str, Tensor] = {}
    for term in found:
        for name, columns in term.jacobian().items():
            part = columns[:, 0]
            ours[name] = ours[name] + part if name in ours else part
    return {n: g for n, g in ours.items() if n not in broken}


def _rerouted(
    units: list[Unit], whole: tuple[str, ...], wrong: set[str]
) -> tuple[list[Unit], tuple[str, ...]]:
    """Wrong under a rule: let a called ancestor adopt it by torch.func; else the whole model."""
    direct = {n for u in units if u.rule is None for n in u.names.values()} & wrong
    kept: list[Unit] = []
    adopted: dict[str, dict[str, str]] = {}
    modules: dict[str, nn.Module] = {}
    paths = {u.path: u for u in units}
    for unit in units:
        bad = {a: n for a, n in unit.names.items() if n in wrong}
        names = {a: n for a, n in unit.names.items() if n not in wrong}
        if names:
            kept.append(replace(unit, names=names))
        parent = unit.path.rpartition(".")[0]
        adopter = paths.get(parent) if unit.path else None
        for attribute, name in bad.items():
            # e.g. MultiheadAttention uses out_proj's weight without calling out_proj
            if adopter is not None and adopter.rule is None and name not in direct:
                leaf = unit.path.rpartition(".")[2]
                adopted.setdefault(parent, {})[f"{leaf}.{attribute}"] = name
                modules[parent] = adopter.module
    given = {n for names in adopted.values() for n in names.values()}
    result: list[Unit] = []
    for unit in kept:
        extra = adopted.pop(unit.path, {})
        result.append(replace(unit, names={**unit.names, **extra}))
    result += [Unit(path, modules[path], names, None) for path, names in adopted.items()]
    return result, tuple(sorted({*whole, *(wrong - given)}))


def _autograd(
    task: Task, params: Mapping[str, Tensor], probe: Tensor, cotangent: Tensor
) -> dict[str, Tensor]:
    """Every probe example's gradient by plain autograd, ``[k, *shape]`` per name."""
    with torch.enable_grad(), task.evaluation():
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        outputs, _ = task.run(task.fetch(probe), leaves, probe)
    rows: list[tuple[Tensor, ...]] = []
    for i in range(len(probe)):
        if not outputs.requires_grad:
            rows.append(tuple(torch.zeros_like(p) for p in leaves.values()))
            continue
        rows.append(
            torch.autograd.grad(
                outputs[i],
                list(leaves.values()),
                cotangent[i],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        )
    return {n: torch.stack([row[j] for row in rows]) for j, n in enumerate(leaves)}


def _agrees(ours: Tensor | None, truth: Tensor) -> bool:
    scale = torch.linalg.vector_norm(truth)
    if ours is None:
        return bool(scale == 0)
    if ours.shape != truth.shape:
        return False
    tolerance = torch.finfo(truth.dtype).eps ** 0.6
    return bool(torch.linalg.vector_norm(ours - truth) <= tolerance * scale)


def _check_independent(task: Task, params: Mapping[str, Tensor], probe: Tensor) -> None:
    """Raise :class:`ModelError` when an example's output depends on its batch or on chance."""
    if len(probe) < 2:
        return
    with torch.no_grad(), task.evaluation():
        together, _ = task.run(task.fetch(probe), params, probe)
        alone, _ = task.run(task.fetch(probe[:1]), params, probe[:1])
    if alone.shape[1:] != together.shape[1:]:
        raise ModelError("the number of outputs of an example changes with its batch")
    scale = together.abs().amax().clamp_min(1e-30)
    if bool((together[0] - alone[0]).abs().amax() > 1e-2 * scale):
        raise ModelError(
            "the output of an example changes with the batch it comes in, or from call to call; "
            "the analyses need a deterministic dataset and model that treat examples one by one"
        )


def _axes(visit: Visit, batch: int) -> Axes:
    leaves = tree_flatten((visit.args, visit.kwargs))[0]
    inputs = [batch_axis(x, batch) if isinstance(x, Tensor) else None for x in leaves]
    return inputs, [batch_axis(x, batch) for x in visit.outputs]


def _shared_outputs(recording: Recording, batch: int) -> frozenset[tuple[str, int, int]]:
    """Outputs with one row for all examples (position embeddings, say)."""
    return frozenset(
        (v.unit.path, v.occurrence, i)
        for v in recording.visits
        for i, leaf in enumerate(v.outputs)
        if batch > 1 and leaf.ndim > 0 and batch_axis(leaf, batch).shared
    )


def _canonical_below(model: nn.Module, module: nn.Module) -> dict[str, str]:
    canonical = {id(p): n for n, p in model.named_parameters()}
    below = module.named_parameters(remove_duplicate=False)
    return {a: canonical[id(p)] for a, p in below}


def _cost(recording: Recording, terms: list[Term], batch: int) -> Callable[[int], float]:
    """Numbers held per example as a function of the columns K, measured on the probe."""
    inputs = outputs = 0.0
    matrices = 0.0
    for visit in recording.visits:
        outputs += sum(leaf.numel() for leaf in visit.outputs) / batch
    for term in terms:
        if isinstance(term, Outer):
            inputs += term.inputs.numel() / batch
            if term.positions > 1:
                g, o, i = term.layout.groups, term.layout.rows, term.layout.columns
                matrices = max(matrices, float(g * o * i))
        elif isinstance(term, Rows):
            inputs += term.ids.numel() / batch
        else:
            matrices += sum(c[:, 0].numel() for c in term.jacobian().values()) / batch
    return lambda columns: 2 * inputs + (columns + 3) * outputs + 2.5 * columns * matrices

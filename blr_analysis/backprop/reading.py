"""A recorded chunk read into terms: every parameter's gradients, by the way its plan chose.

What a plan learned on a handful of examples is held against every chunk: a layer that sees other
shapes than the plan expects (experts that a router fills, say) is differentiated through the whole
model for that chunk, one example at a time, rather than misread.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.fallback import module_columns, task_columns
from blr_analysis.backprop.layers import Axis, Call, linear
from blr_analysis.backprop.record import Recording, Unit, Visit, rounding
from blr_analysis.backprop.terms import Term, merged
from blr_analysis.checks import some
from blr_analysis.task import Task, parameter_places

Axes = tuple[list[Axis | None], list[Axis]]  # of a visit's input leaves and output leaves


@dataclass
class WithoutRule:
    """Parameters that no layer rule reads, and the seconds of their gradients, until they are
    named."""

    names: set[str] = field(default_factory=set)
    seconds: float = 0.0
    named: bool = False

    @contextmanager
    def timed(self, names: Iterable[str], device: torch.device) -> Iterator[None]:
        """Count what happens inside as the work for these parameters."""
        if self.named:
            yield
            return
        start = _clock(device)
        yield
        self.seconds += _clock(device) - start
        self.names.update(names)

    def warn(self, whole: float) -> None:
        """Name them once, with their share of the ``whole`` seconds of a sweep."""
        if self.named or not self.names:
            return
        self.named = True
        share = min(1.0, self.seconds / max(whole, 1e-9))
        warnings.warn(
            f"no layer rule reads {some(sorted(self.names))}: their gradients, by torch.func, took "
            f"{share:.0%} of a sweep's time",
            stacklevel=3,
        )


def _clock(device: torch.device) -> float:
    """Seconds, once a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Plan:
    """Units with their rules, the batch axes of what they see, and the cost of one example."""

    units: tuple[Unit, ...]
    whole_model: tuple[str, ...]  # parameters differentiated through the whole model
    axes: dict[tuple[str, int], Axes]  # by unit and occurrence
    shared: frozenset[tuple[str, int, int]]  # outputs that are lifted to one row per example
    floats: Callable[..., float]  # K columns → numbers held per example
    outputs: int = 0  # C; 1 for sequences, whose outputs are never asked for one by one
    numbers: float = 0.0  # in the data of one example of the probe
    routes: bool = False  # whether rows of examples are picked and put on the way to the outputs
    without_rule: WithoutRule = field(default_factory=WithoutRule)

    def chunk_size(
        self, columns: int, budget: int, itemsize: int, n_data: int, *, by_parts: bool = False
    ) -> int:
        """Examples per chunk so that the working memory stays within ``budget`` bytes."""
        one = itemsize * max(1.0, self.floats(columns, by_parts=by_parts))
        return int(max(1, min(n_data, budget // one)))

    def head_of(self, recording: Recording) -> str | None:
        """The weight of the linear layer whose outputs are the model's, one row an example; None
        where no layer is that, or where the weight is used elsewhere too."""
        outputs = recording.outputs
        visits = recording.visits
        if outputs.ndim != 2 or outputs.grad_fn is None or not visits or self.whole_model:
            return None
        last = visits[-1]
        names = last.unit.names
        if last.unit.rule is not linear or last.edges != [get_gradient_edge(outputs)]:
            return None
        used_before = {name for visit in visits[:-1] for name in visit.unit.names.values()}
        axes = self.axes_of(last, len(outputs))
        is_plain = axes is not None and axes[0][0] == Axis() == axes[1][0]
        if not is_plain or "weight" not in names or not used_before.isdisjoint(names.values()):
            return None
        return names["weight"]

    def terms(
        self,
        task: Task,
        params: Mapping[str, Tensor],
        recording: Recording,
        indices: Tensor,
        cotangents: list[Tensor],
        *,
        last: bool = False,
    ) -> list[Term]:
        """G_ic of every unit for these cotangents, each parameter in exactly one term."""
        grads = recording.backward(cotangents, last=last and not self.routes)
        values = {**{n: p.detach() for n, p in task.model.named_parameters()}, **params}
        canonical = names_of(task.model)
        terms: list[Term] = []
        alone = set(self.whole_model)
        if self.routes:
            alone |= self._misplaced(recording, cotangents[0], grads)
        loose = any(visit.unit.rule is None for visit in recording.visits)  # they are run again
        running = task.evaluation() if loose else nullcontext()
        with torch.inference_mode(False), torch.no_grad(), running:
            for visit, visited in zip(recording.visits, grads, strict=True):
                axes = self.axes_of(visit, len(indices))
                if axes is None:
                    alone.update(visit.unit.names.values())
                    continue
                names = visit.unit.names.values()
                slow = visit.unit.rule is None
                timed = self.without_rule.timed(names, task.device) if slow else nullcontext()
                try:
                    with timed:
                        terms += read(canonical, values, visit, axes, visited, len(indices))
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:  # a module that does not run by itself: it keeps state
                    if not slow:
                        raise
                    alone.update(names)
        result = []
        for term in merged(terms):
            if alone.isdisjoint(term.names):
                result.append(term)
            else:
                alone.update(term.names)
        if alone:
            with self.without_rule.timed(alone, task.device):
                result.append(task_columns(task, values, sorted(alone), indices, cotangents))
        return result

    def _misplaced(
        self, recording: Recording, cotangent: Tensor, grads: list[list[list[Tensor]]]
    ) -> set[str]:
        """The names of layers with a row that is not of the example that its place says.

        Where every example's cotangent is multiplied by a number of its own, so must be the
        gradients of its rows: one backward pass more.
        """
        batch = len(cotangent)
        steps = torch.arange(batch, dtype=torch.float64) * 0.6180339887498949
        scales = (1 + steps.frac()).to(cotangent)
        lead = scales.view(batch, *[1] * (cotangent.ndim - 1))
        scaled = recording.backward([cotangent * lead])
        names: set[str] = set()
        near = rounding(recording.outputs) ** 0.6
        for visit, before, after in zip(recording.visits, grads, scaled, strict=True):
            axes = self.axes_of(visit, batch)
            for axis, (g, *_), (h,) in zip(axes[1] if axes else [], before, after, strict=False):
                rows = axis.first(g, batch).reshape(batch * axis.repeats, -1)
                rows = rows * scales.repeat_interleave(axis.repeats).unsqueeze(1)
                gap = axis.first(h, batch).reshape(rows.shape) - rows
                bound = near * torch.linalg.vector_norm(rows, dim=1)
                if bool((torch.linalg.vector_norm(gap, dim=1) > bound).any()):
                    names.update(visit.unit.names.values())
        return names

    def axes_of(self, visit: Visit, batch: int) -> Axes | None:
        """Where the examples are in what a layer saw; None where the plan does not know.

        A call beyond those that the plan saw (a loop over longer sequences) is read as the last
        one that it did see.
        """
        known = (self.axes.get((visit.unit.path, o)) for o in range(visit.occurrence, -1, -1))
        axes = next((a for a in known if a is not None), None)
        if visit.stale or axes is None:
            return None
        leaves = [*tree_leaves((visit.args, visit.kwargs)), *visit.outputs]
        layout = [*axes[0], *axes[1]]
        fits = len(leaves) == len(layout) and all(
            axis is None or (isinstance(leaf, Tensor) and axis.fits(leaf, batch))
            for leaf, axis in zip(leaves, layout, strict=True)
        )
        return axes if fits else None


def names_of(model: nn.Module) -> dict[int, str]:
    """Every parameter's name by its id, tied ones once."""
    return {id(p): n for n, p in model.named_parameters()}


def read(
    canonical: Mapping[int, str],
    values: Mapping[str, Tensor],
    visit: Visit,
    axes: Axes,
    grads: list[list[Tensor]],
    batch: int,
) -> list[Term]:
    """G_ic of one visited unit, by its rule or by ``torch.func``; ``grads``: [leaf][column]."""
    unit = visit.unit
    if unit.rule is None:
        places = {a: canonical[id(p)] for a, p in parameter_places(unit.module).items()}
        return [module_columns(visit, values, places, axes, grads, batch)]
    axis = axes[0][0]
    assert axis is not None
    own = {a: values[n] for a, n in unit.names.items()}
    where = (batch, axis, axes[1][0])
    call = Call(unit.module, visit.args, visit.kwargs, *where, unit.names, own, grads)
    return unit.rule(call, grads[0])

"""A recorded chunk read into terms: every parameter's gradients, by the way its plan chose.

A plan is learned on a handful of examples and checked against every chunk. A layer that sees other
shapes than the plan expects (experts that a router fills, say) is not misread: it is differentiated
through the whole model for that chunk, one example at a time.
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
from blr_analysis.models import parameter_places
from blr_analysis.task import Task

Axes = tuple[list[Axis | None], list[Axis]]  # of a visit's input leaves and output leaves


@dataclass
class WithoutRule:
    """Parameters that no layer rule reads, and how many seconds their gradients take, until a
    warning names them."""

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

    def warn(self, sweep: float) -> None:
        """Name them once, with their share of the seconds of a sweep."""
        if self.named or not self.names:
            return
        self.named = True
        share = min(1.0, self.seconds / max(sweep, 1e-9))
        warnings.warn(
            f"no layer rule reads {some(sorted(self.names))}: their gradients, by torch.func, took "
            f"{share:.0%} of a sweep's time",
            stacklevel=3,
        )


def _clock(device: torch.device) -> float:
    """Seconds, after a GPU has finished its work."""
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
    routes: bool = False  # whether rows of examples change places on the way to the outputs
    without_rule: WithoutRule = field(default_factory=WithoutRule)

    def chunk_size(
        self, columns: int, budget: int, itemsize: int, n_data: int, *, by_parts: bool = False
    ) -> int:
        """Examples per chunk so that the working memory stays within ``budget`` bytes."""
        bytes_per_example = itemsize * max(1.0, self.floats(columns, by_parts=by_parts))
        return int(max(1, min(n_data, budget // bytes_per_example)))

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
        values = values_of(task, params)
        terms, unread = self._read(task, values, recording.visits, grads, len(indices))
        unread.update(self.whole_model)
        if self.routes:
            unread |= self._misplaced(recording, cotangents[0], grads)
        result: list[Term] = []
        for term in merged(terms):
            if unread.isdisjoint(term.names):
                result.append(term)
            else:
                unread.update(term.names)
        if unread:
            with self.without_rule.timed(unread, task.device):
                result.append(task_columns(task, values, sorted(unread), indices, cotangents))
        return result

    def _read(
        self,
        task: Task,
        values: Mapping[str, Tensor],
        visits: list[Visit],
        grads: list[list[list[Tensor]]],
        batch: int,
    ) -> tuple[list[Term], set[str]]:
        """The terms of all visits, and the names of parameters whose visits cannot be read."""
        canonical = names_of(task.model)
        runs_modules_again = any(visit.unit.rule is None for visit in visits)
        mode = task.evaluation() if runs_modules_again else nullcontext()
        terms: list[Term] = []
        unread: set[str] = set()
        with torch.inference_mode(False), torch.no_grad(), mode:
            for visit, columns in zip(visits, grads, strict=True):
                share = self._read_visit(canonical, values, visit, columns, batch)
                if share is None:
                    unread.update(visit.unit.names.values())
                else:
                    terms += share
        return terms, unread

    def _read_visit(
        self,
        canonical: Mapping[int, str],
        values: Mapping[str, Tensor],
        visit: Visit,
        grads: list[list[Tensor]],
        batch: int,
    ) -> list[Term] | None:
        axes = self.axes_of(visit, batch)
        if axes is None:
            return None
        if visit.unit.rule is not None:
            return read(canonical, values, visit, axes, grads, batch)
        names = visit.unit.names.values()
        device = next(iter(values.values())).device
        try:
            with self.without_rule.timed(names, device):
                return read(canonical, values, visit, axes, grads, batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a module that does not run by itself: it keeps state
            return None

    def _misplaced(
        self, recording: Recording, cotangent: Tensor, grads: list[list[list[Tensor]]]
    ) -> set[str]:
        """The names of layers with a row that belongs to another example than its place says.

        Where every example's cotangent is multiplied by a number of its own, so must be the
        gradients of its rows. This takes one more backward pass.
        """
        batch = len(cotangent)
        steps = torch.arange(batch, dtype=torch.float64) * 0.6180339887498949
        factors = (1 + steps.frac()).to(cotangent)
        by_example = factors.view(batch, *[1] * (cotangent.ndim - 1))
        scaled_grads = recording.backward([cotangent * by_example])
        tolerance = rounding(recording.outputs) ** 0.6
        names: set[str] = set()
        for visit, before, after in zip(recording.visits, grads, scaled_grads, strict=True):
            axes = self.axes_of(visit, batch)
            if axes is None:
                continue
            for axis, columns, (scaled,) in zip(axes[1], before, after, strict=False):
                if not _scales_by_example(axis, columns[0], scaled, factors, tolerance):
                    names.update(visit.unit.names.values())
        return names

    def axes_of(self, visit: Visit, batch: int) -> Axes | None:
        """Where the examples are in what a layer saw; None where the plan does not know.

        A call beyond those that the plan saw (a loop over longer sequences) is read as the last
        one that it did see.
        """
        path = visit.unit.path
        occurrences = range(visit.occurrence, -1, -1)
        last_seen = next((o for o in occurrences if (path, o) in self.axes), None)
        if visit.stale or last_seen is None:
            return None
        axes = self.axes[path, last_seen]
        leaves = [*tree_leaves((visit.args, visit.kwargs)), *visit.outputs]
        expected = [*axes[0], *axes[1]]
        if len(leaves) != len(expected):
            return None
        fits = all(
            axis is None or (isinstance(leaf, Tensor) and axis.fits(leaf, batch))
            for leaf, axis in zip(leaves, expected, strict=True)
        )
        return axes if fits else None


def _scales_by_example(
    axis: Axis, before: Tensor, after: Tensor, factors: Tensor, tolerance: float
) -> bool:
    """Whether the rows of every example, and no others, were multiplied by its factor."""
    batch = len(factors)
    rows = axis.first(before, batch).reshape(batch * axis.repeats, -1)
    expected = rows * factors.repeat_interleave(axis.repeats).unsqueeze(1)
    gap = axis.first(after, batch).reshape(rows.shape) - expected
    bound = tolerance * torch.linalg.vector_norm(expected, dim=1)
    return not bool((torch.linalg.vector_norm(gap, dim=1) > bound).any())


def values_of(task: Task, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of all the model's parameters by name, these ones in place of its own."""
    values = {name: p.detach() for name, p in task.model.named_parameters()}
    return {**values, **params}


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
    """G_ic of one visited unit, by its rule or by ``torch.func``.

    ``canonical``: names of parameters by id; ``grads``: ``[output leaf][column]``.
    """
    unit = visit.unit
    if unit.rule is None:
        places = {a: canonical[id(p)] for a, p in parameter_places(unit.module).items()}
        return [module_columns(visit, values, places, axes, grads, batch)]
    (input_axis, *_), (output_axis, *_) = axes
    assert input_axis is not None
    call = Call(
        module=unit.module,
        args=visit.args,
        kwargs=visit.kwargs,
        batch=batch,
        input_axis=input_axis,
        output_axis=output_axis,
        names=unit.names,
        values={attribute: values[name] for attribute, name in unit.names.items()},
        every_grad=grads,
    )
    return unit.rule(call, grads[0])

"""From a recorded chunk to terms: every parameter's gradients, as its plan says.

A plan is made on a handful of examples, and every chunk is compared with it. A layer may see other
shapes than the plan expects (experts that a router fills, say). For that chunk it is differentiated
through the whole model, one example at a time.
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
from blr_analysis.backprop.record import Recording, SharedOutputs, Unit, Visit, rounding
from blr_analysis.backprop.terms import Term, merged
from blr_analysis.checks import some
from blr_analysis.models import parameter_places
from blr_analysis.task import Task

GOLDEN_RATIO = 0.6180339887498949  # whose multiples, modulo 1, all differ

Axes = tuple[list[Axis | None], list[Axis]]
"""Where the examples are in a visit's input leaves and in its output leaves."""


@dataclass
class WithoutRule:
    """Parameters that no layer rule reads, and how long their gradients take.

    Attributes:
        names: of these parameters.
        seconds: that their gradients have taken, until the warning.
        has_warned: whether a warning has named them.
    """

    names: set[str] = field(default_factory=set)
    seconds: float = 0.0
    has_warned: bool = False

    @contextmanager
    def timed(self, names: Iterable[str], device: torch.device) -> Iterator[None]:
        """Count the seconds inside as those of these parameters' gradients."""
        if self.has_warned:
            yield
            return
        start = _clock(device)
        yield
        self.seconds += _clock(device) - start
        self.names.update(names)

    def warn(self, sweep: float) -> None:
        """Warn of them once, with their share of a sweep that took ``sweep`` seconds."""
        if self.has_warned or not self.names:
            return
        self.has_warned = True
        share = min(1.0, self.seconds / max(sweep, 1e-9))
        warnings.warn(
            f"no layer rule reads {some(sorted(self.names))}: torch.func computes their "
            f"gradients, in {share:.0%} of a sweep's time",
            stacklevel=3,
        )


def _clock(device: torch.device) -> float:
    """The time in seconds, after a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Plan:
    """How every parameter of a model is differentiated, and what one example costs.

    Attributes:
        units: modules with the rules that read them.
        whole_model: parameters that are differentiated through the whole model.
        axes: where the examples are in a call, by path and number of the call.
        shared: outputs that are lifted to one row per example.
        floats: numbers in memory per example, as a function of the number of columns K.
        outputs: C; 1 for sequences, whose outputs are never asked for one by one.
        numbers: how many numbers the data of one example of the probe have.
        tokens: how many tokens the sequences of the probe have; 1 for other data.
        routes: whether rows of examples change places on the way to the outputs.
        without_rule: the parameters that no layer rule reads.
    """

    units: tuple[Unit, ...]
    whole_model: tuple[str, ...]
    axes: dict[tuple[str, int], Axes]
    shared: SharedOutputs
    floats: Callable[..., float]
    outputs: int = 0
    numbers: float = 0.0
    tokens: int = 1
    routes: bool = False
    without_rule: WithoutRule = field(default_factory=WithoutRule)

    def chunk_size(
        self, columns: int, budget: int, itemsize: int, n_data: int, *, by_parts: bool = False
    ) -> int:
        """Examples per chunk so that the working memory stays within ``budget`` bytes."""
        bytes_per_example = itemsize * max(1.0, self.floats(columns, by_parts=by_parts))
        return int(max(1, min(n_data, budget // bytes_per_example)))

    def head_of(self, recording: Recording) -> str | None:
        """The weight of the linear layer that gives the model's outputs, one row an example.

        None where no such layer does, or where its parameters are used elsewhere too.
        """
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
        has_row_per_example = axes is not None and axes[0][0] == Axis() == axes[1][0]
        is_used_once = used_before.isdisjoint(names.values())
        return names.get("weight") if has_row_per_example and is_used_once else None

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
        """G_ic for these cotangents, with every parameter in exactly one term.

        ``last``: no more gradients of this recording are needed, and its graph is freed.
        """
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
        """The parameters of layers with a row that belongs to another example than its place says.

        One more backward pass is made, in which every example's cotangent is multiplied by a factor
        of its own. The gradients of the example's rows must then change by the same factor.
        """
        batch = len(cotangent)
        steps = torch.arange(batch, dtype=torch.float64) * GOLDEN_RATIO
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
        """Where the examples are in a call's inputs and outputs; None where the plan cannot tell.

        The probe may have had fewer calls of the layer than this pass (a loop over longer
        sequences). The calls beyond them are read like the last one of the probe.
        """
        path = visit.unit.path
        occurrences = range(visit.occurrence, -1, -1)
        of_probe = next((number for number in occurrences if (path, number) in self.axes), None)
        if visit.stale or of_probe is None:
            return None
        axes = self.axes[path, of_probe]
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
    """Whether each example's rows, from ``before`` to ``after``, were multiplied by its factor."""
    batch = len(factors)
    rows = axis.first(before, batch).reshape(batch * axis.repeats, -1)
    expected = rows * factors.repeat_interleave(axis.repeats).unsqueeze(1)
    gap = axis.first(after, batch).reshape(rows.shape) - expected
    bound = tolerance * torch.linalg.vector_norm(expected, dim=1)
    return not bool((torch.linalg.vector_norm(gap, dim=1) > bound).any())


def values_of(task: Task, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of all the model's parameters by name, with ``params`` in place of its own.

    Frozen parameters stand here as they are, quantised or in pieces.
    """
    values = {}
    for name, parameter in task.model.named_parameters():
        values[name] = parameter.detach() if parameter.requires_grad else parameter
    return {**values, **params}


def names_of(model: nn.Module) -> dict[int, str]:
    """Every parameter's name by its id; tied parameters have one name."""
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

    Args:
        canonical: names of the model's parameters by id.
        values: of all the model's parameters, by name.
        grads: gradients at the visit's outputs, ``[output leaf][column]``.
        batch: the number of examples.
    """
    unit = visit.unit
    if unit.rule is None:
        places = {place: canonical[id(p)] for place, p in parameter_places(unit.module).items()}
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

"""``blr-analysis merge --dry-run``: what a merge would do and cost, printed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from blr_analysis.errors import BLRError, InputError
from blr_analysis.terminal import grid, pairs, section, show

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    from blr_analysis.merging.forecast import MergeForecast, TaskForecast
    from blr_analysis.merging.job import Job
    from blr_analysis.merging.merge_plan import MergePlan, TensorPlan

FLOAT32_BYTES = 4
MODELS_IN_MEMORY = 3  # of a merge by data: the result, one of the models, and the tasks' model
LAYERS_SHOWN = 2  # of those that a task's loss rises by
OF_GRAM = (
    "gram precisions do not know how the loss depends on these outputs: its share may be larger; "
    "kron precisions predict the loss itself"
)
BY_DIAGONALS = "diagonal precisions hardly order merges; kron precisions do"


def show_preview(plan: MergePlan, job: Job) -> dict[str, Any]:
    """Print the settings, the models, what becomes of the tensors, and the forecast.

    Returns:
        The costs and the forecast as plain values.
    """
    show_settings(plan, job)
    show_table("Models", columns_of_models(plan, job))
    show_table("Tensors", columns_of_tensors(plan, job))
    return {
        "method": plan.method.name,
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.bytes_written,
        "memory": plan.memory,
        "forecast": show_forecast(plan),
    }


def columns_of_models(plan: MergePlan, job: Job) -> dict[str, list[str]]:
    """One row for each model: its folder, weight, precision and data."""
    from blr_analysis.merging.card import shown

    columns: dict[str, list[str]] = {
        "model": [shown(member.model) for member in job.members],
        "weight": [repr(member.weight) for member in job.members],
    }
    if plan.method.uses_precisions:
        places = [member.precision for member in job.members]
        columns["precision"] = ["" if place is None else shown(place) for place in places]
    files = [member.data for member in job.members if member.data is not None]
    if files:  # a recipe names data for all models or for none
        columns["data"] = [shown(file) for file in files]
    return columns


def show_settings(plan: MergePlan, job: Job) -> None:
    """Print the method, its settings and its cost, a line each."""
    from blr_analysis.merging.card import size

    rows: dict[str, object] = {"method": f"{plan.method.name}: {plan.method.formula}"}
    if job.base is not None:
        rows["base"] = job.base
    if plan.base_precision is not None:
        rows["base precision"] = plan.base_precision.name
    if plan.method.uses_base_precision:
        rows["delta"] = f"{plan.delta:g}"
    if job.scale != 1:
        rows["lambda"] = repr(job.scale)
    rows["to read"] = size(plan.bytes_read)
    rows["to write"] = size(plan.bytes_written)
    rows["memory"] = f"{size(plan.memory)} of buffers at most, {plan.workers} threads"
    if job.propagates:
        bytes_of_a_model = FLOAT32_BYTES * sum(tensor.spec.numel for tensor in plan.tensors)
        rows["memory for models"] = f"{size(MODELS_IN_MEMORY * bytes_of_a_model)} at most"
        rows["passes"] = "for every layer, a forward pass over each model's data"
    pairs(rows)


def show_forecast(plan: MergePlan) -> list[dict[str, Any]] | None:
    """Print how far the merge is expected to raise every task's loss, or why that is unknown.

    Returns:
        A row for each task; None where it is unknown.
    """
    try:
        prediction = forecast_of(plan)
    except BLRError as fault:  # of precisions that the merge itself may not read
        typer.echo(f"\nNo forecast: {fault}")
        return None
    tasks = prediction.tasks
    columns = {
        "model": [Path(task.task).name for task in tasks],
        "rise": [nats(task.rise) for task in tasks],
        "range": [nats_between(task.low, task.high) for task in tasks],
        "by interference": [nats(task.interference) for task in tasks],
        "at the base": [nats(task.base_rise) for task in tasks],
        "of the base's": [percent(task.share) for task in tasks],
        "in the worst layer": [percent(task.largest_share) for task in tasks],
        "verdict": [task.verdict for task in tasks],
        "mostly in": [", ".join(layers_of(task)) for task in tasks],
    }
    are_known = {name: set(values) != {"-"} for name, values in columns.items()}
    title = "Forecast: rise of each task's loss, nats for each example"
    if are_known["rise"]:
        del columns["in the worst layer"]
    else:
        title = "Forecast: how far layers' outputs move, as a share of the move back to the base"
    show_table(title, {name: values for name, values in columns.items() if are_known[name]})
    if are_known["rise"]:
        typer.echo(f"cost {nats(prediction.cost)}: orders merges better than the rises do")
        if prediction.is_by_diagonals:
            typer.echo(BY_DIAGONALS)
    else:
        typer.echo(OF_GRAM)
    if prediction.note:
        typer.echo(prediction.note)
    return [
        {**vars(task), "low": task.low, "high": task.high, "verdict": task.verdict}
        for task in prediction.tasks
    ]


def percent(share: float) -> str:
    """A share in per cent; a dash where it is not known.

    >>> percent(0.123), percent(float("nan"))
    ('12%', '-')
    """
    return "-" if math.isnan(share) else f"{share:.0%}"


def nats(value: float) -> str:
    """A number of nats; a dash where it is not known.

    >>> nats(0.12345), nats(float("nan"))
    ('0.123', '-')
    """
    return "-" if math.isnan(value) else f"{value:.3g}"


def nats_between(low: float, high: float) -> str:
    """A range in nats; a dash where it is not known."""
    return "-" if math.isnan(low) else f"{low:.2g} to {high:.2g}"


def forecast_of(plan: MergePlan) -> MergeForecast:
    """The expected rise of every task's loss, by the precisions beside the models.

    Raises:
        BLRError: it cannot be predicted; the message says why.
    """
    from dataclasses import replace

    from blr_analysis.merging.forecast import forecast
    from blr_analysis.merging.recipe import precision_beside

    changes_vocabularies = plan.tokens.rows is not None
    if plan.job.propagates or changes_vocabularies:
        raise InputError("it needs precisions instead of data, and models with one vocabulary.")
    members = tuple(
        replace(member, precision=member.precision or precision_beside(member.model))
        for member in plan.job.members
    )
    if any(member.precision is None for member in members):
        raise InputError("it needs a precision of every model (`blr-analysis fisher`).")
    return forecast(replace(plan, job=replace(plan.job, members=members)))


def layers_of(task: TaskForecast) -> list[str]:
    """The layers whose change raises a task's loss most; the first few."""
    return [name.removesuffix(".weight") for name in list(task.tensors)[:LAYERS_SHOWN]]


def columns_of_tensors(plan: MergePlan, job: Job) -> dict[str, list[str]]:
    """One row for all tensors of the same fate, dtype and note."""
    from blr_analysis.merging.card import public, size

    groups: dict[tuple[str, str, str], list[TensorPlan]] = {}
    for tensor in plan.tensors:
        dtype = str(tensor.spec.dtype).removeprefix("torch.")
        key = (tensor.fate, dtype, public(tensor.note, job))
        groups.setdefault(key, []).append(tensor)
    return {
        "fate": [fate for fate, _, _ in groups],
        "tensors": [f"{len(tensors):,}" for tensors in groups.values()],
        "numbers": [f"{sum(t.spec.numel for t in tensors):,}" for tensors in groups.values()],
        "dtype": [dtype for _, dtype, _ in groups],
        "to write": [size(sum(t.spec.nbytes for t in tensors)) for tensors in groups.values()],
        "note": [note for _, _, note in groups],
    }


def show_table(title: str, columns: Mapping[str, Sequence[str]]) -> None:
    """Print a table under a heading."""
    show(section(title, "", grid(columns)))

"""``blr-analysis merge``: from a recipe to a merged model.

What only this command needs is imported inside of it, so that the others start faster.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blr_analysis.cli.options import Shared, read_size
from blr_analysis.errors import BLRError, InputError
from blr_analysis.terminal import Teller, grid, pairs, section, show

if TYPE_CHECKING:
    from blr_analysis.merging.job import Job
    from blr_analysis.merging.merge_plan import MergePlan, TensorPlan
    from blr_analysis.merging.recipe import Recipe

REPORT = "merge_report.csv"  # a folder with this file was written by a merge


def merge(
    *,
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE.yml",
            help="What to merge with what; relative paths start at its folder.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT", help="The folder to write: new, or empty.", show_default=False
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="If left out, one per core, up to 8.")] = None,
    shard_size: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Of a file, at most; a larger tensor has a file of its own."
        ),
    ] = "5GB",
    validate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="For merge_method: auto, labelled examples that no model was trained on; once for "
            "each task.",
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Take precisions that were recorded for other weights."),
    ] = False,
    shared: Shared,
) -> None:
    """Merge fine-tuned models into one, each weight as far as each model is sure of it.

    The recipe is YAML, as mergekit writes it:

      merge_method: gradient_matching   # fisher | task_arithmetic | linear
      base_model: ./base                # paths start at the recipe's folder
      models:
        - model: ./ft1                  # its precision: ./ft1/precision
          parameters: {weight: 1.0}     # a number, [0.2, 0.8] over the layers,
        - model: ./ft2                  # or [{filter: mlp, value: 0.5}, ...]
      parameters: {delta: 1.0e-8, missing_precision: error}  # base | zero
      out_dtype: bfloat16

    With data: ./train.jsonl at every model, in the place of precisions (fisher, auto), the layers'
    inputs are taken behind the merged layers, as RegMean++ does; a model's whole memory is needed.

    Look first, then merge:

      blr-analysis merge recipe.yml --dry-run
      blr-analysis merge recipe.yml OUT --max-memory 1GB

    Weights are read from this machine only, piece by piece, and OUT appears when it is whole: the
    weights, configuration and tokenizer, a model card (README.md), the recipe (merge_recipe.yml),
    and the fate of every tensor (merge_report.csv). The recipes that mergekit has for linear and
    task_arithmetic run unchanged.
    """
    from dataclasses import replace

    from blr_analysis.files.placing import check_room
    from blr_analysis.merging.card import documents, outcome
    from blr_analysis.merging.folders import execute
    from blr_analysis.merging.plan import MAX_MEMORY, make_plan
    from blr_analysis.merging.recipe import read_recipe

    say = Teller()
    max_shard_bytes = read_size("--shard-size", shard_size)
    max_memory = shared.memory or MAX_MEMORY
    if out is not None:
        out = out.expanduser()
    replaces_a_merge = check_place(out, shared)
    parsed = read_recipe(recipe)
    for note in parsed.notes:
        say(f"{parsed.path.name}, {note}")
    if validate and not parsed.auto:
        raise InputError("--validate is for merge_method: auto")
    if parsed.out_adapter is not None and out is not None and not shared.dry_run:
        if replaces_a_merge:
            shutil.rmtree(out)
        write_adapter(parsed, out)
        return
    job = replace(parsed.job, trust=trust)
    if parsed.auto or not shared.dry_run:
        job = with_tasks(job, parsed.auto, shared, say)
    if parsed.auto:
        job = with_the_best_method(job, validate or [], say)
    parsed = replace(parsed, job=job)
    plan = make_plan(job, max_memory=max_memory, threads=threads)
    for note in plan.notes:
        say(note)
    if out is not None:
        check_room(out, plan.bytes_written)
    if shared.dry_run or out is None:
        show_plan(plan, parsed)
        show_forecast(plan)
        typer.echo("\nNothing was written (--dry-run).")
        return
    if replaces_a_merge:
        shutil.rmtree(out)
    say(f"merging {len(plan.models)} models by {plan.method.name}")
    report = execute(
        plan,
        out,
        max_shard_bytes=max_shard_bytes,
        documents=lambda written: documents(written, parsed.text),
    )
    say("done")
    for sentence in outcome(report):
        typer.echo(sentence)
    shards = ", ".join(report.shards)
    typer.echo(
        f"written to {report.folder}: {shards}, and a card, the recipe and the report beside them"
    )


def write_adapter(recipe: Recipe, out: Path) -> None:
    """Merge adapters into an adapter, and say what its rank keeps of every layer."""
    from blr_analysis.merging.adapter import merge_adapters_of

    assert recipe.out_adapter is not None
    report = merge_adapters_of(recipe.job, out, recipe.out_adapter.rank)
    worst = min(report.shares, key=lambda layer: report.shares[layer], default="")
    typer.echo(f"{len(report.shares)} layers merged, of rank {report.rank} at most")
    typer.echo(f"the rank keeps {report.share:.1%} of the square of {worst} or more of the others")
    if report.averaged:
        typer.echo(f"{len(report.averaged)} tensors of whole modules averaged")
    typer.echo(f"written to {report.folder}")


def check_place(out: Path | None, shared: Shared) -> bool:
    """Whether an earlier merge stands there and is to be replaced.

    Raises:
        InputError: no folder was named, and this is no dry run.
        StorageError: something stands there that may not be replaced.
    """
    from blr_analysis.files.placing import check_free

    if out is None:
        if not shared.dry_run:
            raise InputError("name the folder to write: blr-analysis merge RECIPE.yml OUT")
        return False
    if shared.force and (out / REPORT).is_file():
        return True
    check_free(out)
    return False


def with_tasks(job: Job, is_auto: bool, shared: Shared, say: Callable[[str], None]) -> Job:
    """The job with a task for the data of each model, where the recipe names data."""
    from dataclasses import replace

    files = [member.data for member in job.members if member.data is not None]
    if not files:
        return job
    from blr_analysis.huggingface.fisher import text_tasks
    from blr_analysis.merging.folders import reference_folder

    say("reading data")
    tasks = text_tasks(reference_folder(job) or Path(), files, labelled=is_auto)
    return replace(job, tasks=[shared.of(task) for task in tasks])


def with_the_best_method(job: Job, files: Sequence[Path], say: Callable[[str], None]) -> Job:
    """The job with the method that does best on held-out examples; every trial is printed."""
    from blr_analysis.huggingface.fisher import text_tasks
    from blr_analysis.merging.auto import chosen
    from blr_analysis.merging.folders import reference_folder

    say("choosing the method")
    tasks = []
    if files:
        tasks = text_tasks(reference_folder(job) or Path(), files, labelled=True)
    held_out = dict(zip(map(str, files), tasks, strict=True))
    job, choice = chosen(job, held_out or None)
    say(f"auto: {choice!r}")
    if not choice.points:
        return job
    points = sorted(choice.points, key=lambda point: point.nll)
    show_table(
        "Tried",
        {
            "merge": [point.method for point in points],
            "nll": [f"{point.nll:.4g}" for point in points],
        },
    )
    return job


def show_plan(plan: MergePlan, recipe: Recipe) -> None:
    """Print what would be done: the settings, the models, and what becomes of the tensors."""
    from blr_analysis.merging.card import shown

    job = recipe.job
    show_settings(plan, job)
    models: dict[str, list[str]] = {
        "model": [shown(member.model) for member in job.members],
        "weight": [repr(member.weight) for member in job.members],
    }
    if plan.method.uses_precisions:
        places = [member.precision for member in job.members]
        models["precision"] = ["" if place is None else shown(place) for place in places]
    if any(member.data is not None for member in job.members):
        models["data"] = [shown(member.data) for member in job.members if member.data is not None]
    show_table("Models", models)
    show_table("Tensors", columns_of_tensors(plan, job))


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
        bytes_of_a_model = 4 * sum(tensor.spec.numel for tensor in plan.tensors)
        rows["on top"] = (
            f"{size(3 * bytes_of_a_model)} at most: the result, a model and the tasks' own in "
            "memory; a sweep of forward passes over each model's data for every layer"
        )
    pairs(rows)


def show_forecast(plan: MergePlan) -> None:
    """Print what the merge is foretold to cost every task, where precisions say so."""
    from dataclasses import replace

    from blr_analysis.merging.forecast import forecast
    from blr_analysis.merging.recipe import precision_beside

    if plan.job.propagates or plan.tokens.rows is not None:
        typer.echo("\nNo forecast: it takes precisions, and models of one vocabulary.")
        return
    members = tuple(
        replace(member, precision=member.precision or precision_beside(member.model))
        for member in plan.job.members
    )
    if any(member.precision is None for member in members):
        typer.echo("\nNo forecast: it takes a precision of every model (`blr-analysis fisher`).")
        return
    try:
        found = forecast(replace(plan, job=replace(plan.job, members=members)))
    except BLRError as fault:  # of precisions that the merge itself may have no use for
        typer.echo(f"\nNo forecast: {fault}")
        return
    show_table(
        "Forecast: rise of each task's loss, nats for each example",
        {
            "model": [Path(task.task).name for task in found.tasks],
            "rise": [f"{task.rise:.3g}" for task in found.tasks],
            "range": [f"{task.low:.2g} to {task.high:.2g}" for task in found.tasks],
            "at the base": [f"{task.base_rise:.3g}" for task in found.tasks],
            "verdict": [task.verdict for task in found.tasks],
            "mostly in": [
                ", ".join(name.removesuffix(".weight") for name in list(task.tensors)[:2])
                for task in found.tasks
            ],
        },
    )
    if found.note:
        typer.echo(found.note)


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

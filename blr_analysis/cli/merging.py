"""``blr-analysis merge``: from a recipe to a merged model.

Modules that only this command needs are imported inside its functions, so that the other commands
start faster.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.cli.options import Shared, dry_run, option, read_size
from blr_analysis.errors import BLRError, InputError, StorageError
from blr_analysis.terminal import Teller

if TYPE_CHECKING:
    from blr_analysis.merging.adapter import AdapterReport
    from blr_analysis.merging.auto import Choice
    from blr_analysis.merging.job import Job
    from blr_analysis.merging.merge_plan import MergePlan
    from blr_analysis.merging.recipe import Recipe
    from blr_analysis.task import Task

REPORT = "merge_report.csv"  # a folder with this file was written by a merge


def merge(
    *,
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE.yml",
            help="The recipe of the merge. Relative paths start at its folder.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT", help="The folder to write: new, or empty.", show_default=False
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="How many threads. If left out: one per core, at most 8.")
    ] = None,
    shard_size: Annotated[
        str,
        option("SIZE", "The largest size of a file. A larger tensor gets its own file."),
    ] = "5GB",
    validate: Annotated[
        list[Path] | None,
        option(
            "FILE",
            "For merge_method auto: labelled examples that no model was trained on; "
            "once for each task.",
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Accept precisions that were recorded for other weights."),
    ] = False,
    shared: Shared,
) -> dict[str, Any]:
    """Merge fine-tuned models into one, by how sure each one is of its weights.

    The recipe is YAML, as for mergekit:

      merge_method: gradient_matching   # fisher | task_arithmetic | linear
      base_model: ./base                # paths start at the recipe's folder
      models:
        - model: ./ft1                  # its precision: ./ft1/precision
          parameters: {weight: 1.0}     # a number, [0.2, 0.8] over the layers,
        - model: ./ft2                  # or [{filter: mlp, value: 0.5}, ...]
      parameters: {delta: 1.0e-8, missing_precision: error}  # base | zero
      out_dtype: bfloat16

    In place of a precision, each model may name its data (data: ./train.jsonl, for fisher and
    auto). Each layer is then merged by its inputs in the merged model, as in RegMean++. Whole
    models must then fit into memory.

    Look first, then merge:

      blr-analysis merge recipe.yml --dry-run
      blr-analysis merge recipe.yml OUT --max-memory 1GB

    Weights are read piece by piece, from this machine only. OUT appears when it is complete. It
    holds the weights, configuration and tokenizer, a model card (README.md), the recipe
    (merge_recipe.yml), and what became of every tensor (merge_report.csv). mergekit's recipes for
    linear and task_arithmetic run unchanged.

    --json prints method, tensors, fallback, bytes_read, bytes_written, seconds, shards, written,
    tried. For a merge into an adapter it prints written, rank, shares, averaged.
    """
    from blr_analysis.cli.merge_preview import show_preview
    from blr_analysis.files.placing import check_room
    from blr_analysis.merging.plan import MAX_MEMORY, make_plan

    say = Teller()
    max_shard_bytes = read_size("--shard-size", shard_size)
    target = None if out is None else out.expanduser()
    replaces_a_merge = check_place(target, shared)
    parsed = recipe_at(recipe, say, has_examples=bool(validate))
    will_write = target is not None and not shared.dry_run
    if parsed.out_adapter is not None:
        if target is None or not will_write:
            return preview_adapter(parsed)
        if replaces_a_merge:
            shutil.rmtree(target)
        return write_adapter(parsed, target)
    job, choice = job_of(parsed, validate or [], shared, say, trust=trust)
    plan = make_plan(job, max_memory=shared.memory or MAX_MEMORY, threads=threads)
    for note in plan.notes:
        say(note)
    if target is not None:
        check_room(target, plan.bytes_written)
    if target is None or not will_write:
        costs = show_preview(plan, job)
        typer.echo("\nNothing was written (--dry-run).")
        return dry_run(**costs)
    facts = write_model(plan, target, parsed.text, max_shard_bytes, say, replaces=replaces_a_merge)
    return {**facts, "tried": trials(choice)}


def recipe_at(path: Path, say: Callable[[str], None], *, has_examples: bool) -> Recipe:
    """The recipe of a file; its notes are printed.

    Raises:
        InputError: no recipe, or ``has_examples`` (--validate) without a method to be chosen.
    """
    from blr_analysis.merging.recipe import read_recipe

    recipe = read_recipe(path)
    for note in recipe.notes:
        say(f"{recipe.path.name}, {note}")
    if has_examples and not recipe.auto:
        raise InputError("--validate is for merge_method: auto")
    return recipe


def job_of(
    recipe: Recipe,
    validation_files: Sequence[Path],
    shared: Shared,
    say: Callable[[str], None],
    *,
    trust: bool,
) -> tuple[Job, Choice | None]:
    """What the recipe asks for, with the data of its models and, for "auto", the chosen method.

    The second value is how "auto" came to its method; None for other methods.
    """
    from dataclasses import replace

    job = replace(recipe.job, trust=trust)
    needs_data = recipe.auto or not shared.dry_run  # a preview of a named method reads none
    if needs_data:
        job = with_tasks(job, recipe.auto, shared, say)
    if recipe.auto:
        return with_the_best_method(job, validation_files, say)
    return job, None


def write_model(
    plan: MergePlan,
    out: Path,
    recipe_text: str,
    max_shard_bytes: int,
    say: Callable[[str], None],
    *,
    replaces: bool,
) -> dict[str, Any]:
    """Merge, write the model and its documents, and print what was done.

    Returns:
        The same as plain values.
    """
    from blr_analysis.cli.facts import facts_of_merge
    from blr_analysis.merging.card import documents, outcome
    from blr_analysis.merging.folders import execute

    say(f"merging {len(plan.models)} models by {plan.method.name}")
    report = execute(
        plan,
        out,
        max_shard_bytes=max_shard_bytes,
        documents=lambda written: documents(written, recipe_text),
        replaces=replaces,
    )
    say("done")
    for sentence in outcome(report):
        typer.echo(sentence)
    shards = ", ".join(report.shards)
    typer.echo(f"written to {report.folder}: {shards}; the card, the recipe and the report too")
    return facts_of_merge(report)


def trials(choice: Choice | None) -> list[dict[str, Any]] | None:
    """The merges that "auto" tried, best first; None for other methods."""
    if choice is None:
        return None
    points = sorted(choice.points, key=lambda point: point.nll)
    return [{"merge": point.method, "nll": point.nll} for point in points]


def write_adapter(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Merge adapters into an adapter, and print how much of the merge its rank keeps.

    Returns:
        The same as plain values.
    """
    report = adapter_of(recipe, out, dry_run=False)
    typer.echo(f"written to {report.folder}")
    return {"written": report.folder, **facts_of_adapter(report)}


def preview_adapter(recipe: Recipe) -> dict[str, Any]:
    """Print how much of the merge the rank keeps, and what the merge costs each task.

    Returns:
        The same as plain values.
    """
    report = adapter_of(recipe, Path("OUT"), dry_run=True)
    prediction = forecast_of_adapter(recipe.job)
    typer.echo("\nNothing was written (--dry-run).")
    return dry_run(forecast=prediction, **facts_of_adapter(report))


def adapter_of(recipe: Recipe, out: Path, *, dry_run: bool) -> AdapterReport:
    """Merge adapters into an adapter, and print how much of the merge its rank keeps."""
    from blr_analysis.merging.adapter import merge_adapters_of

    assert recipe.out_adapter is not None
    report = merge_adapters_of(recipe.job, out, recipe.out_adapter.rank, dry_run=dry_run)
    worst_layer = min(report.shares, key=lambda layer: report.shares[layer], default="")
    typer.echo(f"{len(report.shares)} layers merged, of rank {report.rank} at most")
    typer.echo(
        f"the rank keeps {report.share:.1%} of the squared size of {worst_layer}, and as much or "
        "more of every other layer"
    )
    if report.averaged:
        typer.echo(f"{len(report.averaged)} tensors of whole modules averaged")
    return report


def facts_of_adapter(report: AdapterReport) -> dict[str, Any]:
    """What is known of a merged adapter, as plain values."""
    return {"rank": report.rank, "shares": report.shares, "averaged": report.averaged}


def forecast_of_adapter(job: Job) -> list[dict[str, Any]] | None:
    """Print the forecast of the merge that an adapter is of, at its full rank.

    Returns:
        A row for each task; None where it is unknown, such as on a quantised base.
    """
    from blr_analysis.cli.merge_preview import show_forecast
    from blr_analysis.merging.plan import make_plan

    try:
        plan = make_plan(job)
    except BLRError as fault:
        typer.echo(f"\nNo forecast: {fault}")
        return None
    return show_forecast(plan)


def check_place(out: Path | None, shared: Shared) -> bool:
    """Whether an earlier merge is at this place and --force replaces it.

    Raises:
        InputError: no folder was named, and this is no dry run.
        StorageError: a file or folder is there that may not be replaced.
    """
    from blr_analysis.files.placing import check_free

    if out is None:
        if not shared.dry_run:
            raise InputError("name the folder to write: blr-analysis merge RECIPE.yml OUT")
        return False
    if (out / REPORT).is_file():
        if not shared.force:
            raise StorageError(f"{str(out)!r} holds an earlier merge: --force replaces it.")
        return True
    check_free(out)
    return False


def with_tasks(job: Job, is_auto: bool, shared: Shared, say: Callable[[str], None]) -> Job:
    """The job with a task for the data of each model, where the recipe names data.

    Args:
        is_auto: whether the method is still to be chosen, which takes labels.
    """
    from dataclasses import replace

    files = [member.data for member in job.members if member.data is not None]
    if not files:
        return job
    say("reading data")
    tasks = tasks_of_files(job, files, labelled=is_auto)
    return replace(job, tasks=[shared.of(task) for task in tasks])


def tasks_of_files(job: Job, files: Sequence[Path], *, labelled: bool) -> list[Task]:
    """A task of the model to be merged for each file of texts."""
    from blr_analysis.huggingface.fisher import text_tasks
    from blr_analysis.merging.folders import reference_folder

    folder = reference_folder(job)
    assert folder is not None  # the models of a recipe are folders
    return text_tasks(folder, files, labelled=labelled)


def with_the_best_method(
    job: Job, files: Sequence[Path], say: Callable[[str], None]
) -> tuple[Job, Choice]:
    """The job with the method that does best on held-out examples, and all trials, printed too.

    Args:
        files: labelled examples that no model was trained on; none of them: what precisions or the
            models' own data say chooses.
    """
    from blr_analysis.cli.merge_preview import show_table
    from blr_analysis.merging.auto import chosen

    say("choosing the method")
    held_out = None
    if files:
        tasks = tasks_of_files(job, files, labelled=True)
        held_out = dict(zip(map(str, files), tasks, strict=True))
    job, choice = chosen(job, held_out)
    say(f"auto: {choice!r}")
    tried = trials(choice)
    if tried:
        show_table(
            "Tried",
            {
                "merge": [trial["merge"] for trial in tried],
                "nll": [f"{trial['nll']:.4g}" for trial in tried],
            },
        )
    return job, choice

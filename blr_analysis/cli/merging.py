"""``blr-analysis merge``: a recipe into a merged model. What only this command needs is imported
inside of it, so that no other pays for it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blr_analysis.cli.options import Shared, read_size, takes
from blr_analysis.errors import InputError
from blr_analysis.terminal import Teller, grid, pairs, section, show

if TYPE_CHECKING:
    from blr_analysis.merging.merge_plan import MergePlan, TensorPlan
    from blr_analysis.merging.recipe import Recipe

REPORT = "merge_report.csv"  # by which the folder of a merge is known


@takes("merging/plan.py", "make_plan", "threads")
def merge(
    shared: Shared,
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE.yml",
            help="What to merge with what; relative paths start at its folder.",
            show_default=False,
        ),
    ],
    threads: int | None,
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT", help="The folder to write: new, or empty.", show_default=False
        ),
    ] = None,
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

    from blr_analysis.files.placing import check_free, check_room
    from blr_analysis.merging.card import documents, outcome
    from blr_analysis.merging.folders import execute, reference_folder
    from blr_analysis.merging.plan import MAX_MEMORY, make_plan
    from blr_analysis.merging.recipe import read_recipe

    if out is None and not shared.dry_run:
        raise InputError("name the folder to write: blr-analysis merge RECIPE.yml OUT")
    memory, shard = shared.memory or MAX_MEMORY, read_size("--shard-size", shard_size)
    out, say = out and out.expanduser(), Teller()
    replaces = out is not None and shared.force and (out / REPORT).is_file()
    if out is not None and not replaces:
        check_free(out)
    parsed = read_recipe(recipe)
    for note in parsed.notes:
        say(f"{parsed.path.name}, {note}")
    if validate and not parsed.auto:
        raise InputError("--validate is for merge_method: auto")
    job = replace(parsed.job, trust=trust)
    data = [m.data for m in job.members if m.data is not None]
    if data and (parsed.auto or not shared.dry_run):
        from blr_analysis.huggingface.fisher import text_tasks

        say("reading data")
        tasks = text_tasks(reference_folder(job) or Path(), data, labelled=parsed.auto)
        job = replace(job, tasks=[shared.of(task) for task in tasks])
    if parsed.auto:
        from blr_analysis.huggingface.fisher import text_tasks
        from blr_analysis.merging.auto import chosen

        say("choosing the method")
        read = text_tasks(reference_folder(job) or Path(), validate or (), labelled=True)
        held_out = dict(zip(map(str, validate or ()), read, strict=True))
        job, choice = chosen(job, held_out or None)
        say(f"auto: {choice!r}")
        by = sorted(choice.points, key=lambda point: point.nll)
        tried = {"merge": [p.method for p in by], "nll": [f"{p.nll:.4g}" for p in by]}
        _show("Tried", tried)
    parsed = replace(parsed, job=job)
    plan = make_plan(job, max_memory=memory, threads=threads)
    for note in plan.notes:
        say(note)
    if out is not None:
        check_room(out, plan.bytes_written)
    if shared.dry_run or out is None:
        show_plan(plan, parsed)
        typer.echo("\nNothing was written (--dry-run).")
        return
    if replaces:
        shutil.rmtree(out)
    say(f"merging {len(plan.models)} models by {plan.method.name}")
    report = execute(
        plan, out, max_shard_bytes=shard, documents=lambda made: documents(made, parsed.text)
    )
    say("done")
    for sentence in outcome(report):
        typer.echo(sentence)
    beside = "a card, the recipe and the report beside them"
    typer.echo(f"written to {report.folder}: {', '.join(report.shards)}, and {beside}")


def show_plan(plan: MergePlan, recipe: Recipe) -> None:
    """What would be done."""
    from blr_analysis.merging.card import public, shown, size

    job = recipe.job
    rows = {
        "method": f"{plan.method.name}: {plan.method.formula}",
        "base": job.base,
        "base precision": plan.base_precision and plan.base_precision.name,
        "delta": f"{plan.delta:g}" if plan.method.uses_base_precision else None,
        "lambda": repr(job.scale) if job.scale != 1 else None,
        "to read": size(plan.bytes_read),
        "to write": size(plan.bytes_written),
        "memory": f"{size(plan.memory)} of buffers at most, {plan.workers} threads",
    }
    if job.propagates:
        whole = 4 * sum(tensor.spec.numel for tensor in plan.tensors)
        rows["on top"] = (
            f"{size(3 * whole)} at most: the result, a model and the tasks' own in memory; a sweep "
            "of forward passes over each model's data for every layer"
        )
    pairs({name: value for name, value in rows.items() if value is not None})
    models: dict[str, list[str]] = {
        "model": [shown(m.model) for m in job.members],
        "weight": [repr(m.weight) for m in job.members],
    }
    if plan.method.uses_precisions:
        stored = [m.precision for m in job.members]
        models["precision"] = ["" if place is None else shown(place) for place in stored]
    if any(m.data is not None for m in job.members):
        models["data"] = [shown(m.data) for m in job.members if m.data is not None]
    _show("Models", models)
    groups: dict[tuple[str, str, str], list[TensorPlan]] = {}
    for tensor in plan.tensors:
        dtype = str(tensor.spec.dtype).removeprefix("torch.")
        groups.setdefault((tensor.fate, dtype, public(tensor.note, job)), []).append(tensor)
    columns: dict[str, list[str]] = {
        "fate": [fate for fate, _, _ in groups],
        "tensors": [f"{len(tensors):,}" for tensors in groups.values()],
        "numbers": [f"{sum(t.spec.numel for t in tensors):,}" for tensors in groups.values()],
        "dtype": [dtype for _, dtype, _ in groups],
        "to write": [size(sum(t.spec.nbytes for t in tensors)) for tensors in groups.values()],
        "note": [note for _, _, note in groups],
    }
    _show("Tensors", columns)


def _show(title: str, columns: Mapping[str, Sequence[str]]) -> None:
    show(section(title, "", grid(columns)))

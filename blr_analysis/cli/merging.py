"""``blr-analysis merge``: a recipe into a merged model. What only this command needs is imported
inside of it, so that no other pays for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blr_analysis.cli.options import Teller, paper

if TYPE_CHECKING:
    from rich.console import Console

    from blr_analysis.merging.auto import Choice
    from blr_analysis.merging.folders import MergeReport
    from blr_analysis.merging.job import Job
    from blr_analysis.merging.plan import MergePlan
    from blr_analysis.merging.recipe import Recipe


def merge(
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
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything and print the plan; write nothing."),
    ] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List the fate of every tensor.")
    ] = False,
    max_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Of the buffers, at most; Python and torch themselves (some 0.2 GB) come on top.",
        ),
    ] = "256MiB",
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="One per core, up to 8, unless you say otherwise."),
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
            "--validate",
            metavar="FILE",
            help="For merge_method: auto, labelled examples that no model was trained on; once for "
            "each task.",
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Take precisions that were recorded for other weights."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Merge once more and compare every number with what was written."
        ),
    ] = False,
) -> None:
    """Read, check, merge, report."""
    from dataclasses import replace
    from functools import partial

    from blr_analysis.cli.sizes import read_size
    from blr_analysis.errors import InputError
    from blr_analysis.files import check_free, check_room
    from blr_analysis.merging.card import documents
    from blr_analysis.merging.folders import execute
    from blr_analysis.merging.plan import SHARD, plan_folders
    from blr_analysis.merging.recipe import read_recipe

    if out is None and not dry_run:
        raise InputError("name the folder to write: blr-analysis merge RECIPE.yml OUT")
    memory, shard = read_size("--max-memory", max_memory), read_size("--shard-size", shard_size)
    console, say = paper(), Teller()
    if out is not None:
        check_free(out.expanduser())
    parsed = read_recipe(recipe)
    for note in parsed.notes:
        say(f"{parsed.path.name}, {note}")
    if validate and not parsed.auto:
        raise InputError("--validate is for merge_method: auto")
    job = replace(parsed.job, trust=trust)
    if parsed.auto:
        job, choice = _chosen(job, validate or [], say)
        say(f"auto: {choice!r}")
        _print(console, "Tried", ("merge", choice.by), _tried(choice))
    parsed = replace(parsed, job=job)
    write: Callable[..., MergeReport]
    plan: MergePlan
    if parsed.adapter_rank is None:
        plan = plan_folders(job, max_memory=memory, threads=threads)
        write = partial(execute, plan, max_shard_bytes=shard)
    else:
        from blr_analysis.merging.lora.adapters import plan_adapters, write_adapter

        if verify or shard != SHARD:
            raise InputError("an adapter is one file, not verified: no --verify, no --shard-size")
        plan = plan_adapters(job, parsed.adapter_rank, max_memory=memory, threads=threads)
        write = partial(write_adapter, plan)
    for note in plan.notes:
        say(note)
    if out is not None:
        check_room(out.expanduser(), plan.bytes_written)
    if dry_run or out is None:
        show_plan(plan, parsed, console, tensors=tensors)
        return
    say(f"merging {len(plan.parts)} models by {plan.method.name}")
    report = write(out, documents=lambda report: documents(report, parsed))
    say("done")
    show_report(report, console, tensors=tensors)
    if verify:
        from blr_analysis.merging.stream import verify as merge_again

        say("merging once more, to compare")
        digest = merge_again(report.plan, report.folder)
        console.print(
            f"verified: every number is as it was merged; sha256 {digest}", soft_wrap=True
        )


def _chosen(job: Job, validate: Sequence[Path], say: Teller) -> tuple[Job, Choice]:
    from blr_analysis.huggingface.fisher import validation_task
    from blr_analysis.merging.auto import chosen_job
    from blr_analysis.merging.plan import reference_folder

    say("choosing the method")
    tasks = {path.stem: validation_task(reference_folder(job), path) for path in validate}
    return chosen_job(job, tasks or None)


def _tried(choice: Choice) -> list[tuple[str, str]]:
    points = sorted(choice.points, key=lambda p: p.nll)
    return [(p.method, f"{p.accuracy if choice.by == 'accuracy' else p.nll:.4g}") for p in points]


def show_plan(plan: MergePlan, recipe: Recipe, console: Console, *, tensors: bool) -> None:
    """What would be done."""
    from blr_analysis.merging.card import shown, size

    job = recipe.job
    rows = [("method", f"{plan.method.name}: {plan.method.formula}")]
    if job.base is not None:
        rows.append(("base", str(job.base)))
    if plan.base_precision is not None:
        rows.append(("base precision", plan.base_precision.name))
    if plan.method.uses_base_precision:
        rows.append(("delta", f"{plan.delta:g}"))
    if job.scale != 1:
        rows.append(("lambda", repr(job.scale)))
    rows += [
        ("to read", size(plan.bytes_read)),
        ("to write", size(plan.bytes_written)),
        ("memory", f"{size(plan.memory)} of buffers at most, {plan.workers} threads"),
    ]
    _print(console, "", ("", ""), rows)
    models = [
        (shown(m.model), repr(m.weight), "" if m.precision is None else shown(m.precision))
        for m in job.members
    ]
    head = ("model", "weight", "precision")
    uses = plan.method.uses_precisions
    _print(console, "Models", head[: 2 + uses], [row[: 2 + uses] for row in models])
    _show_fates(plan, console)
    if tensors:
        _show_tensors(plan, {}, console)
    console.print("\nNothing was written (--dry-run).")


def show_report(report: MergeReport, console: Console, *, tensors: bool) -> None:
    """What was done."""
    from blr_analysis.merging.card import outcome

    for sentence in outcome(report):
        console.print(sentence, soft_wrap=True)
    if tensors:
        _show_tensors(report.plan, report.fallback, console)
    beside = "a card, the recipe and the report beside them"
    console.print(
        f"written to {report.folder}: {', '.join(report.shards)}, and {beside}", soft_wrap=True
    )


def _show_fates(plan: MergePlan, console: Console) -> None:
    from blr_analysis.merging.card import size

    groups: Counter[tuple[str, str, str]] = Counter()
    numbers: Counter[tuple[str, str, str]] = Counter()
    written: Counter[tuple[str, str, str]] = Counter()
    for item in plan.items:
        key = (item.fate, str(item.spec.dtype).removeprefix("torch."), item.note)
        groups[key] += 1
        numbers[key] += item.spec.numel
        written[key] += plan.bytes_for(item)
    rows = [
        (key[0], f"{groups[key]:,}", f"{numbers[key]:,}", key[1], size(written[key]), key[2])
        for key in groups
    ]
    head = ("fate", "tensors", "numbers", "dtype", "to write", "note")
    _print(console, "Tensors", head, rows)


def _show_tensors(plan: MergePlan, fallback: Mapping[str, int], console: Console) -> None:
    rows = [
        (
            item.name,
            item.fate,
            "x".join(map(str, item.spec.shape)),
            str(item.spec.dtype).removeprefix("torch."),
            " ".join(f"{weight:.4g}" for weight in item.weights),
            f"{fallback[item.name]:,}" if item.name in fallback else "",
            item.note,
        )
        for item in plan.items
    ]
    head = ["tensor", "fate", "shape", "dtype", "weights", "by task arithmetic", "note"]
    kept = [k for k, name in enumerate(head) if k < 5 or any(row[k] for row in rows)]
    cut = [[row[k] for k in kept] for row in rows]
    _print(console, "Every tensor", [head[k] for k in kept], cut)


def _print(
    console: Console, title: str, head: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """A table without frame; a pipe gets plain text, and nothing in it is taken for markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE if any(head) else None, pad_edge=False, header_style="dim")
    table.show_edge, table.show_header = False, any(head)
    for name in head:
        right = name in ("tensors", "numbers", "to write", "by task arithmetic")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if title:
        console.print(Text(f"\n{title}", style="bold"))
    if console.is_terminal and console.encoding.startswith("utf"):
        console.print(table)
        return
    lines = console.render_lines(table, pad=False)
    for line in lines:
        text = "".join(segment.text for segment in line).rstrip()
        console.file.write(
            (text if console.encoding.startswith("utf") else text.replace("─", "-")) + "\n"
        )

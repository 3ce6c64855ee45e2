"""``blr-analysis index``: an index of a model's training data.

What only this command needs is imported inside of it, so that the others start faster.
"""

from __future__ import annotations

import shutil
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.cli.inputs import Source
from blr_analysis.cli.options import Shared, option, show_forecast
from blr_analysis.cli.origin import SOURCE, origin_of
from blr_analysis.cli.refinement import ROUGH
from blr_analysis.errors import InputError
from blr_analysis.terminal import Teller, pairs

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.posterior import Forecast
    from blr_analysis.posterior.posterior import Posterior
    from blr_analysis.sensitivity import Index
    from blr_analysis.sensitivity.influence.results import ProjectionError
    from blr_analysis.task import Task


def index(
    *,
    source: Source,
    rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Bytes to keep of each example. Models with fewer parameters are kept whole. If "
            "left out: the smallest that errs by less than 0.3, at most 32768.",
        ),
    ] = None,
    out: Annotated[Path, option("INDEX", "A folder to write.", "--out", "-o")],
    profile: Annotated[
        bool, typer.Option("--profile", help="Print how long each pass over the data took.")
    ] = False,
    shared: Shared,
) -> dict[str, Any] | None:
    """Write an index of a model's training data, for later queries.

      blr-analysis index train.py:make_task --out INDEX

    A language model is named by its folder and its texts (a text per row, a prompt and an answer,
    or messages):

      blr-analysis index ./llm train.jsonl --out INDEX --dry-run

    The index keeps a projection of every example's gradient. The command first measures the error
    of the projection on some pairs of examples, and chooses the rank by it. If 32768 bytes are not
    enough, it says so and names a --rank that would be. The posterior of a language model is fitted
    to at most 256 texts.

    Run the command again to continue an index that was stopped (INDEX.unfinished keeps the work of
    its fit); --force starts again.

    --json prints n_data, numbers, error, seconds, written.
    """
    from blr_analysis import ranks
    from blr_analysis.cli.facts import facts_of_index
    from blr_analysis.files import held
    from blr_analysis.sensitivity.index.build import check_place
    from blr_analysis.sensitivity.index.rank import LARGEST

    if source.structure in ("lowrank", "full"):
        raise InputError(f"an index takes --fit diag or kron, not {source.structure}")
    out = out.expanduser()
    unfinished = out.with_name(f"{out.name}.unfinished")
    say = Teller()
    writes = ranks.first() and not shared.dry_run
    with held(out) if writes else nullcontext():
        task, _ = source.tasks(shared, say)
        if writes and shared.force:
            remove_earlier(out, unfinished)
        rank = rank or planned_rank(out)
        check_place(out, task, rank or LARGEST, at_model=source.posterior is None)
        if shared.dry_run:
            cost = index_forecast(source, task, rank)
            return show_forecast(cost, fit=fit_in_words(source, task))
        built, seconds = built_index(source, task, rank, out, unfinished, say)
        if not ranks.first():
            return None
        write_origin(source, task, built)
        shutil.rmtree(unfinished, ignore_errors=True)
    show_index(built, out, is_of_a_model=source.data is not None)
    if profile:
        pairs({name: f"{share:.1f} s" for name, share in seconds.items()})
    return facts_of_index(built, out, seconds)


def remove_earlier(out: Path, unfinished: Path) -> None:
    """Remove an earlier index and the fit that it did not finish."""
    from blr_analysis.sensitivity.index.stored import PLAN

    shutil.rmtree(unfinished, ignore_errors=True)
    if (out / PLAN).is_file():
        shutil.rmtree(out)


def planned_rank(out: Path) -> int | None:
    """The rank of an index that was begun in this folder; None where none was."""
    from blr_analysis.sensitivity.index.stored import PLAN, read_checked

    plan = out / PLAN
    return read_checked(plan)["rank"] if plan.is_file() else None


def built_index(
    source: Source, task: Task, rank: int | None, out: Path, unfinished: Path, say: Teller
) -> tuple[Index, dict[str, float]]:
    """Fit or read the posterior and build the index.

    Args:
        rank: of the index; None: it is chosen.

    Returns:
        The index; and the seconds of each pass over the data, by its name, and of the rest.
    """
    from blr_analysis.progress import profiled
    from blr_analysis.sensitivity import Index

    start = time.perf_counter()
    with profiled() as seconds:
        posterior = source.posterior_of(task, say, unfinished, sampled=True)
        error = None
        if rank is None:
            rank, error = chosen_rank(say, task, posterior)
        say("indexing")
        report = partial(say_rank, say, task, posterior, rank)
        built = Index.build(task, posterior, out, rank=rank, error=error, heard=report)
    total = time.perf_counter() - start
    rest = total - sum(seconds.values())
    return built, {**seconds, "the rest": rest}


def chosen_rank(say: Teller, task: Task, posterior: Posterior) -> tuple[int, ProjectionError]:
    """The smallest rank whose error is below :data:`ROUGH`, and its error.

    The largest rank where no error is below, and where the examples are too few to measure it.
    """
    from blr_analysis.sensitivity.index.rank import smallest_rank_with_error_below

    rank, error = smallest_rank_with_error_below(ROUGH, task, posterior)
    if error.relative_rms < ROUGH:
        say(
            f"rank {rank:,}: the smallest tried with an error below {ROUGH:g} "
            f"({error.relative_rms:.2f} on a sample)"
        )
    return rank, error


def say_rank(
    say: Teller, task: Task, posterior: Posterior, rank: int, error: ProjectionError
) -> None:
    """Say that an index will be rough, and which --rank would be enough."""
    from blr_analysis.sensitivity.index.rank import larger_ranks, rank_with_error_below

    if not error.relative_rms > ROUGH:
        return
    enough = rank_with_error_below(ROUGH, task, posterior, rank)
    if enough is None:
        largest = larger_ranks(rank)[-1]
        advice = f"--rank {largest} is, too; query --refine compares the best exactly"
    else:
        advice = f"--rank {enough} brings it below {ROUGH:g}, in {enough / 1000:.0f} kB an example"
    say(f"note: the index is rough (relative error {error.relative_rms:.2f}); {advice}")


def write_origin(source: Source, task: Task, built: Index) -> None:
    """Write into the index where its model and data are."""
    from blr_analysis.files import drafted
    from blr_analysis.files.headers import record_text

    record = record_text(origin_of(source, task, built))
    with drafted(built.path / SOURCE) as draft:
        draft.write_text(record, encoding="utf-8")


def index_forecast(source: Source, task: Task, rank: int | None) -> Forecast:
    """What an index costs, with the fit of its posterior where none was saved.

    Args:
        rank: of the index; None: it will be chosen.
    """
    from blr_analysis.posterior.posterior import Posterior
    from blr_analysis.sensitivity.index.rank import LARGEST
    from blr_analysis.sensitivity.index.trial import build_forecast

    def fit(task: Task) -> Posterior:
        return source.fitted(task, silent, sampled=True)

    def read(task: Task) -> Posterior:
        assert source.posterior is not None
        return Posterior.load(source.posterior).on(task, same_data=False)

    posterior_for = fit if source.posterior is None else read
    return build_forecast(
        task,
        rank or LARGEST,
        posterior_for,
        partial(source.examples, sampled=True),
        structure=source.structure,
    )


def fit_in_words(source: Source, task: Task) -> str:
    """Which part of the passes the fit takes; "" where a saved posterior is read."""
    from blr_analysis.posterior.fit import LARGEST_SAMPLE

    n_examples = source.examples(task, sampled=True)
    if n_examples == 0:
        return ""
    words = f"{n_examples / task.n_data:.2f} of these passes"
    if task.likelihood.is_sequence:
        words += f"; it reads {min(LARGEST_SAMPLE, task.n_data)} of the {task.n_data:,} texts"
    return words


def silent(text: str) -> None:
    """Says nothing of the trial that a dry run makes."""


def show_index(built: Index, out: Path, *, is_of_a_model: bool) -> None:
    """Print what was written, how far it errs, and the next command."""
    error = built.error
    texts = "texts" if is_of_a_model else "examples"
    questions = "QUESTIONS.jsonl" if is_of_a_model else "SCRIPT.py:TASK"
    pairs(
        {
            "sequences" if is_of_a_model else "examples": f"{built.n_data:,}",
            "covers": built.posterior.coverage,
            "kept": f"{built.numbers:,} numbers of each",
            "error": error_in_words(error, texts),
            "written": out,
            "next": f"blr-analysis query {out} {questions}",
        }
    )


def error_in_words(error: ProjectionError, examples: str) -> str:
    """How far an index errs.

    Args:
        examples: what they are called.
    """
    if not error.is_measured:
        return f"not measured (too few {examples})"
    return (
        f"{error.relative_rms:.3f} of the exact influence; rank correlation with it "
        f"{error.spearman:.3f}"
    )

"""``blr-analysis validate``: influence, and scores of other methods, beside retraining."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from blr_analysis.cli.inputs import Source
from blr_analysis.cli.options import Json, Out, Shared, show_forecast
from blr_analysis.errors import InputError
from blr_analysis.terminal import Teller, grid, note, print_json, section, show

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    from blr_analysis.posterior import Forecast
    from blr_analysis.sensitivity import Validation
    from blr_analysis.sensitivity.validate import Study


def validate(
    *,
    source: Source,
    scores: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FILE",
            help="Scores of another method, a row for each training example: .npy or .parquet; "
            "repeatable.",
        ),
    ] = None,
    halves: Annotated[int, typer.Option(metavar="NUMBER", help="Random halves.")] = 20,
    seeds: Annotated[
        int,
        typer.Option(metavar="NUMBER", help="Trainings of each half; one gives no ceiling."),
    ] = 2,
    passes: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="Epochs of each, in place of the recipe's."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A .safetensors file of retrained losses; those that it has are not made again.",
        ),
    ] = None,
    out: Out = None,
    json: Json = False,
    shared: Shared,
) -> None:
    """How well influence, and any other method, agrees with retraining your model.

      blr-analysis validate train.py:make_task --test make_test

    The model is retrained on random halves of its data, by the recipe of its task. The score is
    the rank correlation of the losses on the test data with what each method foretells for the
    halves; the ceiling is what the noise of retraining allows. The cost is said first. With --keep
    a study that was stopped goes on, and another method is compared without a retraining.

    FILE holds one number for each pair of a training and a test example, [N_train, N_test], larger
    where training on the one lowers the loss of the other:

      blr-analysis validate train.py:make_task --test make_test --scores bm25.npy

    With --out it writes the table and a picture.
    """
    from blr_analysis.cli.facts import facts_of_validation
    from blr_analysis.sensitivity.validate import Study

    files = named_files(scores or [])
    if source.test is None:
        raise InputError("validate measures losses on test data: name them, --test NAME")
    say = Teller()
    with shared.folder(out) as folder:
        task, test = source.tasks(shared, say)
        study = Study.of(task, test, files, halves, seeds, passes, keep)
        say(study.cost)
        if shared.dry_run:
            show_forecast(forecast(study, source))
            return
        result = study.run(source.posterior_of(task, say))
        if out is not None:
            write_validation(result, folder)
    if json:
        print_json(facts_of_validation(result))
        return
    show(in_words(result))


def named_files(arguments: Sequence[str]) -> dict[str, str]:
    """Files by the names of their methods; without a name, by that of the file.

    Raises:
        InputError: two files of one name.

    >>> named_files(["bm25=out/a.npy", "trak.parquet"])
    {'bm25': 'out/a.npy', 'trak': 'trak.parquet'}
    """
    files: dict[str, str] = {}
    for argument in arguments:
        name, equals, file = argument.partition("=")
        if not equals:
            name = Path(argument).stem
            file = argument
        if name in files:
            raise InputError(f"two files of scores are called {name!r}: write NAME=FILE")
        files[name] = file
    return files


def forecast(study: Study, source: Source) -> Forecast:
    """What the fit, the influence and the retrainings cost."""
    from blr_analysis.posterior import Forecast

    retraining = study.retraining
    n_missing = retraining.count_missing(study.file)
    n_test = retraining.test.n_data
    examples_run = source.examples(retraining.task) + retraining.task.n_data + n_test
    return Forecast.of(
        retraining.task,
        examples_run + n_missing * n_test,
        trained=retraining.examples * n_missing // retraining.count,
    )


def in_words(result: Validation) -> RenderableType:
    """The scores as a section."""
    lead = (
        f"{len(result.halves)} random halves retrained, {result.seeds} seeds each; rank "
        f"correlations of {result.losses.shape[2]:,} test losses, with ranges that are meant to "
        "hold in four of five cases."
    )
    notes = [note(result.note)] if result.note else []
    return section("Agreement with retraining", lead, grid(columns_of(result)), *notes)


def columns_of(result: Validation) -> dict[str, list[Any]]:
    """The table as it is printed."""
    rows = result.rows
    return {
        "method": [row["method"] for row in rows],
        "score": [f"{row['score']:.3f}" for row in rows],
        "range": [f"{row['low']:.2f} to {row['high']:.2f}" for row in rows],
        "of ceiling": [f"{row['of_ceiling']:.2f}" for row in rows],
    }


def write_validation(result: Validation, folder: Path) -> None:
    """Write the table and the picture."""
    from blr_analysis.audit import write_picture
    from blr_analysis.tables import write_table

    write_table(result.table, folder, "validation")
    write_picture(result.plot(), folder, "validation")

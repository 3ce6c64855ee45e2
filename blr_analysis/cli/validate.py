"""``blr-analysis validate``: influence, and scores of other methods, beside retraining."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import RenderableType

from blr_analysis.cli.inputs import Source
from blr_analysis.cli.options import Out, Shared, option, show_forecast
from blr_analysis.errors import InputError
from blr_analysis.terminal import Teller, grid, note, section, show

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    from blr_analysis.posterior import Forecast
    from blr_analysis.sensitivity import Validation
    from blr_analysis.sensitivity.validate import Study


def validate(
    *,
    source: Source,
    scores: Annotated[
        list[str] | None,
        option(
            "[NAME=]FILE",
            "Scores of another method, a row for each training example: .npy or "
            ".parquet; repeatable.",
        ),
    ] = None,
    halves: Annotated[int, option("NUMBER", "Random halves, at least 4.")] = 20,
    seeds: Annotated[
        int,
        option("NUMBER", "Trainings of each half; one gives no ceiling."),
    ] = 2,
    passes: Annotated[
        int | None,
        option("NUMBER", "Epochs of each training, in place of the recipe's."),
    ] = None,
    keep: Annotated[
        Path | None,
        option(
            "FILE",
            "A .safetensors file for the retrained losses. What it holds already is "
            "not trained again.",
        ),
    ] = None,
    out: Out = None,
    shared: Shared,
) -> dict[str, Any]:
    """Compare influence, and any other method, with retraining of your model.

      blr-analysis validate train.py:make_task --test make_test

    The command retrains the model on random halves of its data, by the recipe of its task. The
    score of a method is the rank correlation of the test losses that it predicts with those of the
    retrained models. The ceiling is the best score that the noise of retraining allows. The
    command prints the cost before it starts. With --keep you can continue a study that was
    stopped, or compare another method without retraining.

    FILE is a matrix [N_train, N_test]. A number is the larger, the more that training example
    lowers the loss of that test example:

      blr-analysis validate train.py:make_task --test make_test --scores bm25.npy

    With --out it writes the table and a picture.

    --json prints halves, seeds, epochs, seeds_agree, methods, note.
    """
    from blr_analysis.cli.facts import facts_of_validation
    from blr_analysis.sensitivity.validate import Study

    files = named_files(scores or [])
    if source.test is None:
        raise InputError("validate needs test data: name them by --test NAME")
    say = Teller()
    with shared.folder(out) as folder:
        task, test = source.tasks(shared, say)
        study = Study.of(task, test, files, halves, seeds, passes, keep)
        if shared.dry_run:
            n_missing = study.retraining.count_missing(study.file)
            say(study.retraining.in_words(n_missing))
            return show_forecast(forecast(study, source), besides=uncounted(study))
        say(study.cost)
        result = study.run(source.posterior_of(task, say))
        if out is not None:
            write_validation(result, folder)
    show(in_words(result))
    return facts_of_validation(result)


def named_files(arguments: Sequence[str]) -> dict[str, str]:
    """The files by the name of their method, from arguments ``NAME=FILE`` or ``FILE``.

    A method without a name is called as its file, without the suffix.

    Raises:
        InputError: two files have the same name.

    >>> named_files(["bm25=out/a.npy", "trak.parquet"])
    {'bm25': 'out/a.npy', 'trak': 'trak.parquet'}
    """
    files: dict[str, str] = {}
    for argument in arguments:
        name, equals_sign, file = argument.partition("=")
        if not equals_sign:
            file = argument
            name = Path(file).stem
        if name in files:
            raise InputError(f"two files of scores are called {name!r}: write NAME=FILE")
        files[name] = file
    return files


def forecast(study: Study, source: Source) -> Forecast:
    """What the fit, the influence and the retrainings cost, by the examples that each runs."""
    from blr_analysis.posterior import Forecast

    retraining = study.retraining
    n_trainings = retraining.count_missing(study.file)
    n_test = retraining.test.n_data
    for_fit = source.examples(retraining.task)
    for_influence = retraining.task.n_data + n_test
    for_losses = n_trainings * n_test
    for_trainings = retraining.examples * n_trainings // retraining.count
    return Forecast.of(
        retraining.task,
        for_fit + for_influence + for_losses,
        trained=for_trainings,
    )


def uncounted(study: Study) -> str:
    """What :func:`forecast` cannot count, in words."""
    has_own_training = study.retraining.recipe.train is not None
    return "the retrainings by your train=" if has_own_training else ""


def in_words(result: Validation) -> RenderableType:
    """The scores as a section of the terminal."""
    lead = (
        f"{len(result.halves)} random halves retrained, {result.seeds} seeds each; rank "
        f"correlations of {result.losses.shape[2]:,} test losses, with ranges that should hold "
        "in four of five cases."
    )
    notes = []
    if result.note:
        notes.append(note(result.note))
    return section("Agreement with retraining", lead, grid(columns_of(result)), *notes)


def columns_of(result: Validation) -> dict[str, list[Any]]:
    """The columns of the printed table, with the numbers as text."""
    rows = result.rows
    return {
        "method": [row["method"] for row in rows],
        "score": [f"{row['score']:.3f}" for row in rows],
        "range": [f"{row['low']:.2f} to {row['high']:.2f}" for row in rows],
        "of ceiling": [share_in_words(row["of_ceiling"]) for row in rows],
    }


def share_in_words(share: float) -> str:
    """A share to two digits; a dash where there is no ceiling to take it of.

    >>> share_in_words(0.5), share_in_words(float("nan"))
    ('0.50', '-')
    """
    return "-" if math.isnan(share) else f"{share:.2f}"


def write_validation(result: Validation, folder: Path) -> None:
    """Write the table and the picture."""
    from blr_analysis.audit import write_picture
    from blr_analysis.tables import write_table

    write_table(result.table, folder, "validation")
    write_picture(result.plot(), folder, "validation")

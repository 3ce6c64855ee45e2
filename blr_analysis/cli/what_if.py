"""``blr-analysis what-if``: the model without some of its data, or with other labels.

What only this command needs is imported inside of it, so that the others start faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from blr_analysis.cli.inputs import Source
from blr_analysis.cli.options import Out, Shared, dry_run, option
from blr_analysis.cli.row_queries import count_before_scores, new_labels
from blr_analysis.errors import InputError
from blr_analysis.progress import duration
from blr_analysis.terminal import Teller, pairs, show

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.posterior import Posterior
    from blr_analysis.sensitivity import WhatIf
    from blr_analysis.task import Task


@dataclass(frozen=True)
class Change:
    """The options that say which examples leave, and which get another label."""

    PANEL: ClassVar[str] = "What changes"

    remove: Annotated[
        str | None,
        option("QUERY", "The rows to remove, as a pandas query."),
    ] = None
    relabel: Annotated[
        list[str] | None,
        option("QUERY:LABEL", "The rows to relabel, and their new label; repeatable."),
    ] = None
    decisions: Annotated[
        Path | None,
        option("CSV", "The decisions that you saved on the page of an audit."),
    ] = None

    def check(self) -> None:
        """Refuse a change that is not named, or named twice, and a file that cannot be read."""
        from blr_analysis.report.decisions import read_decisions

        has_query = self.remove is not None or bool(self.relabel)
        has_decisions = self.decisions is not None
        if has_query == has_decisions:
            raise InputError("give --decisions CSV, or --remove QUERY and --relabel QUERY:LABEL")
        if self.decisions is not None:
            read_decisions(self.decisions)

    def count_on(self, task: Task) -> int | None:
        """The number of examples that change, before a posterior is fitted.

        Returns:
            None where a query asks for scores, which are not computed yet.

        Raises:
            InputError: a query cannot be answered.
        """
        from blr_analysis.report.decisions import read_decisions

        if self.decisions is None:
            return count_before_scores(self.remove, self.relabel or [], task)
        choices = read_decisions(self.decisions)
        return len(choices["remove"] or ()) + len(choices["relabel"] or ())

    def rows_and_labels(self, task: Task, posterior: Posterior) -> tuple[Any, Any]:
        """The rows that leave, and the new label of each row that gets one; None: no row."""
        from blr_analysis.report.decisions import read_decisions

        if self.decisions is not None:
            choices = read_decisions(self.decisions)
            return choices["remove"], choices["relabel"]
        if self.relabel:
            return self.remove, new_labels(self.relabel, task, posterior)
        return self.remove, None


@dataclass(frozen=True)
class Prediction:
    """The options that say how the changed model is predicted."""

    PANEL: ClassVar[str] = "How it is predicted"

    solver: Annotated[
        str,
        option(
            "NAME",
            "posterior (one step), cg (a descent), replay (short trainings), retrain "
            "(whole trainings), or auto.",
        ),
    ] = "auto"
    seeds: Annotated[
        int,
        option("NUMBER", "How many trainings; one gives no interval."),
    ] = 3
    passes: Annotated[
        int | None,
        option("NUMBER", "Passes over the data. If left out: 60 for cg, 8 for replay."),
    ] = None

    def check(self) -> None:
        """Refuse what no solver takes, before any work."""
        from blr_analysis.sensitivity.solvers import check_settings

        check_settings(self.solver, self.seeds, self.passes)


def what_if_command(
    *,
    source: Source,
    change: Change,
    prediction: Prediction,
    out: Out = None,
    shared: Shared,
) -> dict[str, Any]:
    """Predict the model without some of its data, or with other labels.

      blr-analysis what-if train.py:make_task --remove "annotator == 'eve'"

    A QUERY compares columns: index, target, prediction, loss, error, variance, deviation,
    self_influence, leverage, and the task's metadata. It may use and, or, not, in. Put text in
    quotes. To give rows another label:

      blr-analysis what-if train.py:make_task --relabel "annotator == 'eve': 2"

    With --out it writes the loss by class, a picture, and the weights without the examples. With
    --out and --decisions it also writes the cleaned data set: cleaned.csv has a row for each
    example that stays, with its new label.

    --json prints removed, relabelled, before, after, interval, solver, passes, note.
    """
    from blr_analysis.cli.facts import facts_of_what_if
    from blr_analysis.sensitivity import what_if
    from blr_analysis.sensitivity.what_if import cost_of_what_if

    change.check()
    prediction.check()
    say = Teller()
    with shared.folder(out) as folder:
        task, test = source.tasks(shared, say)
        count = change.count_on(task)
        if shared.dry_run and source.posterior is None:
            return show_costs_with_fit(source, task, count, prediction, out)
        posterior = source.posterior_of(task, say)
        question = question_of(task, posterior, test, change, prediction)
        if shared.dry_run:
            cost = cost_of_what_if(task, posterior, **question)
            pairs({"examples": f"{task.n_data:,}", "answers": cost, "writes": out or "nothing"})
            return dry_run(solver=cost.solver, passes=cost.passes, seconds=cost.seconds)
        say("what if")
        result = what_if(task, posterior, **question)
        if out is not None:
            write_what_if(result, folder)
            write_cleaned_data(task, change, folder)
    show_what_if(result, task, posterior, test)
    return facts_of_what_if(result)


def show_costs_with_fit(
    source: Source, task: Task, count: int | None, prediction: Prediction, out: Path | None
) -> dict[str, Any]:
    """Print what the fit takes, and the answer after it; nothing is fitted.

    Args:
        count: the number of examples that change; None: the query asks for scores.

    Returns:
        At most so many passes and seconds; the solver is None where the fit decides it.
    """
    from blr_analysis.posterior import Forecast
    from blr_analysis.sensitivity.solvers import Settings
    from blr_analysis.sensitivity.what_if import costs_before_fit

    recipe = task.recipe
    n_trained = 0
    if source.calibrate and recipe is not None and recipe.train is None:
        n_trained = round(task.n_data * recipe.epochs)
    fit = Forecast.of(task, source.examples(task), trained=n_trained, structure=source.structure)
    settings = Settings(solver=prediction.solver, seeds=prediction.seeds, passes=prediction.passes)
    answers = costs_before_fit(task, count, settings)
    in_words = "; or ".join(map(str, answers))
    if len(answers) > 1:
        in_words += " (the fit decides)"
    pairs(
        {
            "examples": f"{task.n_data:,}",
            "fit": f"{fit.passes:.2f} passes over the data, {duration(fit.seconds)}",
            "answers": in_words,
            "writes": out or "nothing",
        }
    )
    return dry_run(
        solver=answers[0].solver if len(answers) == 1 else None,
        passes=fit.passes + most([answer.passes for answer in answers]),
        seconds=fit.seconds + most([answer.seconds for answer in answers]),
    )


def most(numbers: list[float]) -> float:
    """The largest number; NaN where one is unknown."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def question_of(
    task: Task, posterior: Posterior, test: Task | None, change: Change, prediction: Prediction
) -> dict[str, Any]:
    """The keyword arguments of :func:`blr_analysis.what_if` that these options stand for."""
    rows, labels = change.rows_and_labels(task, posterior)
    return {
        "remove": rows,
        "relabel": labels,
        "evaluate": test,
        "solver": prediction.solver,
        "seeds": prediction.seeds,
        "passes": prediction.passes,
    }


def show_what_if(result: WhatIf, task: Task, posterior: Posterior, test: Task | None) -> None:
    """Print how far to trust the prediction, and the losses before and after."""
    from blr_analysis.audit import in_text
    from blr_analysis.audit.new_data import loss_in_words
    from blr_analysis.audit.sections import trust, what_if_section

    measured_on = "the training data" if test is None else "the test data"
    caveats = trust(task, posterior, solver=result.solver)
    measure = loss_in_words(task)
    show(in_text(caveats, what_if_section(result, measured_on, task.n_data, measure)))


def write_cleaned_data(task: Task, change: Change, folder: Path) -> None:
    """Write the data set that decisions leave; without decisions, nothing."""
    from blr_analysis.report.decisions import cleaned
    from blr_analysis.tables import write_table

    if change.decisions is not None:
        write_table(cleaned(task, change.decisions), folder, "cleaned")


def write_what_if(result: WhatIf, folder: Path) -> None:
    """Write a picture, the weights after the change and, where there are classes, a table."""
    from blr_analysis.audit import write_picture
    from blr_analysis.files import drafted
    from blr_analysis.files.shards import save_file
    from blr_analysis.plots.what_if import has_classes, plot_what_if
    from blr_analysis.tables import write_table

    if has_classes(result):
        write_table(result.by_class, folder, "by_class")
    write_picture(plot_what_if(result), folder, "what_if")
    with drafted(folder / "without.safetensors") as draft:
        save_file({**result.parameters, **result.buffers}, draft, {"format": "pt"})

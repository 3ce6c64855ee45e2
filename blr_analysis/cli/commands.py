"""The program, and its commands ``demo``, ``audit`` and ``algorithms``.

Every other command has a module of its own. Modules that only some commands need are imported
inside these commands, so that the others start faster.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.checks import package_version
from blr_analysis.cli.fisher import fisher
from blr_analysis.cli.index import index
from blr_analysis.cli.inputs import Source
from blr_analysis.cli.merging import merge
from blr_analysis.cli.options import Out, Shared, dry_run, flattened, option, show_forecast
from blr_analysis.cli.query import query
from blr_analysis.cli.validate import validate
from blr_analysis.cli.verify import verify
from blr_analysis.cli.what_if import what_if_command
from blr_analysis.terminal import Teller, as_text, grid, pairs, show

if TYPE_CHECKING:
    from blr_analysis.audit import Findings
    from blr_analysis.posterior import Forecast
    from blr_analysis.task import Task

EXIT_CODES = """Exit codes: 0 done; 1 an unexpected fault; 2 a wrong command line, bad input, or \
files that cannot be read or written; 130 interrupted. Findings go to standard output, progress \
and errors to standard error."""
SHOWN_COLUMNS = ("algorithm", "family", "approximations", "section", "through")

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog=EXIT_CODES,
)


def _print_version(is_asked_for: bool) -> None:
    if is_asked_for:
        typer.echo(f"blr-analysis {package_version()}")
        raise typer.Exit


def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error. May stand anywhere."),
    ] = False,
) -> None:
    """Find the training examples that are wrong, and those that shape a model's answers.

    Start with the demo, which brings its own data:

      blr-analysis demo

    For your own model, write a function in train.py that returns its task:

      def make_task():
          return blr.Task(model, data, checkpoints=checkpoints, recipe=recipe)

    Then:

      blr-analysis audit train.py:make_task

    The command fits a posterior. To spare this, give it one that you saved by
    posterior.save("posterior.safetensors"):

      blr-analysis audit train.py:make_task -p posterior.safetensors

    To merge fine-tuned models by how sure each one is of its weights:

      blr-analysis fisher ./ft1 train.jsonl
      blr-analysis merge recipe.yml merged

    Every command has its own help: blr-analysis audit --help
    """


def demo(
    *,
    seed: Annotated[
        int,
        typer.Option(help="Seed of the split, the initial weights, the noise and the shuffling."),
    ] = 0,
    out: Out = Path("blr-demo"),
    shared: Shared,
) -> dict[str, Any]:
    """Plant wrong labels among handwritten digits, train a small network, and find them.

      blr-analysis demo

    It needs nothing but this package, and about a minute on two cores. Each step shows the line
    that you would type for your own model. At the end the demo writes a page, which compares the
    findings with networks that were retrained.

    --json prints the names of audit, and retrained.
    """
    shared.free(out)
    if shared.dry_run:
        pairs({"writes": out})
        return dry_run(writes=out)
    from blr_analysis.cli.facts import facts_of_demo
    from blr_analysis.demo import run

    folder = out or Path("blr-demo")
    findings, truth = run(folder, seed=seed, say=Teller())
    return facts_of_demo(findings, truth, folder)


def audit(
    *,
    source: Source,
    by: Annotated[
        str,
        option(
            "COLUMN",
            "The groups to leave out, one after the other: target, a column of the "
            "metadata, none, or auto (the classes).",
        ),
    ] = "auto",
    passes: Annotated[
        int | None,
        option("NUMBER", "Passes over the data for each group."),
    ] = None,
    out: Out = Path("blr-audit"),
    shared: Shared,
) -> dict[str, Any] | None:
    """Find the rows that look wrong, compare groups, and say how far to trust the results.

      blr-analysis audit train.py:make_task --test make_test

    make_task is a function in train.py that returns a Task. A language model is named by its
    folder and its texts:

      blr-analysis audit ./llm train.jsonl

    The audit prints its findings. It also writes report.html (a page for a browser with all of
    them), tables as CSV and Parquet, pictures, summary.txt and the posterior. On the page you can
    decide what to drop or relabel. Then ask what the model would be:

      blr-analysis what-if train.py:make_task --decisions decisions.csv

    --json prints n_data, suspects, groups, leave_one_out, test, trust, files.
    """
    from blr_analysis import ranks
    from blr_analysis.audit import check_column, in_text, investigate, list_of_files, sections
    from blr_analysis.cli.facts import facts_of_audit

    column = None if by == "none" else by
    say = Teller()
    with shared.folder(out) as folder:
        task, test = source.tasks(shared, say)
        check_column(column, task)
        if shared.dry_run:
            cost = audit_forecast(task, test, source, column, passes)
            trainings = own_trainings(task, source, column)
            on_disk = "tables, pictures and report.html on disk"
            return show_forecast(cost, besides="; ".join(filter(None, [trainings, on_disk])))
        posterior = source.posterior_of(task, say)
        findings = investigate(task, posterior, test=test, by=column, passes=passes, say=say)
        if not ranks.first():
            return None
        with ranks.alone():
            summary = in_text(*sections(findings).values())
            texts = None if source.data is None else task.metadata["text"]
            files = write_audit(findings, folder, as_text(summary), texts, say)
    show(summary)
    show(list_of_files(folder, files))
    return facts_of_audit(findings, files)


def write_audit(
    findings: Findings,
    folder: Path,
    summary: str,
    texts: list[Any] | None,
    say: Callable[[str], None],
) -> list[Path]:
    """Write all files of an audit and return their paths."""
    from blr_analysis.audit import write, write_text
    from blr_analysis.report.page import write_page

    files = write(findings, folder, say=say)
    files.append(write_text(summary, folder, "summary.txt"))
    say("writing the page")
    files.append(write_page(findings, folder / "report.html", texts=texts))
    return files


def audit_forecast(
    task: Task, test: Task | None, source: Source, by: str | None, passes: int | None
) -> Forecast:
    """What the analyses of an audit cost.

    Groups are counted as trainings without them, and ``--calibrate`` as one more training. Those by
    a ``train=`` are not counted.
    """
    from blr_analysis.audit.findings import groups_of
    from blr_analysis.posterior import Forecast
    from blr_analysis.sensitivity.solvers import training_epochs

    sweeps = 4  # for the scores, for leaving one out, for the suspects, for the stationarity
    examples_run = source.examples(task) + sweeps * task.n_data
    if test is not None:
        examples_run += test.n_data
    examples_trained = 0
    n_groups = len(groups_of(task, by))
    if n_groups:
        epochs = training_epochs(task.recipe, n_groups, passes)
        examples_trained = round(task.n_data * seeds_of_a_group() * epochs)
    recipe = task.recipe
    if source.calibrate and recipe is not None and recipe.train is None:
        examples_trained += round(task.n_data * recipe.epochs)
    bytes_of_weights = sum(p.nbytes for p in task.parameters().values())
    disk = 2 * bytes_of_weights  # the posterior's mean, and about as much for its precision
    return Forecast.of(task, examples_run, trained=examples_trained, disk=disk)


def seeds_of_a_group() -> int:
    """The number of trainings by which an audit takes out one group."""
    from blr_analysis.sensitivity.what_if import what_if

    return signature(what_if).parameters["seeds"].default


def own_trainings(task: Task, source: Source, by: str | None) -> str:
    """How many trainings by the recipe's ``train=`` an audit makes, in words; "" of none."""
    from blr_analysis.audit.findings import groups_of

    if task.recipe is None or task.recipe.train is None:
        return ""
    count = len(groups_of(task, by)) * seeds_of_a_group()
    if source.calibrate:
        count += 1
    if count == 0:
        return ""
    return f"up to {count} trainings by your train="


def algorithms(
    *,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Print one algorithm in full.", show_default=False),
    ] = None,
    out: Out = None,
    shared: Shared,
) -> dict[str, Any]:
    """List the algorithms of the Bayesian learning rule (its Table 1).

      blr-analysis algorithms
      blr-analysis algorithms Adam
      blr-analysis algorithms --out DIR

    A row names the form of the posterior, the weights at which the loss is evaluated, the estimate
    of the Hessian, and the departures from the rule. The last column says where the analyses get
    the posterior: from the optimizer, from a Laplace approximation after training, or from the
    sites of a fitted model. With NAME, the command prints the whole row and the module that runs
    the algorithm.

    --json prints algorithms.
    """
    from blr_analysis.learning_rule.table import row, table1
    from blr_analysis.tables import write_table

    if shared.dry_run:
        pairs({"writes": out or "nothing"})
        return dry_run(writes=out)
    table = table1()
    chosen = table
    if name is None:
        shown = grid({column: table[column].replace("", "none") for column in SHOWN_COLUMNS})
    else:
        chosen = table[table["algorithm"] == row(name).algorithm]
        entry = chosen.iloc[0]
        shown = grid({"": entry.index, " ": [str(value) or "none" for value in entry]})
    with shared.folder(out) as folder:
        if out is not None:
            write_table(table, folder, "table1")
    show(shown)
    return {"algorithms": chosen.to_dict("records")}


def flowed(text: str | None) -> str:
    """Each paragraph in one line, so that it fills any terminal; indented ones stay as they are.

    >>> flowed('''
    ...     Two
    ...     words.
    ...
    ...       an example
    ... ''')
    'Two words.\\n\\n  an example'
    """
    paragraphs = cleandoc(text or "").split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split()) for p in paragraphs)


app.callback(epilog=EXIT_CODES, help=flowed(root.__doc__))(root)
COMMANDS: dict[str, Callable[..., dict[str, Any] | None]] = {
    "demo": demo,
    "audit": audit,
    "what-if": what_if_command,
    "index": index,
    "query": query,
    "validate": validate,
    "fisher": fisher,
    "merge": merge,
    "verify": verify,
    "algorithms": algorithms,
}
IDLE_OPTIONS = {  # shared ones that do nothing in a command
    "demo": {"device", "max_memory", "progress"},
    "fisher": {"progress"},
    "verify": {"device", "max_memory", "force"},
    "algorithms": {"device", "max_memory", "progress"},
}
for command_name, command in COMMANDS.items():
    typed_command = flattened(command, IDLE_OPTIONS.get(command_name, ()))
    app.command(command_name, help=flowed(command.__doc__))(typed_command)

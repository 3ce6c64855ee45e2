"""The program and its commands ``demo``, ``audit``, ``what-if`` and ``algorithms``; the others have
a module each. What only some commands need is imported inside of them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.checks import package_version
from blr_analysis.cli.fisher import fisher
from blr_analysis.cli.index import index, query
from blr_analysis.cli.inputs import Source
from blr_analysis.cli.merging import merge
from blr_analysis.cli.options import Out, Shared, flattened, show_forecast
from blr_analysis.cli.queries import check_queries, labels_of
from blr_analysis.cli.verify import verify
from blr_analysis.errors import InputError
from blr_analysis.terminal import Teller, as_text, grid, pairs, show

if TYPE_CHECKING:
    from blr_analysis.audit import Findings
    from blr_analysis.posterior import Forecast
    from blr_analysis.sensitivity import WhatIf
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
    """Which data made this model, and what would it be without them?

    Start with the demo, which needs nothing of yours:

      blr-analysis demo

    For a model of your own, write a function that returns its task, in train.py:

      def make_task():
          return blr.Task(model, data, checkpoints=checkpoints, recipe=recipe)

    Then:

      blr-analysis audit train.py:make_task

    A posterior that was saved after training, posterior.save("posterior.safetensors"), takes the
    place of the one that is fitted:

      blr-analysis audit train.py:make_task -p posterior.safetensors

    Each command explains itself: blr-analysis audit --help. Fine-tuned models become one, each
    weight as far as each model is sure of it:

      blr-analysis fisher ./ft1 train.jsonl
      blr-analysis merge recipe.yml merged
    """


def demo(
    *,
    seed: Annotated[
        int, typer.Option(help="Of the split, the initial weights, the noise and the shuffling.")
    ] = 0,
    out: Out = Path("blr-demo"),
    shared: Shared,
) -> None:
    """Train a small network on handwritten digits with IVON, and audit its data.

    Needs nothing but this package, and about a minute on two cores:

      blr-analysis demo
      blr-analysis demo --out digits --seed 1

    Shows which digits shape the network most and which labels look wrong, the leave-one-out
    estimate against the test data, the memory map, and what the network would be without each
    class: predicted by short trainings, and for two classes retrained.
    """
    shared.free(out)
    if shared.dry_run:
        pairs({"writes": out})
        return
    from blr_analysis.demo import run

    run(out or Path("blr-demo"), seed=seed, say=Teller())


def audit(
    *,
    source: Source,
    by: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="Take out its groups in turn: target or a metadata column; none; or auto, the "
            "classes of a classification with at most 100 of them.",
        ),
    ] = "auto",
    passes: Annotated[
        int | None, typer.Option(help="Over the data, for each group; see what-if --help.")
    ] = None,
    out: Out = Path("blr-audit"),
    shared: Shared,
) -> None:
    """The whole audit of your own task: findings printed, tables, pictures and a page written.

    The posterior is fitted, or read from FILE, which posterior.save(FILE) wrote after training:

      blr-analysis audit train.py:make_task --test make_test
      blr-analysis audit train.py:make_task -p FILE --by source --out audit
      blr-analysis audit train.py:make_task --prior-precision 5 --calibrate

    Or the audit of a causal language model, a folder as save_pretrained or a trainer leaves it (or
    a LoRA adapter), and of its texts, prompts with answers, or messages:

      blr-analysis audit ./llm train.jsonl
      blr-analysis audit ./adapter train.jsonl --test held-out.jsonl --by source

    Writes the tables table (every example), suspicious, leave_one_out and removals as CSV and
    Parquet, report.html (one page with all of it, for a browser), summary.txt, the posterior, and
    the pictures memory_map, deviations, leave_one_out, suspicious and removals, as far as the task
    allows them. What was decided on the page is a question for what-if:

      blr-analysis what-if train.py:make_task --decisions decisions.csv
    """
    from blr_analysis import ranks
    from blr_analysis.audit import check_column, in_text, investigate, sections, written

    column = None if by == "none" else by
    say = Teller()
    with shared.folder(out) as folder:
        task, test = source.tasks(shared, say)
        check_column(column, task)
        if shared.dry_run:
            cost = audit_forecast(task, test, source, column, passes)
            show_forecast(cost, besides="tables, pictures and report.html on disk")
            return
        posterior = source.posterior_of(task, say)
        findings = investigate(task, posterior, test=test, by=column, passes=passes, say=say)
        if not ranks.first():
            return
        with ranks.alone():
            summary = in_text(*sections(findings).values())
            texts = None if source.data is None else task.metadata["text"]
            files = write_audit(findings, folder, as_text(summary), texts, say)
    show(summary)
    show(written(folder, files))


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
    """What the analyses of an audit cost; groups are counted as short trainings without them."""
    from blr_analysis.audit.findings import groups_of
    from blr_analysis.posterior import Forecast
    from blr_analysis.sensitivity.solvers import training_epochs
    from blr_analysis.sensitivity.what_if import what_if

    sweeps = 4  # scores, leaving one out, suspects, stationarity
    examples_run = source.examples(task) + sweeps * task.n_data
    if test is not None:
        examples_run += test.n_data
    examples_trained = 0
    n_groups = len(groups_of(task, by))
    if n_groups:
        seeds = signature(what_if).parameters["seeds"].default
        epochs = training_epochs(task.recipe, n_groups, passes)
        examples_trained = task.n_data * seeds * epochs
    disk = 2 * sum(p.nbytes for p in task.parameters().values())
    return Forecast.of(task, examples_run, trained=examples_trained, disk=disk)


def what_if_command(
    *,
    source: Source,
    remove: Annotated[
        str | None,
        typer.Option(metavar="QUERY", help="The rows that leave, as pandas writes a query."),
    ] = None,
    relabel: Annotated[
        list[str] | None,
        typer.Option(metavar="QUERY:LABEL", help="The rows that get another label; repeatable."),
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="What was decided on an audit's page: drop and relabel."),
    ] = None,
    solver: Annotated[
        str,
        typer.Option(
            help="posterior: one step. cg: a descent. replay: short trainings. retrain: the whole "
            "recipe. auto: posterior for up to 1 % of the data, else cg for a model at its "
            "minimum, else replay, or retrain where the recipe makes no more passes."
        ),
    ] = "auto",
    seeds: Annotated[
        int, typer.Option(help="Trainings of replay and retrain; one gives no interval.")
    ] = 3,
    passes: Annotated[
        int | None,
        typer.Option(
            help="Of cg, over the changed data (60); of replay, epochs (8, or the recipe's)."
        ),
    ] = None,
    out: Out = None,
    shared: Shared,
) -> None:
    """What the model would be without some of its data, or with other labels.

    In one step, by a descent or by short trainings with the task's recipe:

      blr-analysis what-if train.py:make_task --remove "target == 3"
      blr-analysis what-if train.py:make_task --remove "loss > 2.5 and source != 'web'"
      blr-analysis what-if train.py:make_task -p FILE --remove "index in [12, 40]" --out DIR
      blr-analysis what-if train.py:make_task --relabel "annotator == 'eve': 2"
      blr-analysis what-if train.py:make_task --decisions decisions.csv --solver retrain
      blr-analysis what-if ./llm train.jsonl --remove "source == 'web'"

    QUERY is that of a pandas DataFrame (and, or, not, in; words in quotes) whose columns are those
    of the scores: index, target, prediction, loss, error, variance, deviation, self_influence,
    leverage, and the task's metadata. With --out, the table by class, a picture and the weights
    without the examples (without.safetensors) are written.
    """
    from blr_analysis.audit import in_text
    from blr_analysis.audit.sections import trust, what_if_section
    from blr_analysis.report.decisions import read_decisions
    from blr_analysis.sensitivity import what_if

    has_query = remove is not None or bool(relabel)
    if (decisions is None) != has_query:
        raise InputError("give --decisions CSV, or --remove QUERY and --relabel QUERY:LABEL")
    labels = None
    if decisions is not None:
        chosen = read_decisions(decisions)
        remove, labels = chosen["remove"], chosen["relabel"]
    say = Teller()
    with shared.folder(out) as folder:
        task, test = source.tasks(shared, say)
        if has_query:
            check_queries(remove, relabel or [], task)
        posterior = source.posterior_of(task, say)
        if relabel:
            labels = labels_of(relabel, task, posterior)
        if shared.dry_run:
            pairs({"examples": f"{task.n_data:,}", "writes": out or "nothing"})
            return
        say("what if")
        result = what_if(
            task,
            posterior,
            remove=remove,
            relabel=labels,
            evaluate=test,
            solver=solver,
            seeds=seeds,
            passes=passes,
        )
        if out is not None:
            write_what_if(result, folder)
    measured_on = "the training data" if test is None else "the test data"
    caveats = trust(task, posterior, solver=result.solver)
    show(in_text(caveats, what_if_section(result, measured_on, task.n_data)))


def write_what_if(result: WhatIf, folder: Path) -> None:
    """Write the picture, the weights and, where there are classes, the table by class."""
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


def algorithms(
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="One algorithm, with all that is known.", show_default=False
        ),
    ] = None,
    out: Out = None,
    shared: Shared,
) -> None:
    """The algorithms that are one rule: Table 1 of the Bayesian learning rule.

    All of them, one of them, or all as files:

      blr-analysis algorithms
      blr-analysis algorithms Adam
      blr-analysis algorithms --out DIR

    Each algorithm is a posterior family, a place where the loss is looked at, an estimate of the
    Hessian, and named departures from the rule. The last column says through what its posterior
    comes to be analysed: the optimizer itself, a Laplace approximation fitted after training, or
    the sites of a fitted model. With NAME, all of that for one algorithm, and the module that
    runs it.
    """
    from blr_analysis.learning_rule.table import row, table1
    from blr_analysis.tables import write_table

    table = table1()
    if name is None:
        shown = grid({column: table[column].replace("", "none") for column in SHOWN_COLUMNS})
    else:
        entry = table[table["algorithm"] == row(name).algorithm].iloc[0]
        shown = grid({"": entry.index, " ": [str(value) or "none" for value in entry]})
    with shared.folder(out) as folder:
        if out is not None and not shared.dry_run:
            write_table(table, folder, "table1")
    show(shown)


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
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "audit": audit,
    "what-if": what_if_command,
    "index": index,
    "query": query,
    "fisher": fisher,
    "merge": merge,
    "verify": verify,
    "algorithms": algorithms,
}
for command_name, command in COMMANDS.items():
    app.command(command_name, help=flowed(command.__doc__))(flattened(command))

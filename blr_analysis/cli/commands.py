"""The commands, each a few lines over :mod:`blr_analysis.audit` and the analyses."""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.checks import package_version
from blr_analysis.cli.fisher import fisher
from blr_analysis.cli.index import index, query
from blr_analysis.cli.merging import merge
from blr_analysis.cli.options import (
    Base,
    By,
    Calibrate,
    Correction,
    Data,
    DryRun,
    Fit,
    Initial,
    Length,
    Out,
    Passes,
    PosteriorFile,
    PriorPrecision,
    Solver,
    TaskName,
    TaskOrModel,
    Test,
    TextColumn,
    TextOptions,
    Way,
    audit_forecast,
    job,
    show_forecast,
)
from blr_analysis.errors import InputError
from blr_analysis.terminal import Teller, as_text, grid, show

if TYPE_CHECKING:
    from rich.table import Table

    from blr_analysis.sensitivity import WhatIf

EXIT_CODES = """Exit codes: 0 done; 1 an unexpected fault; 2 a wrong command line, bad input, or \
files that cannot be read or written; 130 interrupted. Findings go to standard output, progress \
and errors to standard error."""

SHOWN = ("algorithm", "family", "approximations", "section")
SHORT = {
    "Posterior.from_optimizer": "from_optimizer",
    "sites of the fitted model": "its sites",
    "": "none",
}

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog=EXIT_CODES,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"blr-analysis {package_version()}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error. May stand anywhere."),
    ] = False,
) -> None:
    """Which data made this model, and what would it be without them?

    Start with the demo, which needs nothing of yours:

      blr-analysis demo

    For a model of your own, save its posterior after training, and write a function that returns
    its task:

      # at the end of training
      posterior = blr.Posterior.from_optimizer(optimizer, model)
      posterior.save("posterior.safetensors")

      # in train.py
      def make_task():
          return blr.Task(model, data, likelihood="categorical")

    Then:

      blr-analysis audit train.py:make_task -p posterior.safetensors

    A model that was trained without such an optimizer: --fit kron in place of -p FILE. Each
    command explains itself: blr-analysis audit --help.

    Fine-tuned models become one, each weight as far as each model is sure of it:

      blr-analysis fisher ./ft1 train.jsonl
      blr-analysis merge recipe.yml merged
    """


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to write.")
    ] = Path("blr-demo"),
    seed: Annotated[
        int, typer.Option(min=0, help="Of the split, the initial weights, the noise.")
    ] = 0,
) -> None:
    """Train a small network on handwritten digits with IVON, and audit its data.

    Needs nothing but this package, and under a minute on two cores:

      blr-analysis demo
      blr-analysis demo --out digits --seed 1

    Shows which digits shape the network most and which labels look wrong, the leave-one-out
    estimate against the test data, the memory map, and what the network would be without each
    class: predicted in one step, and for two classes retrained.
    """
    from blr_analysis.demo import run

    say = Teller()
    run(out, seed=seed, say=say)
    say("done")


def audit(
    task: TaskOrModel,
    data: Data = None,
    posterior: PosteriorFile = None,
    fit: Fit = None,
    prior_precision: PriorPrecision = None,
    initial: Initial = None,
    calibrate: Calibrate = None,
    test: Test = None,
    by: By = "auto",
    passes: Passes = None,
    base: Base = None,
    text: TextColumn = None,
    max_length: Length = None,
    dry_run: DryRun = False,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to write.")
    ] = Path("blr-audit"),
) -> None:
    """The whole audit of your own task: findings printed, tables and pictures written.

    FILE is what posterior.save(FILE) wrote after training:

      blr-analysis audit train.py:make_task -p FILE
      blr-analysis audit train.py:make_task -p FILE --test make_test
      blr-analysis audit train.py:make_task -p FILE --by source --out audit
      blr-analysis audit train.py:make_task --fit kron --prior-precision 5 --calibrate 32

    Or the audit of a causal language model, a folder as save_pretrained leaves it (or a LoRA
    adapter), and of its texts, prompts with answers, or messages:

      blr-analysis audit ./llm train.jsonl
      blr-analysis audit ./adapter train.jsonl --test held-out.jsonl --by source

    Writes the tables table (every example), leave_one_out and removals as CSV and Parquet,
    report.html (one page with all of it, for a browser), summary.txt, the posterior, and the
    pictures memory_map, deviations, leave_one_out, suspicious and removals, as far as the task
    allows them.
    """
    from blr_analysis import ranks
    from blr_analysis.audit import (
        check_column,
        files_section,
        investigate,
        summary,
        write,
        write_text,
    )
    from blr_analysis.report import write_report

    column = None if by == "none" else by
    way = Way(posterior, fit, prior_precision, calibrate, initial)
    texts = TextOptions.of(task, data, base, text, max_length)
    if dry_run:
        cost = audit_forecast(task, way, texts, test, column, passes)
        show_forecast(cost, besides="tables, pictures and report.html on disk")
        return
    with job(
        task, way, test, out, check=lambda ours: check_column(column, ours), texts=texts
    ) as at:
        findings = investigate(
            at.task, at.posterior, test=at.test, by=column, passes=passes, say=at.say
        )
        if not ranks.first():
            return
        with ranks.alone():
            printed = summary(findings)
            files = write(findings, at.out, say=at.say)
            files.append(write_text(as_text(printed), at.out, "summary.txt"))
            at.say("writing the page")
            shown = at.task.metadata["text"] if texts else None
            files.append(write_report(findings, at.out / "report.html", texts=shown))
    show(printed)
    show(files_section(at.out, files))


def report(
    task: TaskName,
    posterior: PosteriorFile = None,
    fit: Fit = None,
    prior_precision: PriorPrecision = None,
    initial: Initial = None,
    calibrate: Calibrate = None,
    test: Test = None,
    by: By = "auto",
    passes: Passes = None,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="The page's heading.")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")
    ] = Path("report.html"),
) -> None:
    """The whole audit as one HTML page, to look at and to hand on: it needs nothing but a browser.

    FILE is what posterior.save(FILE) wrote after training:

      blr-analysis report train.py:make_task -p FILE
      blr-analysis report train.py:make_task -p FILE --test make_test --out digits.html

    The memory map to point at, every example to sort, search and save as CSV, suspicious labels
    to keep, relabel or drop, groups taken out, and what test predictions rest on. What was decided
    there is a question for what-if:

      blr-analysis what-if train.py:make_task -p FILE --decisions decisions.csv
    """
    from blr_analysis.audit import check_column, investigate
    from blr_analysis.files import check_file, held
    from blr_analysis.report import write_report

    column = None if by == "none" else by
    way = Way(posterior, fit, prior_precision, calibrate, initial)
    check_file(out)
    with held(out), job(task, way, test, check=lambda ours: check_column(column, ours)) as at:
        findings = investigate(
            at.task, at.posterior, test=at.test, by=column, passes=passes, say=at.say
        )
        at.say("writing the page")
        typer.echo(write_report(findings, out, title=title))


def map_(
    task: TaskName,
    posterior: PosteriorFile = None,
    fit: Fit = None,
    prior_precision: PriorPrecision = None,
    quantile: Annotated[
        float,
        typer.Option(min=0, max=1, help="Above this quantile an error, a variance counts as high."),
    ] = 0.9,
    out: Out = None,
) -> None:
    """The memory map: regular, uncertain, unpredictable and memorable examples.

    FILE is what posterior.save(FILE) wrote after training:

      blr-analysis map train.py:make_task -p FILE
      blr-analysis map train.py:make_task -p FILE --out map

    Prediction error against prediction variance: an example with much of both is remembered
    rather than predicted (memorable), one with error alone is contradicted by the other data
    (unpredictable), one with variance alone is fitted but little supported (uncertain).
    """
    from blr_analysis.audit import extremes_section, map_section, write_picture
    from blr_analysis.audit.pictures import map_picture
    from blr_analysis.memory_map import memory_map
    from blr_analysis.sensitivity import sensitivity
    from blr_analysis.tables import write_table

    with job(task, Way(posterior, fit, prior_precision), out=out) as at:
        at.say(f"sensitivity of {at.task.n_data:,} examples")
        memory = memory_map(sensitivity(at.task, at.posterior), quantile=quantile)
        if out is not None:
            write_table(memory.table, at.out, "memory_map")
            write_picture(map_picture(memory, at.task), at.out, "memory_map")
    show(map_section(memory))
    show(extremes_section(memory))


def loo(
    task: TaskName,
    posterior: PosteriorFile = None,
    fit: Fit = None,
    prior_precision: PriorPrecision = None,
    calibrate: Calibrate = None,
    test: Test = None,
    correction: Annotated[
        Correction,
        typer.Option(help="cavity takes the example out of the precision as well; auto decides."),
    ] = Correction.auto,
    refine: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Leave the N examples out by a descent on the others whose loss is estimated to "
            "change most: 12 passes over the data each, close to retraining. Unasked for those "
            "of high leverage, where the curvature is whole.",
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Leave-one-out: the loss and accuracy to expect on new data, from the training data alone.

    FILE is what posterior.save(FILE) wrote after training:

      blr-analysis loo train.py:make_task -p FILE
      blr-analysis loo train.py:make_task -p FILE --test make_test
      blr-analysis loo train.py:make_task -p FILE --calibrate 32

    With --test, the estimate is set beside what test data say. With --out, every left-out
    prediction is written.
    """
    from blr_analysis.audit import evaluated, loo_section, trust_section, write_picture
    from blr_analysis.audit.pictures import loo_picture
    from blr_analysis.sensitivity import leave_one_out
    from blr_analysis.tables import write_table

    with job(task, Way(posterior, fit, prior_precision, calibrate), test, out) as at:
        at.say(f"leaving out each of {at.task.n_data:,} examples")
        left_out = leave_one_out(at.task, at.posterior, correction=str(correction), refine=refine)
        on_test, targets = None, None
        if at.test is not None:
            mean = at.posterior.on(at.test, same_data=False).mean
            on_test, targets = evaluated(at.test.with_model(at.task), mean)
        if out is not None:
            write_table(left_out.table, at.out, "leave_one_out")
            if on_test is not None and targets is not None:
                write_picture(loo_picture(left_out, on_test, targets), at.out, "leave_one_out")
    show(trust_section(at.task, at.posterior, left_out))
    show(loo_section(left_out, on_test))


def what_if_(
    task: TaskName,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SELECTION",
            help="COLUMN=VALUE, a query of the table as pandas writes it, or indices such as 3,17. "
            "Repeated: whatever any of them selects.",
            show_default=False,
        ),
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="What was decided in a report's gallery: drop and relabel these."
        ),
    ] = None,
    posterior: PosteriorFile = None,
    fit: Fit = None,
    prior_precision: PriorPrecision = None,
    initial: Initial = None,
    test: Test = None,
    solver: Annotated[
        Solver,
        typer.Option(
            help="posterior: one step; cg: a descent, at a minimum; replay: short trainings with "
            "and without; retrain: the whole recipe; auto: posterior for up to 1 % of the data, "
            "else cg at a minimum and replay off it."
        ),
    ] = Solver.auto,
    passes: Passes = None,
    out: Out = None,
) -> None:
    """What the model would be without some of its data, without retraining.

    FILE is what posterior.save(FILE) wrote after training:

      blr-analysis what-if train.py:make_task -p FILE --remove target=3
      blr-analysis what-if train.py:make_task -p FILE --remove source=web
      blr-analysis what-if train.py:make_task -p FILE --remove "loss > 2.5 and source != 'web'"
      blr-analysis what-if train.py:make_task -p FILE --remove suspicious=true
      blr-analysis what-if train.py:make_task -p FILE --remove 12,40 --out DIR
      blr-analysis what-if train.py:make_task -p FILE --decisions decisions.csv

    COLUMN=VALUE needs no quotes; everything else is the query of a pandas DataFrame (and, or, not,
    in), without function calls. Columns are those of the audit's table: index, target, prediction,
    loss, error, variance, deviation, self_influence, leverage, region, left_out_prediction,
    left_out_loss, label_quality, suspicious, and the task's metadata. With --out, the table by
    class, a picture and the weights without the examples (without.safetensors) are written.
    """
    from blr_analysis.audit import trust_section, what_if_section, write_picture
    from blr_analysis.audit.pictures import figure_of
    from blr_analysis.audit.summary import has_classes
    from blr_analysis.cli.selectors import check, selected
    from blr_analysis.plots import plot_what_if
    from blr_analysis.report.decisions import read_decisions
    from blr_analysis.sensitivity import what_if
    from blr_analysis.tables import write_table

    if (remove is None) == (decisions is None):
        raise InputError("give --remove SELECTION or --decisions CSV, one of them")
    chosen: dict[str, Any] = {} if decisions is None else read_decisions(decisions)
    for text in remove or ():
        check(text)
    with job(task, Way(posterior, fit, prior_precision, initial=initial), test, out) as at:
        if remove:
            chosen = {"remove": selected(remove, at.task, at.posterior)}
        at.say(f"what if: {_asked(chosen)} of {at.task.n_data:,} examples")
        result = what_if(
            at.task,
            at.posterior,
            **chosen,
            evaluate=at.test,
            solver=str(solver),
            passes=passes,
        )
        if out is not None:
            if has_classes(result):
                write_table(result.by_class, at.out, "by_class")
            write_picture(figure_of(plot_what_if(result)), at.out, "what_if")
            save_state(result, at.out / "without.safetensors")
    where = "the training data" if at.test is None else "the test data"
    show(trust_section(at.task, at.posterior))
    show(what_if_section(result, where, at.task.n_data))


def save_state(result: WhatIf, path: Path) -> None:
    """The weights and buffers of the changed model."""
    from blr_analysis.files import drafted
    from blr_analysis.files.shards import save_file

    with drafted(path) as draft:
        save_file({**result.parameters, **result.buffers}, draft, {"format": "pt"})


def _asked(chosen: dict[str, Any]) -> str:
    """ "without 3, with 2 relabelled"."""
    leaving, labels = chosen.get("remove"), chosen.get("relabel")
    gone = 0 if leaving is None else int(leaving.sum()) if hasattr(leaving, "sum") else len(leaving)
    return f"without {gone:,}" + (f", with {len(labels):,} relabelled," if labels else "")


def algorithms(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="One algorithm, with all that is known.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Write the whole table as table1.csv and table1.parquet.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """The algorithms that are one rule: Table 1 of the Bayesian learning rule.

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
    chosen = None if name is None else table["algorithm"] == row(name).algorithm
    if out is not None:
        files = write_table(table, out, "table1")
        say = Teller()
        for file in files:
            say(f"wrote {file}")
    if chosen is None:
        columns = {column: table[column] for column in SHOWN}
        show(grid({**columns, "posterior": table["through"].replace(SHORT)}))
    else:
        show(_one(table[chosen].iloc[0]))


def _one(entry: Any) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for column, value in entry.items():
        text = {True: "yes", False: "no"}[value] if column == "analysable" else str(value)
        shown.add_row(str(column), text or "none")
    return shown


def flowed(text: str | None) -> str:
    """Paragraphs as one line each, so that they fill any terminal; indented ones as they stand.

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
COMMANDS = {
    **{"demo": demo, "audit": audit, "report": report, "map": map_, "loo": loo},
    **{"what-if": what_if_, "index": index, "query": query, "fisher": fisher, "merge": merge},
    "algorithms": algorithms,
}
for name, command in COMMANDS.items():
    app.command(name, help=flowed(command.__doc__))(command)

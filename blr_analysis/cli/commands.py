"""The commands, each a few lines over :mod:`blr_analysis.audit` and the analyses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blr_analysis.cli.algorithms import algorithms as _algorithms
from blr_analysis.cli.fisher import fisher as _fisher
from blr_analysis.cli.index import index as _index
from blr_analysis.cli.index import query as _query
from blr_analysis.cli.merging import merge as _merge
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
    Teller,
    Test,
    TextColumn,
    TextOptions,
    Way,
    audit_forecast,
    job,
    paper,
    show_forecast,
)
from blr_analysis.cli.words import (
    ALGORITHMS,
    AUDIT,
    DEMO,
    EXIT_CODES,
    FISHER,
    INDEX,
    LOO,
    MAP,
    MERGE,
    QUERY,
    REPORT,
    ROOT,
    WHAT_IF,
)
from blr_analysis.errors import InputError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog=EXIT_CODES,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"blr-analysis {version('blr-analysis')}")
        except PackageNotFoundError:
            typer.echo("blr-analysis 0.0.0 (not installed)")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES, help=ROOT)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error. May stand anywhere."),
    ] = False,
) -> None:
    """Options that come before a command."""


@app.command(help=DEMO)
def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to write.")
    ] = Path("blr-demo"),
    seed: Annotated[
        int, typer.Option(min=0, help="Of the split, the initial weights, the noise.")
    ] = 0,
) -> None:
    """Train, audit, compare."""
    from blr_analysis.demo import run

    say = Teller()
    run(out, seed=seed, console=paper(), say=say)
    say("done")


@app.command(help=AUDIT)
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
    """Everything, into a folder."""
    from blr_analysis import ranks
    from blr_analysis.audit import (
        check_column,
        files_section,
        investigate,
        show,
        summary,
        write,
        write_text,
    )
    from blr_analysis.audit.summary import as_text
    from blr_analysis.report import write_report

    column = None if by == "none" else by
    way = Way(posterior, fit, prior_precision, calibrate, initial)
    texts = TextOptions.of(task, data, base, text, max_length)
    if dry_run:
        show_forecast(audit_forecast(task, way, texts))
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
    show(printed, paper())
    show(files_section(at.out, files), paper())


@app.command(help=REPORT)
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
    """Everything, as one page."""
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


@app.command("map", help=MAP)
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
    """The four regions."""
    from blr_analysis.audit import extremes_section, map_section, show, write_picture
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
    show(map_section(memory), paper())
    show(extremes_section(memory), paper())


@app.command(help=LOO)
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
    """The expected loss on new data."""
    from blr_analysis.audit import evaluated, loo_section, show, trust_section, write_picture
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
    show(trust_section(at.task, at.posterior, left_out), paper())
    show(loo_section(left_out, on_test), paper())


@app.command("what-if", help=WHAT_IF)
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
            help="posterior: one step, no pass over the data that stay; cg: a descent on them; "
            "replay: a short training with and without, from first weights; auto: posterior for "
            "one example, off a minimum for up to 1 % of the data, else one of the others."
        ),
    ] = Solver.auto,
    passes: Passes = None,
    converge: Annotated[
        bool, typer.Option("--converge", help="Descend until nothing is left to gain.")
    ] = False,
    out: Out = None,
) -> None:
    """The model without some of its data."""
    from blr_analysis.audit import show, trust_section, what_if_section, write_picture
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
            steps="converge" if converge else None,
            passes=passes,
        )
        if out is not None:
            if has_classes(result):
                write_table(result.by_class, at.out, "by_class")
            write_picture(figure_of(plot_what_if(result)), at.out, "what_if")
            result.posterior.save(at.out / "perturbed.safetensors")
    where = "the training data" if at.test is None else "the test data"
    show(trust_section(at.task, at.posterior), paper())
    show(what_if_section(result, where, at.task.n_data), paper())


def _asked(chosen: dict[str, Any]) -> str:
    """ "without 3, with 2 relabelled"."""
    leaving, labels = chosen.get("remove"), chosen.get("relabel")
    gone = 0 if leaving is None else int(leaving.sum()) if hasattr(leaving, "sum") else len(leaving)
    return f"without {gone:,}" + (f", with {len(labels):,} relabelled," if labels else "")


app.command("index", help=INDEX)(_index)
app.command("query", help=QUERY)(_query)
app.command("fisher", help=FISHER)(_fisher)
app.command("merge", help=MERGE)(_merge)
app.command("algorithms", help=ALGORITHMS)(_algorithms)

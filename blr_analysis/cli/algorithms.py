"""``blr-analysis algorithms``: the table of the Bayesian learning rule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.cli.options import Teller, paper

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = ("algorithm", "family", "approximations", "section", "posterior")
SHORT = {
    "Posterior.from_optimizer": "from_optimizer",
    "sites of the fitted model": "its sites",
    "": "none",
}


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
    """Table 1."""
    from blr_analysis.audit import show
    from blr_analysis.learning_rule.table import row, table1
    from blr_analysis.tables import write_table

    table = table1()
    if name is not None:
        table = table.query("algorithm == @wanted", local_dict={"wanted": row(name).algorithm})
    if out is not None:
        files = write_table(table, out, "table1")
        say = Teller()
        for file in files:
            say(f"wrote {file}")
    show(_overview(table) if name is None else _one(table.iloc[0]), paper())


def _overview(table: Any) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for column in SHOWN:
        shown.add_column(column, overflow="fold", no_wrap=column == "posterior")
    for entry in table.itertuples():
        through = SHORT.get(entry.through, entry.through)
        shown.add_row(entry.algorithm, entry.family, entry.approximations, entry.section, through)
    return shown


def _one(entry: Any) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for column, value in entry.items():
        text = {True: "yes", False: "no"}[value] if column == "analysable" else str(value)
        shown.add_row(str(column), text or "none")
    return shown

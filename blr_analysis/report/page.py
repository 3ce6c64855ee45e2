"""The page as one HTML file: template, style, script, Bokeh's own script, data, thumbnails."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from blr_analysis.audit import Findings
from blr_analysis.audit.findings import influence_column
from blr_analysis.audit.summary import (
    DIAGONAL,
    agreement,
    doubts,
    expectations,
    removed_how,
    trust_notes,
)
from blr_analysis.checks import package_version
from blr_analysis.files import drafted
from blr_analysis.posterior.predictive import measure_of
from blr_analysis.report.charts import memory_chart, removals_chart, training_chart
from blr_analysis.report.contents import (
    class_names,
    classes_of,
    colours_of,
    columns_of,
    filters_of,
    label_names,
    named,
    neighbours_of,
    pictures_of,
    proposals_of,
    regions_of,
    rows_of,
    sheet_of,
    suspects_of,
    tests_of,
)
from blr_analysis.sensitivity import Monitor, SequenceScores


def write_page(
    findings: Findings,
    path: Path,
    *,
    images: Any = None,
    texts: Sequence[str] | None = None,
    monitor: Monitor | None = None,
    title: str | None = None,
    classes: Sequence[str] | None = None,
    removals: pd.DataFrame | None = None,
    truth: Mapping[Any, float] | None = None,
    progress: bool | None = None,
) -> Path:
    """Write the page; ``removals`` in place of the findings' own, ``truth`` beside them."""
    names = class_names(findings, classes)
    neighbours = neighbours_of(findings, progress)
    rows = rows_of(findings, texts, neighbours)
    rows = replace(rows, table=rows.table.rename(columns=label_names(findings, classes)))
    pictures = pictures_of(findings, rows, neighbours, images)
    sheet = None if pictures is None else sheet_of(pictures)
    removals = findings.removals if removals is None else removals
    charts = {"map": memory_chart(findings.memory, rows.index)}
    chosen = names if findings.by == "target" else None  # names of groups
    if removals is not None:
        told = removals.assign(group=[named(group, chosen) for group in removals["group"]])
        truths = {named(group, chosen): nll for group, nll in (truth or {}).items()}
        charts["removals"] = removals_chart(told, truths)
    if monitor is not None and len(monitor.rows):
        charts["training"] = training_chart(monitor.table)
    colours, suspects = colours_of(rows), suspects_of(findings, rows)
    data = {
        "n": len(findings.table),
        "columns": columns_of(rows, names),
        "by": influence_column(rows.table),
        "texts": rows.texts,
        "inputs": rows.inputs,
        "colours": colours,
        "filters": filters_of(rows, colours),
        "classes": classes_of(findings, names),
        "suspects": suspects,
        "proposed": proposals_of(findings, rows, suspects),
        "tests": tests_of(rows, neighbours, names),
        "testsPictured": sheet is not None and sheet.n > len(rows.index),
        "across": None if sheet is None else sheet.across,
        "charts": charts,
    }
    script = _own("page.js")
    library = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    text = _template().render(
        title=title or f"Audit of {counted(findings.task.n_data)}",
        question=question(findings, removals),
        trust=trust(findings, removals, chosen),
        policy=policy(library, script),
        style=Markup(_own("page.css")),
        script=Markup(script),
        library=Markup(library),
        licence=metadata.distribution("bokeh").read_text("licenses/LICENSE.txt") or "BSD-3-Clause",
        data=Markup(_harmless(data)),
        sheet=sheet,
        n=len(findings.table),
        n_shown=len(rows.index),
        regions=regions_of(findings),
        judged=judged(findings),
        agreement=None if findings.on_test is None else agreement(findings.loo, findings.on_test),
        classification="suspicious" in findings.table,
        suspicious=_doubtful(findings),
        n_suspects=len(suspects),
        n_doubted=sum(findings.table["suspicious"]) if "suspicious" in findings.table else 0,
        removals=removal_rows(removals, chosen),
        removed_by=grouped(findings),
        tests=data["tests"],
        influence_note="" if neighbours is None else neighbours.top.note,
        measure=measured(findings),
        charts=charts,
        version=package_version(),
        bokeh=metadata.version("bokeh"),
    )
    with drafted(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="replace")
    return path


def measured(findings: Findings) -> str:
    """What its losses are, for the head of a column."""
    measure = measure_of(findings.task.likelihood.kind)
    if measure == "nll" or isinstance(findings.scores, SequenceScores):
        return "NLL [nats]"
    outputs = findings.scores.outputs.shape[-1]
    return measure if outputs == 1 else f"{measure}, summed over {outputs} outputs"


def counted(n: int) -> str:
    """How many training examples, in words."""
    return f"{n:,} training example{'' if n == 1 else 's'}"


def question(findings: Findings, removals: pd.DataFrame | None) -> str:
    """What was asked, in a sentence."""
    task = findings.task
    size = sum(p.numel() for p in findings.posterior.mean.values())
    asked = (
        f"Which of {counted(task.n_data)} shape this model "
        f"({type(task.model).__name__}, {size:,} parameters), which of them look wrong, and how "
        "well will it do on new data"
    )
    if removals is not None:
        asked += f", with each {grouped(findings)} or without it"
    return asked + "?"


def grouped(findings: Findings) -> str:
    """What the groups taken out are called."""
    return "class" if findings.by in (None, "target") else str(findings.by)


def trust(
    findings: Findings, removals: pd.DataFrame | None, names: Sequence[str] | None = None
) -> list[str]:
    """How far the answers hold: what the reader must know before the first number."""
    said = trust_notes(findings.task, findings.posterior, findings.loo)
    record = findings.posterior.record
    if (error := findings.posterior.temperature_error) is not None:
        said.append(
            f"Its temperature was measured: {findings.posterior.temperature:.3g}, "
            f"give or take {error:.0%}."
        )
    if findings.posterior.structure == "diag":
        said.append(DIAGONAL)
    if (record.get("initial_share") or 0.0) > 0.5:
        said.append(
            "More than half of the precision is still the optimizer's starting value, not the "
            "data's: the scale of every estimate rests on that choice."
        )
    if removals is not None:
        said.append(
            f"Groups were taken out {removed_how(removals)}; the ranges shown with them are rough: "
            "their widths rest on small networks, or on a guess."
        )
        said += doubts(removals, lambda group: named(group, names))
    return said


def judged(findings: Findings) -> list[dict[str, str]]:
    """Loss and accuracy of the training data, the leave-one-out estimate, the test data."""
    names = ("training data, as fitted", "estimate for new data (leave-one-out)", "test data")
    n, tested = findings.task.n_data, findings.on_test
    many = (n, n, 0 if tested is None else len(tested.losses))
    return [
        {
            "what": what,
            "n": f"{count:,}",
            "nll": f"{nll:.4f}",
            "accuracy": "" if accuracy is None else f"{accuracy:.1%}",
        }
        for what, count, (nll, accuracy) in zip(
            names, many, expectations(findings.loo, tested), strict=False
        )
    ]


def removal_rows(
    removals: pd.DataFrame | None, names: Sequence[str] | None = None
) -> list[dict[str, str]]:
    """The table behind the chart of groups, the largest change first."""
    if removals is None:
        return []
    ordered = removals.iloc[(-removals["nll_change"].abs()).argsort(kind="stable").to_numpy()]
    return [
        {
            "group": named(row["group"], names)[:200],
            "n": f"{row['n']:,}",
            "after": f"{row['nll_after']:.3f}",
            "change": f"{row['nll_change']:+.3f}",
            "range": f"{row['nll_low']:.2f} to {row['nll_high']:.2f}",
        }
        for row in ordered.to_dict("records")
    ]


def policy(*scripts: str) -> str:
    """A Content-Security-Policy: these scripts, this file's style and pictures, nothing else."""
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )


def _template() -> Any:
    loader = PackageLoader("blr_analysis.report", "")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return env.get_template("page.html.jinja")


def _doubtful(findings: Findings) -> str:
    """What may be wrong with an example."""
    if "suspicious" in findings.table:
        return "labels"
    return "texts" if findings.task.likelihood.is_sequence else "targets"


def _own(name: str) -> str:
    return files("blr_analysis.report").joinpath(name).read_text("utf-8")


def _harmless(data: Any) -> str:
    """JSON that no HTML parser takes for markup."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text

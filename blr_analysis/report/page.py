"""The page as one HTML file: template, style, script, Bokeh's own script, data, thumbnails."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from blr_analysis.audit import Findings, sections
from blr_analysis.audit.new_data import measured
from blr_analysis.audit.trust import is_scaled_by_a_guess, ranks_only
from blr_analysis.checks import package_version
from blr_analysis.files import drafted
from blr_analysis.plots import plot_monitor
from blr_analysis.report import contents, thumbnails
from blr_analysis.report.bars import bars_of
from blr_analysis.report.charts import as_uri, memory_chart
from blr_analysis.report.words import WORDS, explained
from blr_analysis.sensitivity import Monitor


def write_page(
    findings: Findings,
    path: Path,
    *,
    images: Any = None,
    texts: Sequence[str] | None = None,
    monitor: Monitor | None = None,
    classes: Sequence[str] | None = None,
    truth: Mapping[Any, float] | None = None,
) -> Path:
    """Write the page.

    Args:
        findings: of the audit.
        path: the file.
        images, texts, monitor, classes: as for :func:`blr_analysis.report`.
        truth: the loss after retraining without a group, by group, where that is known.

    Returns:
        The path.
    """
    names = contents.class_names(findings, classes)
    neighbours = contents.neighbours_of(findings)
    rows = contents.rows_of(findings, texts, neighbours)
    pictures = thumbnails.pictures_of(findings, rows, neighbours, images)
    sheet = None if pictures is None else thumbnails.sheet_of(pictures)
    group_names = names if findings.by == "target" else None
    data = _data_of(findings, rows, neighbours, sheet, names)
    text = _template().render(
        _common_parts(data) | _parts_of(findings, group_names, truth),
        sheet=sheet,
        n_shown=len(rows.index),
        suspects=data["suspects"],
        tests=data["tests"],
        drawn=_drawings(monitor),
    )
    with drafted(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="replace")
    return path


def _common_parts(data: Any) -> dict[str, Any]:
    """The parts that every page has: style, scripts, their licence and policy, versions, data."""
    script = _asset("page.js")
    library = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    licence = metadata.distribution("bokeh").read_text("licenses/LICENSE.txt")
    return {
        "policy": policy(library, script),
        "style": Markup(_asset("page.css")),
        "script": Markup(script),
        "library": Markup(library),
        "licence": licence or "BSD-3-Clause",
        "data": Markup(_harmless(data)),
        "version": package_version(),
        "bokeh": metadata.version("bokeh"),
    }


def _parts_of(
    findings: Findings, group_names: dict[int, str] | None, truth: Mapping[Any, float] | None
) -> dict[str, Any]:
    """The parts of a page that the findings alone determine."""
    return {
        "title": f"Audit of {findings.task.n_data:,} training examples",
        "question": question(findings),
        "said": sections(findings, group_names),
        "n": len(findings.table),
        "regions": findings.memory.counts(),
        "bars": _bars(findings, truth),
        "truth": truth,
        "has_test": findings.test is not None,
        "measure": measured(findings),
        "has_sizes": not ranks_only(findings.posterior),
        "is_rough": is_scaled_by_a_guess(findings.posterior),
        "explained": explained,
    }


def _bars(findings: Findings, truth: Mapping[Any, float] | None) -> list[Markup]:
    """The drawings of the groups' losses; an empty list where no groups were taken out."""
    if findings.removals is None:
        return []
    return bars_of(findings.removals, truth)


def _data_of(
    findings: Findings,
    rows: contents.Shown,
    neighbours: contents.Neighbours | None,
    sheet: thumbnails.Thumbnails | None,
    names: dict[int, str] | None,
) -> dict[str, Any]:
    """The data of the page's script."""
    colours = contents.colours_of(rows)
    return {
        "n": len(findings.table),
        "columns": contents.columns_of(rows, names),
        "first": contents.CARDS,
        "words": WORDS,
        "loss": measured(findings),
        "texts": rows.texts,
        "inputs": rows.inputs,
        "colours": colours,
        "filters": contents.filters_of(rows, colours),
        "classes": contents.classes_of(findings, names),
        "suspects": contents.suspects_of(findings, rows),
        "tests": contents.tests_of(rows, neighbours, names),
        "testsPictured": sheet is not None and sheet.n > len(rows.index),
        "across": None if sheet is None else sheet.across,
        "charts": {"map": memory_chart(findings.memory, rows.index)},
    }


def _drawings(monitor: Monitor | None) -> dict[str, str]:
    """The picture of the training by name; empty without a monitor that has rows."""
    if monitor is None or not len(monitor.rows):
        return {}
    return {"training": as_uri(plot_monitor(monitor))}


def _template() -> Template:
    """The page's template, which refuses names that it is not given."""
    environment = Environment(
        loader=PackageLoader("blr_analysis.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html.jinja")


def question(findings: Findings) -> str:
    """A sentence on the questions that this page answers."""
    size = sum(p.numel() for p in findings.posterior.mean.values())
    model = f"{type(findings.task.model).__name__}, {size:,} parameters"
    groups = ""
    if findings.removals is not None:
        groups = f", which {findings.noun} helps or hurts"
    return f"Which rows look wrong{groups}, and how well this model ({model}) will do on new data."


def policy(*scripts: str) -> str:
    """A Content-Security-Policy: these scripts, this file's style and pictures, nothing else."""
    sources = []
    for script in scripts:
        digest = hashlib.sha256(script.encode()).digest()
        sources.append(f"'sha256-{base64.b64encode(digest).decode()}'")
    allowed = " ".join(sources)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    """A file of the package, as text."""
    return files("blr_analysis.report").joinpath(name).read_text("utf-8")


def _harmless(data: Any) -> str:
    """JSON that no HTML parser takes for markup."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text

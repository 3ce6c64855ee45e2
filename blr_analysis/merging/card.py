"""What is saved beside a merged model: its card, the recipe as run, and the report.

Everything that comes from users (paths, names of tensors, recipes) is escaped, and folders are
called by their last name or by their name on the hub, so that no path of this machine is
published with the model.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from blr_analysis.checks import package_version, printable
from blr_analysis.merging.folders import MergeReport
from blr_analysis.merging.items import AVERAGED, COPIED
from blr_analysis.merging.job import Job
from blr_analysis.merging.lora import is_place

CARD, RECIPE = "README.md", "merge_recipe.yml"
REPORT = "merge_report.csv"
AS_RUN = "# As run by blr_analysis {version}; relative paths start at the folder of the recipe.\n"
SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#|~&])")


def documents(report: MergeReport, recipe: str) -> dict[str, str]:
    """The texts to be saved beside the weights, by file name; ``recipe``: its text."""
    run = AS_RUN.format(version=package_version()) + recipe
    return {CARD: model_card(report, recipe), REPORT: report_csv(report), RECIPE: run}


def model_card(report: MergeReport, recipe: str) -> str:
    """A Hugging Face model card: front matter, what was merged and how, and what came of it."""
    job, plan = report.plan.job, report.plan
    lines = [
        f"# {markdown(os.path.basename(os.path.abspath(report.folder)))}",
        "",
        f"A merge of {_count(len(job.members), 'fine-tuned model')} by "
        f"`{plan.method.name}`: `{plan.method.formula}`, made with blr_analysis "
        f"{package_version()}. The licences of the models that were merged hold for it.",
        "",
        "| model | weight | precision |",
        "| --- | --- | --- |",
    ]
    for member, part in zip(job.members, plan.parts, strict=True):
        p = part.precision
        about = [] if p is None else [shown(member.precision), p.structure, p.kind]
        words = markdown(", ".join(filter(None, about)))
        weight = _line(repr(member.weight)).replace("|", "/")
        lines.append(f"| {markdown(shown(member.model))} | `{weight}` | {words} |")
    if job.base is not None:
        lines += ["", f"The base is {markdown(shown(job.base))}."]
    lines += ["", "## What came of it", "", *(f"* {text}" for text in outcome(report)), ""]
    lines += [f"The fate of every tensor is in `{REPORT}`."]
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", recipe)), default=0))
    lines += ["", "## Recipe", "", f"{fence}yaml", recipe.rstrip("\n"), fence]
    return "\n".join([*_front_matter(job, plan.method.name), "", *lines]) + "\n"


def outcome(report: MergeReport) -> list[str]:
    """What a merge did, a sentence each."""
    plan = report.plan
    entries = sum(item.spec.numel for item in plan.items)
    moved = plan.bytes_read + plan.bytes_written
    copied = sum(item.fate == COPIED for item in plan.items)
    said = [
        f"{_count(len(plan.items) - copied, 'tensor')} merged, {copied:,} copied (the same in all "
        f"models); {entries:,} numbers",
        f"{size(plan.bytes_read)} read, {size(plan.bytes_written)} written in "
        f"{report.seconds:.1f} s, {size(moved / max(report.seconds, 1e-9))}/s",
    ]
    if averaged := sum(item.fate == AVERAGED for item in plan.items):
        said.append(f"{averaged:,} of the merged are running statistics, averaged by any method")
    if report.solves:
        worst = max(solved.residual for solved in report.solves.values())
        most = max(solved.iterations for solved in report.solves.values())
        few = any(plan.family(key)[0] is None for key in report.solves)
        said.append(
            f"{_count(len(report.solves), 'layer')} merged as one matrix: residual {worst:.1g} at "
            f"most, after {most} iterations at most{', shrink as measured' if few else ''}"
        )
    if plan.method.uses_precisions and (total := report.fallback_total):
        said.append(
            f"{total:,} numbers in {_count(len(report.fallback), 'tensor')} had no positive "
            "precision to weigh by, and were merged by task arithmetic"
        )
    return said


def report_csv(report: MergeReport) -> str:
    """One row per tensor of the result, in the order of reading."""
    text, plan = io.StringIO(), report.plan
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["tensor", "fate", "shape", "dtype", "bytes", "weights", "precisions", "fallback", "note"]
    )
    for item in plan.items:
        shape, weights = "x".join(map(str, item.spec.shape)), (f"{a:.9g}" for a in item.weights)
        curved = item.curved if plan.method.uses_precisions else ()
        writer.writerow([
            item.name, item.fate, shape, str(item.spec.dtype)[6:], item.spec.nbytes,
            " ".join(weights), " ".join(curved), report.fallback.get(item.name, 0),
            public(item.note, plan.job),
        ])  # fmt: skip
    return text.getvalue()


def hub_name(place: Path) -> str | None:
    """The name on the Hugging Face hub of a folder in its cache; None for any other.

    >>> hub_name(Path("/cache/hub/models--org--model/snapshots/0a1b"))
    'org/model'
    """
    match place.parts:
        case [*_, kept, "snapshots", _] if kept.startswith("models--"):
            return kept.removeprefix("models--").replace("--", "/")
    return None


def shown(given: Any) -> str:
    """A folder as others may know it: its name on the hub, else its own last name.

    >>> shown(Path("/home/me/models/ft1")), shown(Path("/home/me/models/ft1/precision"))
    ('ft1', 'ft1/precision')
    """
    if not is_place(given):
        return type(given).__name__
    full = Path(os.path.abspath(given))
    named = hub_name(full) or full.name
    return f"{shown(full.parent)}/{full.name}" if full.name == "precision" else named


def size(count: float) -> str:
    """Bytes as one reads them.

    >>> size(512), size(1_234_567), size(5e9)
    ('512 B', '1.23 MB', '5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line.

    >>> markdown("a|b <script>")
    'a\\\\|b \\\\<script\\\\>'
    """
    return SPECIAL.sub(r"\\\1", _line(text))


def _front_matter(job: Job, method: str) -> list[str]:
    """Only names on the hub are listed as base models: it refuses a card with any other."""
    places = [job.base, *(member.model for member in job.members)]
    names = [hub_name(Path(os.path.abspath(p))) for p in places if is_place(p)]
    known = [f"- {json.dumps(_line(n))}" for n in dict.fromkeys(names) if n is not None]
    return [
        "---",
        *(["base_model:", *known, "base_model_relation: merge"] if known else []),
        "library_name: transformers",
        "tags:",
        *(f"- {tag}" for tag in ("merge", "blr_analysis", method)),
        "---",
    ]


def _line(text: str) -> str:
    """One line; what cannot be printed becomes a question mark."""
    return printable(" ".join(text.split()))


def public(text: str, job: Job) -> str:
    """The folders in a text by the names that others may know."""
    places = [m.model for m in job.members if is_place(m.model)]
    for place in sorted(places, key=lambda p: -len(str(p))):
        text = text.replace(str(place), shown(place))
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

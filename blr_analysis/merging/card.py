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
from blr_analysis.merging.job import Job
from blr_analysis.merging.merge_plan import AVERAGED, COPIED
from blr_analysis.merging.sources import is_place

CARD = "README.md"
RECIPE = "merge_recipe.yml"
REPORT = "merge_report.csv"
AS_RUN = "# As run by blr_analysis {version}; relative paths start at the folder of the recipe.\n"
SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#|~&])")


def documents(report: MergeReport, recipe: str) -> dict[str, str]:
    """The texts to be saved beside the weights, by file name; ``recipe``: its text."""
    run = AS_RUN.format(version=package_version()) + recipe
    return {CARD: model_card(report, recipe), REPORT: report_csv(report), RECIPE: run}


def model_card(report: MergeReport, recipe: str) -> str:
    """A Hugging Face model card: front matter, what was merged and how, and what came of it."""
    plan = report.plan
    job = plan.job
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
    for member, model in zip(job.members, plan.models, strict=True):
        facts = []
        if model.precision is not None:
            facts = [shown(member.precision), model.precision.structure, model.precision.kind]
        precision = markdown(", ".join(fact for fact in facts if fact))
        weight = _line(repr(member.weight)).replace("|", "/")
        lines.append(f"| {markdown(shown(member.model))} | `{weight}` | {precision} |")
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
    numbers = sum(tensor.spec.numel for tensor in plan.tensors)
    moved = plan.bytes_read + plan.bytes_written
    copied = sum(tensor.fate == COPIED for tensor in plan.tensors)
    averaged = sum(tensor.fate == AVERAGED for tensor in plan.tensors)
    sentences = [
        f"{_count(len(plan.tensors) - copied, 'tensor')} merged, {copied:,} copied (the same in "
        f"all models); {numbers:,} numbers",
        f"{size(plan.bytes_read)} read, {size(plan.bytes_written)} written in "
        f"{report.seconds:.1f} s, {size(moved / max(report.seconds, 1e-9))}/s",
    ]
    if averaged:
        sentences.append(
            f"{averaged:,} of the merged are running statistics, averaged by any method"
        )
    if report.solves:
        sentences.append(_solves(report))
    if plan.method.uses_precisions and report.fallback_total:
        sentences.append(
            f"{report.fallback_total:,} numbers in {_count(len(report.fallback), 'tensor')} had no "
            "positive precision to weigh by, and were merged by task arithmetic"
        )
    return sentences


def _solves(report: MergeReport) -> str:
    """How well the layers' equations were solved."""
    residual = max(solution.residual for solution in report.solves.values())
    iterations = max(solution.iterations for solution in report.solves.values())
    sentence = (
        f"{_count(len(report.solves), 'layer')} merged as one matrix: residual {residual:.1g} at "
        f"most, after {iterations} iterations at most"
    )
    shrinks = [report.plan.factor_settings(layer)[0] for layer in report.solves]
    return f"{sentence}, shrink as measured" if None in shrinks else sentence


def report_csv(report: MergeReport) -> str:
    """One row per tensor of the result, in the order of reading."""
    text = io.StringIO()
    plan = report.plan
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["tensor", "fate", "shape", "dtype", "bytes", "weights", "precisions", "fallback", "note"]
    )
    for tensor in plan.tensors:
        precisions = " ".join(tensor.precisions) if plan.method.uses_precisions else ""
        writer.writerow(
            [
                tensor.name,
                tensor.fate,
                "x".join(map(str, tensor.spec.shape)),
                str(tensor.spec.dtype).removeprefix("torch."),
                tensor.spec.nbytes,
                " ".join(f"{weight:.9g}" for weight in tensor.weights),
                precisions,
                report.fallback.get(tensor.name, 0),
                public(tensor.note, plan.job),
            ]
        )
    return text.getvalue()


def hub_name(place: Path) -> str | None:
    """The name on the Hugging Face hub of a folder in its cache; None for any other.

    >>> hub_name(Path("/cache/hub/models--org--model/snapshots/0a1b"))
    'org/model'
    """
    match place.parts:
        case [*_, repository, "snapshots", _] if repository.startswith("models--"):
            return repository.removeprefix("models--").replace("--", "/")
    return None


def shown(place: Any) -> str:
    """A folder as others may know it: its name on the hub, else its own last name.

    >>> shown(Path("/home/me/models/ft1")), shown(Path("/home/me/models/ft1/precision"))
    ('ft1', 'ft1/precision')
    """
    if not is_place(place):
        return type(place).__name__
    path = Path(os.path.abspath(place))
    if path.name == "precision":
        return f"{shown(path.parent)}/{path.name}"
    return hub_name(path) or path.name


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
    names = [hub_name(Path(os.path.abspath(place))) for place in places if is_place(place)]
    on_hub = [name for name in dict.fromkeys(names) if name is not None]
    lines = ["---"]
    if on_hub:
        lines += ["base_model:", *(f"- {json.dumps(_line(name))}" for name in on_hub)]
        lines += ["base_model_relation: merge"]
    lines += ["library_name: transformers", "tags:"]
    lines += [f"- {tag}" for tag in ("merge", "blr_analysis", method)]
    return [*lines, "---"]


def _line(text: str) -> str:
    """One line; what cannot be printed becomes a question mark."""
    return printable(" ".join(text.split()))


def public(text: str, job: Job) -> str:
    """The folders in a text by the names that others may know."""
    places = [member.model for member in job.members if is_place(member.model)]
    for place in sorted(places, key=lambda place: -len(str(place))):
        text = text.replace(str(place), shown(place))
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

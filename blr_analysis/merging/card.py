"""The documents beside a merged model: its card, the recipe as run, and the report.

Texts of users (paths, names of tensors, recipes) are escaped. Folders are named by their last part,
or by their name on the hub, so that no path of this machine is published with the model.
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
from blr_analysis.merging.job import Job, Member
from blr_analysis.merging.merge_plan import AVERAGED, COPIED, POORLY_SAMPLED, OpenModel
from blr_analysis.merging.sources import is_place

CARD = "README.md"
RECIPE = "merge_recipe.yml"
REPORT = "merge_report.csv"
AS_RUN = "# As run by blr_analysis {version}; relative paths start at the folder of the recipe.\n"
MARKDOWN_CHARACTERS = re.compile(r"([\\`*_{}\[\]<>()#|~&])")


def documents(report: MergeReport, recipe: str) -> dict[str, str]:
    """The texts to be saved beside the weights, by file name.

    Args:
        recipe: the text of the recipe.
    """
    recipe_as_run = AS_RUN.format(version=package_version()) + recipe
    return {CARD: model_card(report, recipe), REPORT: report_csv(report), RECIPE: recipe_as_run}


def model_card(report: MergeReport, recipe: str) -> str:
    """A Hugging Face model card: front matter, the models and the method, and the outcome."""
    plan = report.plan
    job = plan.job
    folder_name = os.path.basename(os.path.abspath(report.folder))
    lines = [
        *_front_matter(job, plan.method.name),
        "",
        f"# {markdown(folder_name)}",
        "",
        f"A merge of {_count(len(job.members), 'fine-tuned model')} by "
        f"`{plan.method.name}`: `{plan.method.formula}`, made with blr_analysis "
        f"{package_version()}. The licences of the models that were merged hold for it.",
        "",
        "| model | weight | precision |",
        "| --- | --- | --- |",
    ]
    for member, model in zip(job.members, plan.models, strict=True):
        weight = _line(repr(member.weight)).replace("|", "/")  # "|" would end the cell
        precision = _precision_in_words(member, model)
        lines.append(f"| {markdown(shown(member.model))} | `{weight}` | {precision} |")
    if job.base is not None:
        lines += ["", f"The base is {markdown(shown(job.base))}."]
    lines += ["", "## What came of it", ""]
    lines += [f"* {sentence}" for sentence in outcome(report)]
    lines += ["", f"The fate of every tensor is in `{REPORT}`."]
    lines += ["", "## Recipe", "", *_fenced(recipe)]
    return "\n".join(lines) + "\n"


def _precision_in_words(member: Member, model: OpenModel) -> str:
    """The place, structure and kind of a model's precision; "" where it has none."""
    if model.precision is None:
        return ""
    facts = [shown(member.precision), model.precision.structure, model.precision.kind]
    return markdown(", ".join(fact for fact in facts if fact))


def _fenced(recipe: str) -> list[str]:
    """The recipe as a block of code, between fences longer than any run of backticks in it."""
    runs = re.findall("`+", recipe)
    longest_run = max(map(len, runs), default=0)
    fence = "`" * max(3, longest_run + 1)
    return [f"{fence}yaml", recipe.rstrip("\n"), fence]


def outcome(report: MergeReport) -> list[str]:
    """The outcome of a merge in sentences: what was merged, copied, read and written."""
    plan = report.plan
    n_numbers = sum(tensor.spec.numel for tensor in plan.tensors)
    n_copied = sum(tensor.fate == COPIED for tensor in plan.tensors)
    n_averaged = sum(
        tensor.fate == AVERAGED and tensor.note != POORLY_SAMPLED for tensor in plan.tensors
    )
    seconds = max(report.seconds, 1e-9)  # a clock may be too coarse for a small merge
    bytes_per_second = (plan.bytes_read + plan.bytes_written) / seconds
    sentences = [
        f"{_count(len(plan.tensors) - n_copied, 'tensor')} merged, {n_copied:,} copied (the same "
        f"in all models); {n_numbers:,} numbers",
        f"{size(plan.bytes_read)} read, {size(plan.bytes_written)} written in "
        f"{report.seconds:.1f} s, {size(bytes_per_second)}/s",
    ]
    if n_averaged:
        sentences.append(
            f"{n_averaged:,} of the merged are running statistics, averaged by any method"
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
    how = f"after {iterations} iterations at most" if iterations else "solved directly"
    sentence = (
        f"{_count(len(report.solves), 'layer')} merged as one matrix, each by a linear equation: "
        f"relative residual {residual:.1g} at most, {how}"
    )
    for layer in report.solves:
        shrink, _power, _damping = report.plan.factor_settings(layer)
        if shrink is None:
            return f"{sentence}, shrink as measured"
    return sentence


def report_csv(report: MergeReport) -> str:
    """A CSV table with a row for each tensor of the result, in the order of reading."""
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
    """The name of a folder that may be published: its name on the hub, else its last name.

    A module or a state dict is called by its type.

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
    """A number of bytes in the unit that people read best.

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
    return MARKDOWN_CHARACTERS.sub(r"\\\1", _line(text))


def _front_matter(job: Job, method: str) -> list[str]:
    """The lines of YAML with which the hub expects a card to begin.

    The base models are those with a name on the hub; the hub refuses a card with any other.
    """
    places = [job.base, *(member.model for member in job.members)]
    names = [hub_name(Path(os.path.abspath(place))) for place in places if is_place(place)]
    on_hub = [name for name in dict.fromkeys(names) if name is not None]
    lines = ["---"]
    if on_hub:
        lines += ["base_model:", *(f"- {json.dumps(_line(name))}" for name in on_hub)]
        lines += ["base_model_relation: merge"]
    lines += ["library_name: transformers", "tags:"]
    lines += [f"- {tag}" for tag in ("merge", "blr_analysis", method)]
    lines += ["---"]
    return lines


def _line(text: str) -> str:
    """One line; what cannot be printed becomes a question mark."""
    return printable(" ".join(text.split()))


def public(text: str, job: Job) -> str:
    """The text with the models' folders replaced by names that may be published."""
    places = [member.model for member in job.members if is_place(member.model)]
    # The longest first: the path of one folder may begin the path of another.
    for place in sorted(places, key=lambda place: -len(str(place))):
        text = text.replace(str(place), shown(place))
    return text


def _count(number: int, noun: str) -> str:
    ending = "" if number == 1 else "s"
    return f"{number:,} {noun}{ending}"

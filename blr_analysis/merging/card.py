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
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr_analysis.checks import package_version, printable, some
from blr_analysis.merging.fates import AVERAGED
from blr_analysis.merging.recipe.places import hub_name
from blr_analysis.merging.stream import WORSE

if TYPE_CHECKING:
    from blr_analysis.merging.folders import MergeReport
    from blr_analysis.merging.job import Job
    from blr_analysis.merging.plan import MergePlan
    from blr_analysis.merging.recipe import Recipe

CARD, RECIPE = "README.md", "merge_recipe.yml"
REPORT_CSV, REPORT_JSON = "merge_report.csv", "merge_report.json"
AS_RUN = "# As run by blr_analysis {version}; relative paths start at the folder of the recipe.\n"
BALANCED = ": `auto` balances them"
BETTER = ": take the average, smaller weights or `auto`"
SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#|~&])")


def documents(report: MergeReport, recipe: Recipe | None = None) -> dict[str, str]:
    """The texts to be saved beside the weights, by file name."""
    texts = {
        CARD: model_card(report, None if recipe is None else recipe.text),
        REPORT_CSV: report_csv(report),
        REPORT_JSON: report_json(report),
    }
    if recipe is not None:
        texts[RECIPE] = AS_RUN.format(version=package_version()) + recipe.text
    return texts


def model_card(report: MergeReport, recipe: str | None = None) -> str:
    """A Hugging Face model card: front matter, what was merged and how, and what came of it."""
    job, plan = report.plan.job, report.plan
    title = markdown(os.path.basename(os.path.abspath(report.folder)))
    rows = [
        [
            markdown(shown(member.model)),
            f"`{markdown_code(repr(member.weight))}`",
            markdown(named if member.data is None else f"of {member.data.name}, on the way"),
        ]
        for member, named in zip(
            job.members, precision_names(report.plan, described=True), strict=True
        )
    ]
    uses = plan.method.uses_precisions
    head = ["model", "weight", "precision"] if uses else ["model", "weight"]
    lines = [
        f"# {title}",
        "",
        f"A merge of {_count(len(job.members), 'fine-tuned model')} by "
        f"`{plan.method.name}`: `{plan.method.formula}`, made with blr_analysis "
        f"{package_version()}. The licences of the models that were merged hold for it.",
        "",
        *_table(head, [row[: len(head)] for row in rows]),
        "",
        *_settings(report),
        "",
        "## What came of it",
        "",
        *(f"* {text}" for text in outcome(report)),
        "",
        f"The fate of every tensor is in `{REPORT_CSV}`, the figures are in `{REPORT_JSON}`.",
    ]
    if recipe is not None:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", recipe)), default=0))
        lines += ["", "## Recipe", "", f"{fence}yaml", recipe.rstrip("\n"), fence]
    return "\n".join([*_front_matter(job, plan.method.name, plan.library), "", *lines]) + "\n"


def outcome(report: MergeReport) -> list[str]:
    """What a merge did, a sentence each."""
    plan = report.plan
    entries = sum(item.spec.numel for item in plan.items)
    moved = report.bytes_read + report.bytes_written
    said = [
        f"{_count(report.merged, 'tensor')} merged, {report.copied:,} copied (the same in all "
        f"models); {entries:,} numbers",
        f"{size(report.bytes_read)} read, {size(report.bytes_written)} written in "
        f"{report.seconds:.1f} s, {moved / max(report.seconds, 1e-9) / 1e9:.3g} GB/s",
    ]
    if averaged := sum(item.fate == AVERAGED for item in plan.items):
        said.append(f"{averaged:,} of the merged are running statistics, averaged by any method")
    if report.solves:
        few = [k for k in report.solves if plan.family(k)[0] is None]
        least = min((p.measured(k) for p in plan.used for k in few), default=1.0)
        shrink, power = plan.settings.shrink, plan.settings.power
        shrunk = (
            f"as measured, from {least:.4g}" if few else f"{1.0 if shrink is None else shrink:g}"
        )
        worst = max(solved.residual for solved in report.solves.values())
        most = max(solved.iterations for solved in report.solves.values())
        said.append(
            f"{_count(len(report.solves), 'layer')} merged as one matrix (shrink {shrunk}, "
            f"power {power:g}): residual {worst:.1g} at most, after {most} iterations at most"
        )
        if tables := {k for p in plan.held for k in p.tables} & set(report.solves):
            said.append(f"{some(sorted(tables))}: tied, and weighed by its use as a head alone")
    if plan.settings.power != 1 and any(not p.layers for p in plan.held):
        said.append(f"numbers of diagonal precisions to the power {plan.settings.power:g}")
    if plain_fisher(plan):
        said.append(
            "a Fisher average by diagonals, as they are, can end below the plain average: their "
            "roots (power 0.5) or `auto` did so least"
        )
    if report.gap_ratios:
        mean = sum(report.gap_ratios) / len(report.gap_ratios)
        said.append(
            f"by their precisions the models lose {mean:.2g} times what they lose in the plain "
            f"average (from {min(report.gap_ratios):.2g} to {max(report.gap_ratios):.2g})"
            + (BETTER if mean > WORSE else BALANCED if max(report.gap_ratios) > WORSE else "")
        )
    if plan.method.uses_precisions and (total := report.fallback_total):
        share = f" ({total / entries:.2g} of all)" if entries else ""
        said.append(
            f"{total:,} numbers{share} in {_count(len(report.fallback), 'tensor')} had no positive "
            "precision to weigh by, and were merged by task arithmetic"
        )
    return said + report.remarks


def plain_fisher(plan: MergePlan) -> bool:
    """Whether diagonals alone, neither raised nor beside a base's precision, decide."""
    curved = plan.method.name in ("fisher", "gradient_matching") and bool(plan.used)
    own = plan.base_precision is not None or plan.delta or plan.settings.power != 1
    return curved and not own and not plan.layers


def report_rows(report: MergeReport) -> list[dict[str, Any]]:
    """One row per tensor of the result, in the order of reading."""
    return [
        {
            "tensor": item.name,
            "fate": item.fate,
            "shape": "x".join(map(str, item.spec.shape)),
            "dtype": _dtype(item.spec.dtype),
            "bytes": report.plan.bytes_for(item),
            "weights": " ".join(f"{weight:.9g}" for weight in item.weights),
            "precisions": " ".join(item.curved if report.plan.method.uses_precisions else ()),
            "fallback": report.fallback.get(item.name, 0),
            "note": _public(item.note, report),
        }
        for item in report.plan.items
    ]


def report_csv(report: MergeReport) -> str:
    """:func:`report_rows` as CSV."""
    rows, text = report_rows(report), io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def report_json(report: MergeReport) -> str:
    """The figures of a merge, its settings and the fate of its files."""
    job, plan = report.plan.job, report.plan
    figures = {
        "blr_analysis": package_version(),
        "method": plan.method.name,
        "formula": plan.method.formula,
        "base": None if job.base is None else shown(job.base),
        "base_precision": None if job.base_precision is None else shown(job.base_precision),
        "models": [
            {
                "model": shown(member.model),
                "weight": repr(member.weight) if callable(member.weight) else member.weight,
                "precision": named or None,
                "n_data": member.n_data,
                "density": repr(member.density) if callable(member.density) else member.density,
                **({} if member.data is None else {"data": member.data.name}),
            }
            for member, named in zip(
                job.members, precision_names(plan, described=False), strict=True
            )
        ],
        "delta": plan.delta,
        "shrink": job.shrink,
        "power": float(job.power),
        "damping": job.damping,
        "layers": {name: asdict(solved) for name, solved in report.solves.items()},
        "lambda": repr(job.scale) if callable(job.scale) else job.scale,
        "seed": job.seed,
        "rescale": job.rescale,
        "missing_precision": job.missing_precision,
        "normalize": job.divides,
        "dtype": _dtype(plan.dtype),
        "out_dtype": None if job.out_dtype is None else _dtype(job.out_dtype),
        "tensors_merged": report.merged,
        "tensors_copied": report.copied,
        "entries": sum(item.spec.numel for item in plan.items),
        "entries_by_task_arithmetic": report.fallback_total,
        "bytes_read": report.bytes_read,
        "bytes_written": report.bytes_written,
        "seconds": report.seconds,
        "shards": list(report.shards),
        "files": {name: fate.partition(" from ")[0] for name, fate in report.files.items()},
    }
    return json.dumps(figures, indent=2, ensure_ascii=False) + "\n"


def precision_names(plan: MergePlan, *, described: bool) -> list[str]:
    """Each model's precision as others may know it, those of one name by the folder above too;
    ``described``: with its structure, kind, and the start of its model's fingerprint."""
    places = [m.precision for m in plan.job.members]
    short = ["" if p is None else shown(p) for p in places]
    named = []
    for place, name, part in zip(places, short, plan.parts, strict=True):
        twins = {os.path.abspath(p) for p, n in zip(places, short, strict=True) if p and n == name}
        if place is not None and len(twins) > 1:
            name = f"{Path(os.path.abspath(place)).parent.name}/{name}"
        own = part.precision
        about = [] if own is None else [own.structure, own.kind]
        about += [own.sha256[0][:8]] if own is not None and own.sha256 is not None else []
        words = ", ".join(dict.fromkeys(filter(None, about)))
        named.append(f"{name}: {words}" if name and words and described else name)
    return named


def shown(place: Path) -> str:
    """A folder as others may know it: its name on the hub, else its own last name.

    >>> shown(Path("/home/me/models/ft1")), shown(Path("/home/me/models/ft1/precision"))
    ('ft1', 'ft1/precision')
    """
    named = hub_name(place)
    if named is not None:
        return named
    full = Path(os.path.abspath(place))
    return f"{shown(full.parent)}/{full.name}" if full.name == "precision" else full.name


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


def markdown_code(text: str) -> str:
    """Text for a table's cell between backticks."""
    return _line(text).replace("`", "'").replace("|", "\\|")


def _front_matter(job: Job, method: str, library: str) -> list[str]:
    """Only names on the hub are listed as base models: it refuses a card with any other."""
    models = ([] if job.base is None else [job.base], [member.model for member in job.members])
    names = [hub_name(place) for group in models for place in group]
    known = list(dict.fromkeys(name for name in names if name is not None))
    listed = ["base_model:", *(f"- {_quoted(name)}" for name in known)]
    relation = ["base_model_relation: merge"]
    return [
        "---",
        *([*listed, *relation] if known else []),
        f"library_name: {library}",
        "tags:",
        *(f"- {_quoted(tag)}" for tag in ("merge", "blr_analysis", method)),
        "---",
    ]


def _settings(report: MergeReport) -> Iterable[str]:
    job, plan = report.plan.job, report.plan
    if job.base is not None:
        yield f"* base: {markdown(shown(job.base))}"
    if plan.method.uses_base_precision:
        prior = "none" if job.base_precision is None else markdown(shown(job.base_precision))
        yield f"* precision of the base: {prior}, plus δ = {plan.delta:g}"
    if plan.method.thinned:
        shares = ", ".join(repr(member.density) for member in job.members)
        yield f"* densities: `{markdown_code(shares)}`, λ = `{markdown_code(repr(job.scale))}`"
    elif job.scale != 1:
        yield f"* λ = `{markdown_code(repr(job.scale))}`"
    if plan.method.thinned == "chance":
        divided = "" if job.rescale else ", not divided by its share"
        yield f"* what stays was drawn with seed {job.seed}{divided}"
    if plan.method.uses_precisions:
        yield f"* missing precisions: {job.missing_precision}"
    yield f"* weights divided by their sum: {'yes' if job.divides else 'no'}"
    written = "as in the base" if job.out_dtype is None else _dtype(job.out_dtype)
    yield f"* computed in {_dtype(plan.dtype)}, written in {written}"


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def _quoted(text: str) -> str:
    return json.dumps(_line(text), ensure_ascii=False)


def _line(text: str) -> str:
    """One line; what cannot be printed becomes a question mark."""
    return printable(" ".join(text.split()))


def _public(text: str, report: MergeReport) -> str:
    """The folders in a text by the names that others may know."""
    places = [member.model for member in report.plan.job.members]
    for place in sorted(places, key=lambda p: -len(str(p))):
        text = text.replace(str(place), shown(place))
    return text


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

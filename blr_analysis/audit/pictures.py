"""The files of an audit: tables, posterior, texts, and pictures by :mod:`blr_analysis.plots`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from blr_analysis import plots
from blr_analysis.audit.findings import Findings
from blr_analysis.files import drafted
from blr_analysis.plots._canvas import name_of, whole_figure
from blr_analysis.tables import write_table
from blr_analysis.task import Task

MOST_CLASSES = 20  # beside one another in the leave-one-out picture
GRID = 24
# What only some audits find, by its files.
SOMETIMES = ["leave_one_out.png", "suspicious.png"]
SOMETIMES += [f"removals.{suffix}" for suffix in ("csv", "parquet", "png")]


def pictures(findings: Findings) -> Iterator[tuple[str, Axes]]:
    """Each picture that the findings allow, as (file stem, its axes)."""
    images, labels = images_of(findings.task), verdicts(findings)
    yield "memory_map", plots.plot_memory_map(findings.memory, images=images, labels=labels)
    yield "deviations", plots.plot_deviations(findings.scores, labels=labels)
    if findings.on_test is not None:
        yield "leave_one_out", _against_test(findings)
    worst = findings.suspects["index"].tolist()[:GRID]
    if images is not None and worst:
        kinds = findings.table["kind"]
        titles = [f"#{i} {kinds[i]}\n{labels[i]}" for i in worst]
        title = "Suspicious: wrong labels, strangers, duplicates"
        yield "suspicious", plots.plot_examples(images, worst, titles, title=title)
    if findings.removals is not None:
        yield "removals", plots.plot_what_if(findings.removals)


def verdicts(findings: Findings) -> Mapping[int, str]:
    """What stands beside an example's index in a picture: "3", or "3 or 8?" where its label is
    suspected; the second is the best other one."""
    table = findings.suspicions.table.sort_values("index")
    if "target" not in table:
        return {int(i): "" for i in table["index"]}
    labels = table["target"].map(name_of).tolist()
    others = table["proposed"].map(name_of).tolist()
    doubts = (table["kind"] == "label") & table["proposed"].notna()
    told = zip(labels, others, doubts, strict=True)
    return {i: f"{y} or {z}?" if doubt else y for i, (y, z, doubt) in enumerate(told)}


def _against_test(findings: Findings) -> Axes:
    """The leave-one-out loss beside the test loss, of all data and of each of a few classes."""
    loo, on_test, there = findings.loo, findings.on_test, findings.test_targets
    assert on_test is not None and there is not None
    labels, ours, theirs = ["all"], [loo.nll], [on_test.nll]
    classifies = findings.task.likelihood.is_classification
    if classifies and loo.targets is not None and loo.targets.ndim == 1:
        classes = loo.targets.unique().tolist()
        for c in classes if len(classes) <= MOST_CLASSES else ():
            labels.append(name_of(c))
            ours.append(float(loo.losses[loo.targets == c].double().mean()))
            theirs.append(float(on_test.losses[there == c].double().mean()))
    return plots.plot_leave_one_out(ours, theirs, labels=labels)


def images_of(task: Task) -> Any:
    """The task's dataset where its inputs are images, [C, H, W] or [H, W, C]; else None."""
    item = task.dataset[0]
    x = item[0] if isinstance(item, tuple) and item else None
    if not isinstance(x, Tensor | np.ndarray) or x.ndim != 3:
        return None
    first, *_, last = x.shape
    sides = x.shape[1:] if first in (1, 3, 4) else x.shape[:2]
    return task.dataset if (first in (1, 3, 4) or last in (1, 3, 4)) and min(sides) >= 4 else None


def write(
    findings: Findings, folder: Path, *, say: Callable[[str], None] | None = None
) -> list[Path]:
    """Write tables, posterior and pictures; the paths come back in the order of reading. What an
    earlier audit wrote there, and this one did not find, is removed.

    Raises:
        StorageError: a file cannot be written; what was there before stays.
    """
    if say is not None:
        say(f"writing tables and pictures to {folder}")
    earlier = (folder / "table.parquet").is_file()
    files = [*write_table(findings.table, folder, "table")]
    files += write_table(findings.suspicions.table, folder, "suspicious")
    files += write_table(findings.loo.table, folder, "leave_one_out")
    if findings.removals is not None:
        files += write_table(findings.removals, folder, "removals")
    posterior = folder / "posterior.safetensors"
    findings.posterior.save(posterior)
    files.append(posterior)
    files += [write_picture(ax, folder, stem) for stem, ax in pictures(findings)]
    if earlier:
        for name in set(SOMETIMES) - {file.name for file in files}:
            (folder / name).unlink(missing_ok=True)
    return files


def write_picture(ax: Axes, folder: Path, stem: str) -> Path:
    """Write the figure of these axes as ``folder/stem.png``, whole or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    target = folder / f"{stem}.png"
    with drafted(target) as draft:
        whole_figure(ax).savefig(draft, dpi=150, format="png")
    return target


def write_text(text: str, folder: Path, name: str) -> Path:
    """Write a text file, whole or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    target = folder / name
    with drafted(target) as draft:
        draft.write_text(text, encoding="utf-8")
    return target

"""The files of an audit: tables, posterior, texts, and pictures by :mod:`blr_analysis.plots`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor

from blr_analysis.audit.findings import Findings, most_suspicious
from blr_analysis.backprop.loss import Evaluation
from blr_analysis.files import drafted
from blr_analysis.memory_map import MemoryMap
from blr_analysis.plots import (
    plot_deviations,
    plot_examples,
    plot_leave_one_out,
    plot_memory_map,
    plot_what_if,
)
from blr_analysis.sensitivity import LeaveOneOut, SequenceLeaveOneOut
from blr_analysis.tables import write_table
from blr_analysis.task import Task

MOST_CLASSES = 20  # beside one another in the leave-one-out picture
GRID = 24
# What only some audits find, by its files.
SOMETIMES = (
    *("removals.csv", "removals.parquet", "removals.png"),
    *("leave_one_out.png", "suspicious.png"),
)


def pictures(findings: Findings) -> Iterator[tuple[str, Figure]]:
    """Each picture that the findings allow, as (file stem, figure)."""
    images, labels = images_of(findings.task), verdicts(findings.table)
    yield "memory_map", figure_of(plot_memory_map(findings.memory, images=images, labels=labels))
    yield "deviations", figure_of(plot_deviations(findings.scores, labels=labels))
    if findings.on_test is not None and findings.test_targets is not None:
        yield "leave_one_out", loo_picture(findings.loo, findings.on_test, findings.test_targets)
    grid = None if images is None else suspicious_picture(findings.table, images)
    if grid is not None:
        yield "suspicious", grid
    if findings.removals is not None:
        yield "removals", figure_of(plot_what_if(findings.removals))


def figure_of(ax: Any) -> Figure:
    """The figure that a picture was drawn on."""
    return ax.figure


def verdicts(table: pd.DataFrame) -> Mapping[int, str]:
    """What stands beside an example's index in a picture: "3", or "3 not 8" where contradicted.

    The first is the label, the second what the model says without the example.
    """
    if "target" not in table or "suspicious" not in table:
        values = table["target"] if "target" in table else table["index"]
        return {int(i): f"{v:.3g}" for i, v in zip(table["index"], values, strict=True)}
    return {
        int(i): f"{label} or {other}?" if doubt else f"{label}"
        for i, label, other, doubt in zip(
            table["index"],
            table["target"].map(plain),
            table["left_out_prediction"].map(plain),
            table["suspicious"],
            strict=True,
        )
    }


def plain(value: Any) -> str:
    """A number as short as it can be: 3 for 3.0."""
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    return str(value)


def map_picture(memory: MemoryMap, task: Task) -> Figure:
    """A memory map by itself; extremes carry their label and, where it differs, the prediction."""
    table = memory.table
    labels = None
    if "target" in table:
        pairs = zip(table["target"].map(plain), table["prediction"].map(plain), strict=True)
        labels = [y if y == said else f"{y} or {said}?" for y, said in pairs]
    return figure_of(plot_memory_map(memory, images=images_of(task), labels=labels))


def loo_picture(
    loo: LeaveOneOut | SequenceLeaveOneOut, on_test: Evaluation, test_targets: Tensor
) -> Figure:
    """The leave-one-out loss beside the test loss, of all data and of each of a few classes."""
    labels, ours, theirs = ["all"], [loo.nll], [on_test.nll]
    targets = test_targets[:0] if isinstance(loo, SequenceLeaveOneOut) else loo.targets
    flat = targets.ndim == 1 or targets.shape[-1] == 1
    classes = targets.unique().tolist() if flat and loo.likelihood.is_classification else []
    if 2 <= len(classes) <= MOST_CLASSES:
        for c in classes:
            here, there = targets.flatten() == c, test_targets.flatten() == c
            labels.append(plain(c))
            ours.append(float(loo.losses[here].double().mean()))
            theirs.append(float(on_test.losses[there].double().mean()))
    ax = plot_leave_one_out(ours, theirs, labels=labels)
    ax.set_xlabel("all data, and each class" if len(labels) > 1 else "")
    return figure_of(ax)


def suspicious_picture(table: pd.DataFrame, images: Any) -> Figure | None:
    """The most suspicious examples as a grid of images; None where no label is contradicted."""
    worst = most_suspicious(table, GRID)["index"].tolist()
    if not worst:
        return None
    said = verdicts(table)
    titles = [f"#{i}\n{said[i]}" for i in worst]
    title = "Most suspicious: the label, or the model's answer without the example?"
    if "suspicious" not in table:
        title = "Most suspicious: worst predicted without the example"
    return figure_of(plot_examples(images, worst, titles, title=title))


def images_of(task: Task) -> Any:
    """The task's dataset where its inputs are images, [C, H, W] or [H, W, C]; else None."""
    item = task.dataset[0]
    x = item[0] if isinstance(item, tuple) and item else None
    if not isinstance(x, Tensor | np.ndarray) or x.ndim != 3:
        return None
    first, *_, last = x.shape
    sides = x.shape[1:] if first in (1, 3, 4) else x.shape[:2]
    return task.dataset if (first in (1, 3, 4) or last in (1, 3, 4)) and min(sides) >= 4 else None


if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    files += write_table(findings.loo.table, folder, "leave_one_out")
    if findings.removals is not None:
        files += write_table(findings.removals, folder, "removals")
    posterior = folder / "posterior.safetensors"
    findings.posterior.save(posterior)
    files.append(posterior)
    files += [write_picture(figure, folder, stem) for stem, figure in pictures(findings)]
    if earlier:
        for name in set(SOMETIMES) - {file.name for file in files}:
            (folder / name).unlink(missing_ok=True)
    return files


def write_picture(figure: Figure, folder: Path, stem: str) -> Path:
    """Write ``folder/stem.png``, whole or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    target = folder / f"{stem}.png"
    with drafted(target) as draft:
        figure.savefig(draft, dpi=150, format="png")
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

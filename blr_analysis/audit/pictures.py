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

MAX_CLASSES = 20  # beside one another in the leave-one-out picture
MAX_IMAGES = 24  # in the picture of suspects
MIN_SIDE = 4  # pixels of an image; smaller arrays of three dimensions are something else
CHANNELS = (1, 3, 4)  # grey, colour, colour and transparency
# Files that only some audits write.
OPTIONAL_FILES = {
    "leave_one_out.png",
    "suspicious.png",
    "removals.csv",
    "removals.parquet",
    "removals.png",
}


def pictures(findings: Findings) -> Iterator[tuple[str, Axes]]:
    """Each picture that the findings allow, as the stem of its file and its axes."""
    images = images_of(findings.task)
    labels = verdicts(findings)
    yield "memory_map", plots.plot_memory_map(findings.memory, images=images, labels=labels)
    yield "deviations", plots.plot_deviations(findings.scores, labels=labels)
    if findings.on_test is not None:
        yield "leave_one_out", _against_test(findings)
    worst = findings.suspects["index"].tolist()[:MAX_IMAGES]
    if images is not None and worst:
        kinds = findings.table["kind"]
        titles = [f"#{i} {kinds[i]}\n{labels[i]}" for i in worst]
        title = "Suspicious: wrong labels, strangers, duplicates"
        yield "suspicious", plots.plot_examples(images, worst, titles, title=title)
    if findings.removals is not None:
        yield "removals", plots.plot_what_if(findings.removals)


def verdicts(findings: Findings) -> Mapping[int, str]:
    """The text beside an example's index in a picture.

    It is the label ("3"), or "3 or 8?" where the label looks wrong and 8 fits best instead.
    """
    table = findings.suspicions.table.sort_values("index")
    if "target" not in table:
        return {int(i): "" for i in table["index"]}
    labels = table["target"].map(name_of).tolist()
    proposals = table["proposed"].map(name_of).tolist()
    doubts = (table["kind"] == "label") & table["proposed"].notna()
    verdict_of = {}
    for i, (label, proposal, doubt) in enumerate(zip(labels, proposals, doubts, strict=True)):
        verdict_of[i] = f"{label} or {proposal}?" if doubt else label
    return verdict_of


def _against_test(findings: Findings) -> Axes:
    """The leave-one-out loss beside the test loss, of all data and of each class."""
    loo = findings.loo
    on_test = findings.on_test
    test_targets = findings.test_targets
    assert on_test is not None and test_targets is not None
    classes = _classes(findings)
    loo_nll = [loo.nll]
    test_nll = [on_test.nll]
    for label in classes:
        loo_nll.append(float(loo.losses[loo.targets == label].double().mean()))
        test_nll.append(float(on_test.losses[test_targets == label].double().mean()))
    labels = ["all", *map(name_of, classes)]
    return plots.plot_leave_one_out(loo_nll, test_nll, labels=labels)


def _classes(findings: Findings) -> list[Any]:
    """The classes of the training targets; an empty list if they are too many for a picture."""
    targets = findings.loo.targets
    if not findings.task.likelihood.is_classification or targets is None or targets.ndim != 1:
        return []
    classes = targets.unique().tolist()
    if len(classes) > MAX_CLASSES:
        return []
    return classes


def images_of(task: Task) -> Any:
    """The task's dataset if its inputs are images, ``[C, H, W]`` or ``[H, W, C]``; else None."""
    example = task.dataset[0]
    if not isinstance(example, tuple) or not example:
        return None
    x = example[0]
    if not isinstance(x, Tensor | np.ndarray) or x.ndim != 3:
        return None
    if x.shape[0] in CHANNELS:
        sides = x.shape[1:]
    elif x.shape[-1] in CHANNELS:
        sides = x.shape[:2]
    else:
        return None
    return task.dataset if min(sides) >= MIN_SIDE else None


def write(
    findings: Findings, folder: Path, *, say: Callable[[str], None] | None = None
) -> list[Path]:
    """Write tables, posterior and pictures into a folder.

    Files of an earlier audit that this one does not write are removed.

    Returns:
        The paths, in the order of reading.

    Raises:
        StorageError: a file cannot be written; the earlier file stays.
    """
    if say is not None:
        say(f"writing tables and pictures to {folder}")
    replaces_audit = (folder / "table.parquet").is_file()
    files = [*write_table(findings.table, folder, "table")]
    files += write_table(findings.suspicions.table, folder, "suspicious")
    files += write_table(findings.loo.table, folder, "leave_one_out")
    if findings.removals is not None:
        files += write_table(findings.removals, folder, "removals")
    posterior = folder / "posterior.safetensors"
    findings.posterior.save(posterior)
    files.append(posterior)
    files += [write_picture(ax, folder, stem) for stem, ax in pictures(findings)]
    if replaces_audit:
        for name in OPTIONAL_FILES - {file.name for file in files}:
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

"""One self-contained page for colleagues who have nothing installed.

    blr.report(task, posterior, "report.html", test=test_task)

    Findings ─ contents ─► plain data ─┐
             ─ charts ───► Bokeh ──────┼─ page ─► one HTML file
             ─ thumbnails ► one sheet ─┘

Bokeh and Jinja are imported when a page is written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr_analysis.checks import path_of
from blr_analysis.errors import DataError
from blr_analysis.task import Task

if TYPE_CHECKING:
    from blr_analysis.sensitivity import Monitor

__all__ = ["report"]


def report(
    task: Task,
    posterior: Any = None,
    path: str | os.PathLike[str] = "report.html",
    *,
    test: Task | None = None,
    by: str | None = "auto",
    passes: int | None = None,
    images: Any = None,
    texts: Sequence[str] | None = None,
    monitor: Monitor | None = None,
    classes: Sequence[str] | None = None,
) -> Path:
    """Run every analysis of a task and write the results as one HTML file.

    The page needs only a browser, and no network. It has the rows that look wrong, to keep, relabel
    or drop; the groups, each left out; the training examples behind some test predictions; how far
    all this can be trusted; an interactive memory map; and every example as a row to sort, search
    and export. With thumbnails of 10,000 examples it takes less than 6 MB. It shows at most 10,000
    examples one by one.

    Args:
        task: the model and the data it was trained on; metadata become columns, and a column of
            sentences the examples' text.
        posterior: learned on those data.
        path: the file to write; an earlier file is replaced.
        test: further examples. The page says how well they are predicted, and shows the training
            examples behind some of these predictions.
        by, passes: which groups are taken out and how, as in ``blr_analysis.audit.investigate``.
        images: one image per training example, see :func:`blr_analysis.plots.image_of`; None: the
            task's own inputs if they are images.
        texts: one text per training example; None: a metadata column of sentences.
        monitor: a :class:`blr_analysis.Monitor` of the model's training.
        classes: the classes' names, in the order of the outputs; None: those of a Hugging Face
            model's configuration.

    Returns:
        The path.

    Raises:
        StorageError: the file cannot be written, or is a folder; this is checked before the
            analyses.
        InputError, DataError: as the analyses; images, texts or names of another number; no task (a
            fitted probabilistic model, say), or several posteriors.

    Example:
        >>> import tempfile, torch, blr_analysis as blr
        >>> X, y = torch.randn(40, 2), torch.randint(3, (40,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
        >>> q = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report(task, q, f"{folder}/report.html").stat().st_size < 2e6
        True
    """
    from blr_analysis.audit import check_auditable, investigate
    from blr_analysis.files.placing import check_file, held
    from blr_analysis.report.page import write_page

    check_auditable(task, posterior)
    target = Path(path_of(path)).expanduser()
    check_file(target)
    for name, values in (("images", images), ("texts", texts)):
        if isinstance(values, Sized) and len(values) != task.n_data:
            raise DataError(f"{len(values)} {name} for {task.n_data} examples: pass one for each")
    with held(target):
        findings = investigate(task, posterior, test=test, by=by, passes=passes)
        return write_page(
            findings, target, images=images, texts=texts, monitor=monitor, classes=classes
        )

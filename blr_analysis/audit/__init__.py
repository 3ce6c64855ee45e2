"""The audit of a model's data: everything that the analyses say, as one job.

    task + posterior ─ investigate ─► Findings ─ summary ─► what to print
                                               ─ write ───► a folder of tables and pictures

The command line and the demo are two ways to call it; from Python:

    >>> import torch, blr_analysis as blr
    >>> from blr_analysis.audit import investigate
    >>> X, y = torch.randn(40, 2), torch.randint(3, (40,))
    >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
    >>> posterior = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
    >>> findings = investigate(task, posterior)
    >>> len(findings.table), findings.by, len(findings.removals)
    (40, 'target', 3)
"""

from __future__ import annotations

from blr_analysis.audit.findings import (
    Findings,
    check_column,
    evaluated,
    investigate,
    most_influential,
    most_suspicious,
)
from blr_analysis.audit.pictures import write, write_picture, write_text
from blr_analysis.audit.summary import (
    extremes_section,
    files_section,
    loo_section,
    map_section,
    summary,
    trust_section,
    what_if_section,
)
from blr_analysis.files import folder_for

__all__ = [
    "Findings",
    "check_column",
    "evaluated",
    "extremes_section",
    "files_section",
    "folder_for",
    "investigate",
    "loo_section",
    "map_section",
    "most_influential",
    "most_suspicious",
    "summary",
    "trust_section",
    "what_if_section",
    "write",
    "write_picture",
    "write_text",
]

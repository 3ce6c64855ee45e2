"""The audit of a model's data: everything that the analyses say, as one job.

    task + posterior ─ investigate ─► Findings ─ sections ─► in_text ─► what to print
                                               ├ sections ─► the page
                                               └ write ────► a folder of tables and pictures

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

from blr_analysis.audit.findings import Findings, check_auditable, check_column, investigate
from blr_analysis.audit.pictures import write, write_picture, write_text
from blr_analysis.audit.sections import Section, sections
from blr_analysis.audit.text import in_text, list_of_files

__all__ = [
    "Findings",
    "Section",
    "check_auditable",
    "check_column",
    "in_text",
    "investigate",
    "list_of_files",
    "sections",
    "write",
    "write_picture",
    "write_text",
]

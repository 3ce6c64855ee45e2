"""``blr-analysis verify``: everything at a path, read whole and compared with its checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blr_analysis.cli.options import Shared, dry_run
from blr_analysis.terminal import pairs

SHOWN = 5  # files without a checksum that are named


def verify(
    *,
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A file, or a folder with all files below it."),
    ],
    shared: Shared,
) -> dict[str, Any]:
    """Check that the files at PATH are still what was saved, to the bit.

      blr-analysis verify posterior.safetensors
      blr-analysis verify INDEX
      blr-analysis verify RUN

    Posteriors, precisions, indexes, the checkpoints of a training and its record carry checksums.
    This command reads every file and compares them. It names a file that is damaged or missing,
    and the exit code is then 2. Files of other programs have no checksum and are only counted.

    --json prints whole, bytes, without_checksum.
    """
    from blr_analysis.checks import some
    from blr_analysis.files.verify import files_at
    from blr_analysis.files.verify import verify as verify_files

    if shared.dry_run:
        files = files_at(path)
        size = sum(file.stat().st_size for file in files)
        pairs({"reads": f"{len(files):,} files, {size / 2**20:,.1f} MiB"})
        return dry_run(files=len(files), bytes=size)
    report = verify_files(path, progress=shared.progress)
    rows = {"whole": f"{len(report.whole):,} files, {report.nbytes / 2**20:,.1f} MiB"}
    if report.unknown:
        names = some([file.name for file in report.unknown], SHOWN)
        rows["without a checksum"] = f"{len(report.unknown):,} files of other programs: {names}"
    pairs(rows)
    return {"whole": report.whole, "bytes": report.nbytes, "without_checksum": report.unknown}

"""Is what stands on the disk what the formula gives? The merge once more, against the files."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from tqdm import tqdm

from blr_analysis.errors import StorageError
from blr_analysis.files import Folder, Scratch, fingerprint
from blr_analysis.merging.merge import MergeReport
from blr_analysis.merging.stream import stream


class Compared:
    """A sink that writes nothing: every piece is compared, to the bit, with what was written."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._own = threading.local()

    def put(self, name: str, start: int, values: Tensor) -> None:
        if not hasattr(self._own, "scratch"):
            self._own.scratch = Scratch()
        stop = start + len(values)
        written = self._folder.read(name, start, stop, self._own.scratch)
        if not torch.equal(written.view(torch.uint8), values.contiguous().view(torch.uint8)):
            raise StorageError(
                f"{name!r} in {self._folder.name!r} is not what was merged: something changed it "
                "since. Remove the folder and merge again."
            )


@torch.inference_mode()
def verify(report: MergeReport, *, progress: bool | None = None) -> str:
    """Merge again, in memory, and compare every number with the files that were written.

    Returns:
        The fingerprint of the merged weights, the same for any number of shards.

    Raises:
        StorageError: a tensor is missing, of another shape or dtype, or holds another number.
    """
    written = Folder.open(report.folder)
    specs = {item.name: item.spec for item in report.plan.items}
    if dict(written.specs) != specs:
        odd = sorted(n for n in {*specs, *written.specs} if specs.get(n) != written.specs.get(n))
        raise StorageError(
            f"{str(report.folder)!r} does not hold the tensors of the merge: {odd[0]!r} is "
            "missing, new, or of another shape or dtype. Remove the folder and merge again."
        )
    total, off = report.plan.bytes_read, None if progress is None else not progress
    with tqdm(
        total=total, desc="verifying", unit="B", unit_scale=True, disable=off, delay=1, leave=False
    ) as bar:
        stream(report.plan, Compared(written), bar.update)
    return fingerprint(written, progress=progress)

"""What a long sweep over examples has summed so far, kept beside its target until it is whole."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from blr_analysis.errors import StorageError
from blr_analysis.files import Folder, drafted
from blr_analysis.files.shards import save_file

EVERY = 60.0  # seconds
SHARE = 20  # and no sooner than so many times what the last writing took


@dataclass
class Unfinished:
    """Sums and where they stopped: ``TARGET.unfinished``, one safetensors file.

    They are added to in the same order again, so that a run that goes on ends with the same bits.

    Attributes:
        path: of the file.
        key: of all that the sums depend on; a file with another key is not read.
    """

    path: Path
    key: str
    _due: float = field(default_factory=lambda: time.monotonic() + EVERY)

    def taken_up(self, sums: Mapping[str, Tensor]) -> int:
        """How many passes are in the file, whose sums are put into these; 0 if there is none."""
        try:
            kept = Folder.open(self.path)
            if kept.metadata.get("key") != self.key:
                return 0
            for name, total in sums.items():
                total.copy_(kept.tensor(name))
        except (StorageError, KeyError):
            for total in sums.values():
                total.zero_()
            return 0
        return int(kept.metadata["passes"])

    def keep(self, passes: int, sums: Mapping[str, Tensor]) -> None:
        """Write the sums after so many passes, if the last time is a while ago."""
        started = time.monotonic()
        if started < self._due:
            return
        with drafted(self.path) as draft:
            save_file(sums, draft, {"key": self.key, "passes": str(passes)})
        now = time.monotonic()
        self._due = now + max(EVERY, SHARE * (now - started))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

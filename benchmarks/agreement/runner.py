"""Peers run in environments of their own: a folder with the problem in, scores out."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.agreement.cases import Case

SCRIPTS = Path(__file__).parents[1] / "peers"
PEERS = ("kronfluence", "dattri", "traker", "captum", "pydvl", "laplace")


@dataclass(frozen=True)
class Answer:
    """What one method of a peer gave: ``influence`` ``[N, M]``, or why there is none."""

    name: str
    influence: Tensor | None
    seconds: float = float("nan")
    peak: int = 0
    error: str = ""


def write_problem(case: Case, x: Tensor, y: Tensor, folder: Path) -> None:
    """The case, with test examples ``(x, y)``, where a peer reads it."""
    arrays: dict[str, Tensor] = {"x": case.x, "y": case.y, "x_test": x, "y_test": y}
    for k, weights in enumerate(case.checkpoints):
        arrays |= {f"weights.{k}.{name}": value for name, value in weights.items()}
    held: Any = {n: t.numpy() for n, t in arrays.items()}
    np.savez(folder / "problem.npz", **held)
    described = {
        "widths": case.widths,
        "likelihood": case.likelihood,
        "delta": case.delta,
        "dampings": case.dampings or (case.delta,),
        "checkpoints": len(case.checkpoints),
    }
    (folder / "problem.json").write_text(json.dumps(described))


def interpreter(peers: Path, name: str) -> Path | None:
    """The Python of a peer's environment, if it was set up."""
    found = peers / name / "bin" / "python"
    if found.exists():
        return found
    here = importlib.util.find_spec(name) is not None  # laplace-torch comes with the tests
    return Path(sys.executable) if here else None


def ask(
    python: Path, script: Path, case: Case, x: Tensor, y: Tensor, timeout: float
) -> list[Answer]:
    """Run one peer on a case; what it answers, or one line that says why it does not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_problem(case, x, y, folder)
        command = [str(python), "-W", "ignore", str(script), str(folder)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": "",
        }
        late = False
        try:
            done = subprocess.run(
                command,
                timeout=timeout,
                capture_output=True,
                text=True,
                env=environment,
                check=False,
            )
            last = (done.stderr.strip().splitlines() or ["no output"])[-1][:150]
            last = "has nothing for this likelihood" if done.returncode == 0 else last
        except subprocess.TimeoutExpired:
            late = True
            last = f"not done after {timeout:.0f} s"
        answers = read_answers(folder, (len(case.x), len(x)))
    if late or not answers:
        answers.append(Answer(script.stem.removeprefix("run_"), None, error=last))
    return answers


def read_answers(folder: Path, shape: tuple[int, int]) -> list[Answer]:
    """The methods that a peer finished; one of another shape or with NaN is an error."""
    if not (folder / "scores.json").exists():
        return []
    rows = json.loads((folder / "scores.json").read_text())
    answers = []
    with np.load(folder / "scores.npz", allow_pickle=False) as arrays:
        for name, row in rows.items():
            if "error" in row:
                answers.append(Answer(name, None, error=row["error"]))
                continue
            influence = torch.from_numpy(arrays[name])
            wrong = ""
            if tuple(influence.shape) != shape:
                wrong = f"scores of shape {tuple(influence.shape)}, expected {shape}"
            elif not bool(influence.isfinite().all()):
                wrong = "scores hold NaN or inf"
            answers.append(
                Answer(name, None if wrong else influence, row["seconds"], row["peak"], wrong)
            )
    return answers

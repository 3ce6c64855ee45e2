"""The options that several commands share, and what they lead to: a task and its posterior."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from tqdm import tqdm

from blr_analysis.errors import InputError

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.posterior import Posterior
    from blr_analysis.task import Task


class StructureName(StrEnum):
    """What ``--fit`` fits."""

    diag = "diag"
    kron = "kron"
    lowrank = "lowrank"
    full = "full"


class Correction(StrEnum):
    """How ``loo`` leaves an example out."""

    auto = "auto"
    first_order = "first_order"
    cavity = "cavity"


class Solver(StrEnum):
    """How ``what-if`` finds the model without some of its data."""

    auto = "auto"
    posterior = "posterior"
    cg = "cg"


TaskName = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT.py:TASK",
        help="Your script, and in it a function without arguments that returns a Task (or a Task).",
        show_default=False,
    ),
]
PosteriorFile = Annotated[
    Path | None,
    typer.Option(
        "--posterior", "-p", metavar="FILE", help="What posterior.save(FILE) wrote after training."
    ),
]
Fit = Annotated[
    StructureName | None,
    typer.Option(
        help="Instead of --posterior: fit a Laplace posterior to the weights that the model has."
    ),
]
PriorPrecision = Annotated[
    float | None,
    typer.Option(
        metavar="D",
        help="For --fit: the weight decay in units of the summed loss (N times the L2 penalty of "
        "a mean loss). Left out: found in the weights and the data.",
    ),
]
Test = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="A function in the same script that returns a Task with test data."
    ),
]
Calibrate = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Check the posterior's scale by exact solves on N random examples (32 is a good "
        "number) and set it right; each costs some tens of passes over the data.",
    ),
]
Passes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=2,
        help="Spend about N passes over the data on taking a group out: by a descent on those that "
        "stay (40 is a good number), or, where the model is off its own minimum, by short "
        "trainings (6 unless given; best as many as it was trained for).",
    ),
]
By = Annotated[
    str,
    typer.Option(
        metavar="COLUMN",
        help="Take out each group of this column in turn: target, prediction or a column of "
        "the task's metadata; none for none; auto for the classes, where they are few.",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write tables and pictures here.")
]


class Teller:
    """Says on standard error what begins, and when; standard output is for what was found."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        tqdm.write(f"{self.elapsed:6.1f} s  {text}", file=sys.stderr)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start


def paper() -> Console:
    """Standard output: as wide as the terminal, plain text where it is none."""
    return Console(highlight=False, markup=False)


@dataclass(frozen=True)
class Way:
    """The options that lead to a posterior: one that was saved, or one to fit."""

    posterior: Path | None
    fit: StructureName | None
    prior_precision: float | None
    calibrate: int | None = None

    def check(self) -> None:
        """Raise :class:`InputError` unless exactly one way to a posterior is named."""
        if self.posterior is not None and self.fit is not None:
            raise InputError("give --posterior or --fit, not both")
        if self.posterior is None and self.fit is None:
            raise InputError(
                "name a posterior: --posterior FILE, of "
                "Posterior.from_optimizer(...).save(FILE); or --fit kron"
            )
        if self.fit is None and self.prior_precision is not None:
            raise InputError("--prior-precision belongs to --fit; a saved posterior knows its own")

    def posterior_of(self, task: Task, say: Teller) -> Posterior:
        """The saved posterior, checked against the task, or a new one; calibrated if asked for."""
        from blr_analysis.posterior import Posterior, fit_laplace

        if self.posterior is not None:
            q = Posterior.load(self.posterior)
            q.on(task)
            _warn_of_buffers(task, q, say)
        else:
            structure = str(self.fit)
            say(f"fitting a Laplace posterior, structure {structure}")
            q = fit_laplace(task, structure=structure, prior_precision=self.prior_precision)
            if choice := q.record.get("prior_choice"):
                say(f"prior precision {choice['delta']:.3g}, found by {choice['rule']}")
        return q if self.calibrate is None else _in_scale(task, q, self.calibrate, say)


@dataclass(frozen=True)
class Inputs:
    """What a command works with; ``out`` is a folder ready to be written where one was named."""

    task: Task
    test: Task | None
    posterior: Posterior
    out: Path
    say: Teller


@contextmanager
def job(
    task: str,
    way: Way,
    test: str | None = None,
    out: Path | None = None,
    *,
    check: Callable[[Task], None] | None = None,
) -> Iterator[Inputs]:
    """Options, folder, script and posterior, in the order in which their faults cost least."""
    from blr_analysis.audit import folder_for
    from blr_analysis.cli.script import load_tasks

    way.check()
    say = Teller()
    with nullcontext(Path()) if out is None else folder_for(out) as folder:
        say(f"loading {task}")
        ours, theirs = load_tasks(task, test)
        if check is not None:
            check(ours)
        yield Inputs(ours, theirs, way.posterior_of(ours, say), folder, say)


def _in_scale(task: Task, posterior: Posterior, probe: int, say: Teller) -> Posterior:
    from blr_analysis.sensitivity import calibrate

    say(f"calibrating the posterior: exact solves for {probe:,} examples")
    better = calibrate(task, posterior, probe)
    scale, apart = (better.record["calibration"][name] for name in ("scale", "spread"))
    spread = "" if apart is None else f", {apart:.0%} apart on single examples"
    say(f"variances times {scale:.3g}{spread}")
    if unchecked := better.record["calibration"]["unchecked"]:
        say(f"the scale is not certified: {unchecked}")
    return better


def _warn_of_buffers(task: Task, posterior: Posterior, say: Teller) -> None:
    """Running statistics are no part of a posterior; the model itself must bring them."""
    import torch

    own: dict[str, Any] = dict(task.model.named_parameters())
    same = all(
        torch.allclose(own[n].detach().cpu().float(), m.cpu().float(), rtol=1e-3, atol=1e-5)
        for n, m in posterior.mean.items()
    )
    if not same and any(b.is_floating_point() for b in task.model.buffers()):
        say(
            "note: the script's model is not at the posterior's mean, which is used; its buffers "
            "(BatchNorm statistics) stay: load the trained state there first"
        )

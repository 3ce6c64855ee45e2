"""The options that several commands share, and what they lead to: a task and its posterior."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from tqdm import tqdm

from blr_analysis.errors import InputError
from blr_analysis.posterior import Posterior, fit_laplace
from blr_analysis.sensitivity import calibrate
from blr_analysis.task import Task


class Structure(StrEnum):
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
    Structure | None,
    typer.Option(
        help="Instead of --posterior: fit a Laplace posterior to the weights that the model has."
    ),
]
PriorPrecision = Annotated[
    float | None,
    typer.Option(
        metavar="D",
        help="For --fit: the weight decay in units of the summed loss (N times the L2 penalty of "
        "a mean loss).",
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
        help="Take a group out by a descent of about N passes over the data that stay (40 is a "
        "good number), instead of the posterior's one step: slower, and far closer to retraining.",
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


def check_choice(posterior: Path | None, fit: Structure | None, prior: float | None) -> None:
    """Raise :class:`InputError` unless exactly one way to a posterior is named."""
    if posterior is not None and fit is not None:
        raise InputError("give --posterior or --fit, not both")
    if posterior is None and fit is None:
        raise InputError(
            "name a posterior: --posterior FILE, written in Python by posterior.save(FILE) with "
            "posterior = Posterior.from_optimizer(optimizer, model, ...); or fit one to the "
            "trained model: --fit kron --prior-precision D"
        )
    if fit is None and prior is not None:
        raise InputError("--prior-precision belongs to --fit; a saved posterior knows its own")
    if fit is not None and prior is None:
        raise InputError(
            "--fit needs --prior-precision D: the weight decay in units of the summed loss (N "
            "times the L2 penalty, for a loss that is a mean over N examples)"
        )


def find_posterior(
    task: Task, posterior: Path | None, fit: Structure | None, prior: float | None, say: Teller
) -> Posterior:
    """The saved posterior, checked against the task, or a new one."""
    if posterior is not None:
        found = Posterior.load(posterior)
        found.on(task)
        _warn_of_buffers(task, found, say)
        return found
    assert fit is not None
    assert prior is not None
    say(f"fitting a Laplace posterior, structure {fit.value}")
    return fit_laplace(task, structure=fit.value, prior_precision=prior)


def in_scale(task: Task, posterior: Posterior, probe: int | None, say: Teller) -> Posterior:
    """The posterior, calibrated if that was asked for."""
    if probe is None:
        return posterior
    say(f"calibrating the posterior: exact solves for {probe:,} examples")
    better = calibrate(task, posterior, probe)
    found = better.record["calibration"]
    spread = "" if found["spread"] is None else f", {found['spread']:.0%} apart on single examples"
    say(f"variances times {found['scale']:.3g}{spread}")
    return better


def _warn_of_buffers(task: Task, posterior: Posterior, say: Teller) -> None:
    """Running statistics are no part of a posterior; the model itself must bring them."""
    own: dict[str, Any] = dict(task.model.named_parameters())
    same = all(
        torch.allclose(own[n].detach().cpu().float(), m.cpu().float(), rtol=1e-3, atol=1e-5)
        for n, m in posterior.mean.items()
    )
    if not same and any(b.is_floating_point() for b in task.model.buffers()):
        say(
            "note: the script's model has other weights than the posterior's mean. The mean is "
            "used, but buffers (BatchNorm statistics) are the script's: load the trained state "
            "there first"
        )

"""What the commands work with: a task of the user's script, or of a model's folder and a data file,
and its posterior."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.cli.options import Base, Length, Shared, Text
from blr_analysis.errors import BLRError, InputError
from blr_analysis.terminal import Teller

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.posterior import Posterior
    from blr_analysis.task import Task

MODULE = "blr_analysis_user_script"  # not "__main__": what stands under that guard does not run
StructureName = StrEnum("StructureName", "diag kron lowrank full")


@dataclass(frozen=True)
class Source:
    """The options that lead to a task and its posterior."""

    task: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT.py:TASK|MODEL",
            help="A function of your script that returns a Task (or a Task); or the folder of a "
            "causal language model, or of a LoRA adapter on its base.",
            show_default=False,
        ),
    ]
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATA",
            help="What MODEL was trained on: .jsonl, .json, .csv, .parquet, .txt, or a folder of "
            "Dataset.save_to_disk.",
            show_default=False,
        ),
    ] = None
    test: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A function in the same script that returns a Task with test data; of a MODEL a "
            "file.",
        ),
    ] = None
    posterior: Annotated[
        Path | None,
        typer.Option("--posterior", "-p", metavar="FILE", help="What posterior.save(FILE) wrote."),
    ] = None
    fit: Annotated[
        StructureName | None,
        typer.Option(help="Without -p: the structure of the Laplace posterior; kron if left out."),
    ] = None
    prior_precision: Annotated[
        float | None,
        typer.Option(metavar="D", help="Of the fit; found in the weights and data if left out."),
    ] = None
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure the posterior's scale: by one training, or exact solves."
        ),
    ] = False
    base: Base = None
    text: Text = None
    max_length: Length = None

    def __post_init__(self) -> None:
        """Refuses what does not go together, before any work."""
        place = Path(self.task).expanduser()
        if self.data is not None and ".py:" in self.task and not place.exists():
            raise InputError(f"{self.task!r} brings its own data: leave {str(self.data)!r} out")
        if self.data is None and place.is_dir():
            raise InputError(f"{self.task!r} is a model: name what it was trained on, MODEL DATA")
        if self.data is None and (self.base, self.text, self.max_length) != (None, None, None):
            raise InputError("--base, --text and --max-length belong to MODEL DATA")
        if self.posterior is not None and (self.fit, self.prior_precision) != (None, None):
            raise InputError(
                "--fit and --prior-precision belong to a fit, -p to one that was saved"
            )

    @property
    def structure(self) -> str:
        """Of the posterior that is fitted, "" where none is."""
        return "" if self.posterior is not None else str(self.fit or "kron")

    def tasks(self, shared: Shared, say: Callable[[str], None]) -> tuple[Task, Task | None]:
        """The task, and that of the test data."""
        say(f"loading {self.task}")
        if self.data is None:
            ours, theirs = load_tasks(self.task, self.test)
        else:
            from blr_analysis.huggingface.models import load_language_model

            loaded = load_language_model(self.task, base=self.base)
            how = {"text": self.text, "max_length": self.max_length, "say": say}
            ours = texts_of(loaded, self.data, **how)
            theirs = None if self.test is None else texts_of(loaded, Path(self.test), **how)
        return shared.of(ours), None if theirs is None else shared.of(theirs)

    def examples(self, task: Task) -> int:
        """How many examples the fit of its posterior runs."""
        from blr_analysis.posterior import fit_examples

        if self.posterior is not None:
            return 0
        found = self.prior_precision is None and task.prior_precision is None
        return fit_examples(task, self.structure, found=found) * (1 + len(task.checkpoints))

    def posterior_of(self, task: Task, say: Teller) -> Posterior:
        """The saved posterior, checked against the task, or a new one; calibrated if asked for."""
        from blr_analysis.posterior import Posterior, fit_laplace
        from blr_analysis.posterior.prior_choice import in_words
        from blr_analysis.sensitivity import calibrate

        if self.posterior is not None:
            q = Posterior.load(self.posterior)
            q.on(task)
        else:
            say(f"fitting a Laplace posterior, structure {self.structure}")
            q = fit_laplace(
                task,
                structure=self.structure,
                curvature="mc_fisher" if task.likelihood.is_sequence else None,
                prior_precision=self.prior_precision,
            )
            if choice := q.record.get("prior_choice"):
                say(f"prior precision {in_words(choice)}")
        if self.calibrate:
            say("calibrating the posterior")
            q = calibrate(task, q)
            say(f"temperature {q.temperature:.3g}")
        return q


def texts_of(
    loaded: Any, path: Path, *, text: str | None, max_length: int | None, say: Callable[[str], None]
) -> Task:
    """A file of texts as the task of a language model; what is read in part is said."""
    from blr_analysis.huggingface.questions import language_task

    task = language_task(loaded, path, text=text, max_length=max_length)
    if cut := task.dataset.cut:
        say(f"{cut:,} of {task.n_data:,} texts of {path} cut to {max_length} tokens (--max-length)")
    return task


# The user's own script


def load_tasks(where: str, test: str | None = None) -> tuple[Task, Task | None]:
    """The task that ``SCRIPT.py:NAME`` names and, in the same script, the test task.

    Raises:
        InputError: no such script or name, a script or function that fails, something that is no
            Task. What the user's code raised is named with its line.
    """
    path, colon, name = where.rpartition(":")
    if not (colon and path and name.isidentifier()):
        raise InputError(
            f"expected SCRIPT.py:NAME, such as train.py:make_task, got {where!r}; NAME returns a "
            "blr_analysis.Task"
        )
    script = Path(path).expanduser()
    if not script.is_file():
        raise InputError(f"there is no script {path!r} (the folder here is {Path.cwd()})")
    folder = str(script.resolve().parent)
    sys.path.insert(0, folder)  # as ``python SCRIPT.py`` has it
    try:
        module = _executed(script)
        task = _task(module, name, script)
        return task, None if test is None else _task(module, test, script)
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _executed(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} is no Python script: its name must end in .py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = script  # so that its classes and dataclasses find their module
    with _blamed(path, f"the script {str(path)!r} failed"):
        spec.loader.exec_module(script)
    return script


def _task(script: ModuleType, name: str, path: Path) -> Task:
    from blr_analysis.task import Task

    if not hasattr(script, name):
        own = {
            n
            for n, v in vars(script).items()
            if isinstance(v, Task) or (callable(v) and getattr(v, "__module__", "") == MODULE)
        }
        known = ", ".join(n for n in vars(script) if n in own and n[0] != "_") or "none"
        raise InputError(f"{str(path)!r} defines no {name!r}; its functions and tasks: {known}")
    task = getattr(script, name)
    if callable(task) and not isinstance(task, Task):
        with _blamed(path, f"{name}() in {str(path)!r} failed"):
            task = task()
    if not isinstance(task, Task):
        raise InputError(
            f"{name} in {str(path)!r} gives {type(task).__name__}, expected a blr_analysis.Task: "
            "Task(model, data, likelihood=...)"
        )
    return task


@contextmanager
def _blamed(path: Path, what: str) -> Iterator[None]:
    """Turn what the user's code raises into an InputError that names the line."""
    try:
        yield
    except (Exception, SystemExit) as error:  # the user's own code
        said = str(error) if isinstance(error, BLRError) else f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(error.__traceback__)
        mine = [f.lineno for f in frames if Path(f.filename) == path.resolve()]
        mine = [error.lineno] if isinstance(error, SyntaxError) else mine
        line = f" in line {mine[-1]}" if mine else ""
        raise InputError(f"{what}{line}: {said}") from error

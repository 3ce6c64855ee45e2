"""The task and the posterior that a command works with.

The task comes from a script of the user, or from the folder of a language model and a data file.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from blr_analysis.cli.options import (
    Answer,
    Base,
    Beta,
    Eos,
    Length,
    LoadingOptions,
    Prompt,
    Shared,
    Text,
    option,
)
from blr_analysis.errors import BLRError, InputError
from blr_analysis.terminal import Teller

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.posterior import Posterior
    from blr_analysis.task import Task

# Not "__main__": what a script does under `if __name__ == "__main__"` must not run here.
MODULE = "blr_analysis_user_script"
StructureName = StrEnum("StructureName", "diag kron lowrank full")


@dataclass(frozen=True)
class Source:
    """The options that lead to a task and its posterior."""

    PANEL: ClassVar[str] = "Model and data"

    task: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT.py:TASK|MODEL",
            help="A function of your script that returns a Task; or the folder of a language "
            "model or of a LoRA adapter.",
            show_default=False,
        ),
    ]
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="The texts that MODEL was trained on: a file, or ORG/NAME of the Hub. "
            "DATA:train[:500] takes a part.",
            show_default=False,
        ),
    ] = None
    test: Annotated[
        str | None,
        option("NAME", "Test data: a function in the same script, or, with MODEL, a file."),
    ] = None
    posterior: Annotated[
        Path | None,
        option("FILE", "A posterior that posterior.save(FILE) wrote.", "--posterior", "-p"),
    ] = None
    fit: Annotated[
        StructureName | None,
        option(
            "KIND", "The posterior to fit without -p: kron (the default), diag, lowrank or full."
        ),
    ] = None
    prior_precision: Annotated[
        float | None,
        option("D", "Weight decay times the number of examples. If left out, it is estimated."),
    ] = None
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure the scale of the answers, by one more training."),
    ] = False
    base: Base = None
    text: Text = None
    prompt: Prompt = None
    answer: Answer = None
    max_length: Length = None
    eos: Eos = None
    beta: Beta = None
    loading: LoadingOptions = field(default_factory=LoadingOptions)

    def __post_init__(self) -> None:
        """Refuse arguments that do not go together, before any work."""
        place = Path(self.task).expanduser()
        has_data = self.data is not None
        names_a_function = ".py:" in self.task and not place.exists()
        if has_data and names_a_function:
            raise InputError(f"{self.task!r} brings its own data: leave {self.data!r} out")
        if not has_data and place.is_dir():
            raise InputError(f"{self.task!r} is a model: name its training data, MODEL DATA")
        model_options = (
            self.base,
            self.text,
            self.prompt,
            self.answer,
            self.max_length,
            self.eos,
            self.beta,
        )
        has_model_options = any(value is not None for value in model_options)
        if has_model_options and not has_data:
            raise InputError(
                "--base, --text, --prompt, --answer, --max-length, --eos and --beta belong to "
                "MODEL DATA"
            )
        has_fit_options = self.fit is not None or self.prior_precision is not None
        if self.posterior is not None and has_fit_options:
            raise InputError(
                "--fit and --prior-precision belong to a fit: leave them out with -p, which reads "
                "a saved posterior"
            )

    @property
    def structure(self) -> str:
        """The structure of the posterior that is fitted; "" where a saved one is read."""
        if self.posterior is not None:
            return ""
        return str(self.fit or "kron")

    def tasks(self, shared: Shared, say: Callable[[str], None]) -> tuple[Task, Task | None]:
        """The task, and that of the test data; None without test data."""
        self.loading.check(shared.device, has_model=self.data is not None)
        say(f"loading {self.task}")
        if self.data is None:
            task, test = load_tasks(self.task, self.test)
        else:
            task, test = self._tasks_of_texts(self.data, shared, say)
        task = shared.of(task)
        if test is not None:
            test = shared.of(test)
            say_if_unlike(task, test, say)
        return task, test

    @property
    def columns(self) -> TextColumns:
        """How the rows of DATA are read."""
        return TextColumns(
            self.text,
            self.max_length,
            self.prompt,
            self.answer,
            self.loading.online,
            self.eos,
            self.beta,
        )

    def _tasks_of_texts(
        self, data: str, shared: Shared, say: Callable[[str], None]
    ) -> tuple[Task, Task | None]:
        """The tasks of a language model's training texts and, where named, of its test texts."""
        loaded = self.loading.language_model(self.task, self.base, shared.device)
        task = self.columns.task_of(loaded, data, say)
        test = None if self.test is None else self.columns.task_of(loaded, self.test, say)
        return task, test

    def examples(self, task: Task, *, sampled: bool = False) -> int:
        """How many examples run through the model while the posterior is fitted.

        Args:
            sampled: whether sequences are sampled.
        """
        from blr_analysis.posterior import fit_examples

        if self.posterior is not None:
            return 0
        chooses_the_prior = self.prior_precision is None and task.prior_precision is None
        examples_per_fit = fit_examples(
            task, self.structure, chooses_prior=chooses_the_prior, sampled=sampled
        )
        return examples_per_fit * (1 + len(task.checkpoints))

    def posterior_of(
        self,
        task: Task,
        say: Teller,
        unfinished: Path | None = None,
        *,
        sampled: bool = False,
    ) -> Posterior:
        """The saved posterior, checked against the task, or a new one; calibrated if asked for.

        Args:
            unfinished: where a fit keeps what it has done, so that it goes on there.
            sampled: whether a fit looks at a sample of sequences.
        """
        from blr_analysis.posterior import Posterior
        from blr_analysis.posterior.recognition import warning_of_other_weights
        from blr_analysis.sensitivity import calibrate

        if self.posterior is not None:
            posterior = Posterior.load(self.posterior)
            if other_weights := warning_of_other_weights(task, posterior.on(task)):
                say(f"note: {other_weights}")
        else:
            self.say_if_recorded(task, say)
            posterior = self.fitted(task, say, unfinished, sampled=sampled)
        if self.calibrate:
            say("calibrating the posterior")
            posterior = calibrate(task, posterior)
            say(f"temperature {posterior.temperature:.3g}")
        return posterior

    def say_if_recorded(self, task: Task, say: Callable[[str], None]) -> None:
        """Name the posterior that the training of this model recorded, if there is one."""
        from blr_analysis.runs import POSTERIOR, RUN
        from blr_analysis.snapshots import noted_step

        run = Path(self.task).expanduser() / RUN
        recorded = run / POSTERIOR
        if not recorded.exists():
            return
        with suppress(InputError):  # of another training
            noted_step(run, task.model)
            say(f"the training recorded a posterior: -p {recorded} spares the fit")

    def fitted(
        self,
        task: Task,
        say: Callable[[str], None],
        unfinished: Path | None = None,
        *,
        sampled: bool,
    ) -> Posterior:
        """A Laplace posterior; says how its prior precision was chosen."""
        from blr_analysis.posterior import fit_laplace
        from blr_analysis.posterior.prior_choice import in_words

        say(f"fitting a Laplace posterior, structure {self.structure}")
        curvature = "mc_fisher" if task.likelihood.is_sequence else None
        posterior = fit_laplace(
            task,
            structure=self.structure,
            curvature=curvature,
            prior_precision=self.prior_precision,
            sampled=sampled,
            unfinished=unfinished,
        )
        prior_choice = posterior.record.get("prior_choice")
        if prior_choice:
            say(f"prior precision {in_words(prior_choice)}")
        return posterior


@dataclass(frozen=True)
class TextColumns:
    """Which columns of the data hold the texts, and how they are read; see ``language_task``."""

    text: str | None
    max_length: int | None
    prompt: str | None = None
    answer: str | None = None
    online: bool = False
    eos: bool | None = None
    beta: float | None = None

    def task_of(
        self, loaded: Any, data: str, say: Callable[[str], None], mark: str | None = None
    ) -> Task:
        """Rows of texts as the task of a language model; says how many texts were cut.

        Args:
            mark: of the same data when they were read before, see ``language_task``.
        """
        from blr_analysis.huggingface.questions import language_task

        task = language_task(
            loaded,
            data,
            text=self.text,
            prompt=self.prompt,
            answer=self.answer,
            max_length=self.max_length,
            eos=self.eos,
            beta=self.beta,
            online=self.online,
            mark=mark,
        )
        n_cut = task.dataset.cut
        if n_cut:
            say(
                f"{n_cut:,} of {task.n_data:,} texts of {data} cut to {self.max_length} tokens "
                "(--max-length)"
            )
        return task


# The user's own script


def say_if_unlike(task: Task, test: Task, say: Callable[[str], None]) -> None:
    """Say at once where the test data differ from the training data, as by other units.

    Raises:
        InputError, DataError, ModelError: the model cannot take these test data.
    """
    from blr_analysis.sensitivity.door import check_test
    from blr_analysis.sensitivity.other_units import unlike_training

    line = unlike_training(task, check_test(test, task), task.parameters())
    if line:
        say(f"note: {line}")


def load_tasks(address: str, test: str | None = None) -> tuple[Task, Task | None]:
    """The task that ``SCRIPT.py:NAME`` names and, in the same script, the test task.

    Raises:
        InputError: no such script or name, a script or function that fails, something that is no
            Task. What the user's code raised is named with its line.
    """
    path, colon, name = address.rpartition(":")
    is_complete = bool(colon and path) and name.isidentifier()
    if not is_complete:
        raise InputError(
            f"expected SCRIPT.py:NAME, such as train.py:make_task, got {address!r}; NAME returns a "
            "blr_analysis.Task"
        )
    script = Path(path).expanduser()
    if not script.is_file():
        raise InputError(f"there is no script {path!r} (the folder here is {Path.cwd()})")
    folder = str(script.resolve().parent)
    sys.path.insert(0, folder)  # as ``python SCRIPT.py`` does
    try:
        module = _executed(script)
        task = _task_named(name, module, script)
        test_task = None if test is None else _task_named(test, module, script)
        return task, test_task
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _executed(path: Path) -> ModuleType:
    """The module of a user's script, after the script has run."""
    spec = importlib.util.spec_from_file_location(MODULE, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} is no Python script: its name must end in .py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = script  # so that its classes and dataclasses find their module
    with _failure_located(path, f"the script {str(path)!r} failed"):
        spec.loader.exec_module(script)
    return script


def _task_named(name: str, script: ModuleType, path: Path) -> Task:
    """The task of this name in a script, or the one that a function of this name returns."""
    from blr_analysis.task import Task

    if not hasattr(script, name):
        names = ", ".join(_functions_and_tasks(script)) or "none"
        raise InputError(f"{str(path)!r} defines no {name!r}; its functions and tasks: {names}")
    value = getattr(script, name)
    if callable(value) and not isinstance(value, Task):
        with _failure_located(path, f"{name}() in {str(path)!r} failed"):
            value = value()
    if not isinstance(value, Task):
        raise InputError(
            f"{name} in {str(path)!r} gives {type(value).__name__}, expected a blr_analysis.Task: "
            "Task(model, data, likelihood=...)"
        )
    return value


def _functions_and_tasks(script: ModuleType) -> list[str]:
    """The public names of a script's tasks, and of functions that may return one."""
    from blr_analysis.task import Task

    def is_callable_of_the_script(value: Any) -> bool:
        return callable(value) and getattr(value, "__module__", "") == MODULE

    return [
        name
        for name, value in vars(script).items()
        if not name.startswith("_")
        and (isinstance(value, Task) or is_callable_of_the_script(value))
    ]


@contextmanager
def _failure_located(path: Path, failure: str) -> Iterator[None]:
    """Turn what the user's code raises into an InputError: the failure, its line, its cause."""
    try:
        yield
    except (Exception, SystemExit) as error:
        cause = str(error) if isinstance(error, BLRError) else f"{type(error).__name__}: {error}"
        line = _line_of(error, path)
        position = "" if line is None else f" in line {line}"
        raise InputError(f"{failure}{position}: {cause}") from error


def _line_of(error: BaseException, path: Path) -> int | None:
    """The line of a script where an error arose; None where it is not in the script."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.resolve()]
    return lines[-1] if lines else None

"""The options that several commands share, and what they lead to: a task and its posterior."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blr_analysis.errors import InputError
from blr_analysis.terminal import Teller, pairs

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from torch import Tensor

    from blr_analysis.posterior import Forecast, Posterior, Stage
    from blr_analysis.task import Task


StructureName = StrEnum("StructureName", "diag kron lowrank full")
Correction = StrEnum("Correction", "auto first_order cavity")
Solver = StrEnum("Solver", "auto posterior cg replay")
TaskName = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT.py:TASK",
        help="Your script, and in it a function without arguments that returns a Task (or a Task).",
        show_default=False,
    ),
]
TaskOrModel = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT.py:TASK|MODEL",
        help="A function of your script that returns a Task; or the folder of a causal language "
        "model, or of a LoRA adapter on its base.",
        show_default=False,
    ),
]
Data = Annotated[
    Path | None,
    typer.Argument(
        metavar="DATA",
        help="What MODEL was trained on: .jsonl, .json, .csv, .parquet, .txt, or a folder of "
        "Dataset.save_to_disk.",
        show_default=False,
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(metavar="MODEL", help="Of an adapter: where its base is, if it was moved."),
]
TextColumn = Annotated[
    str | None, typer.Option("--text", metavar="COLUMN", help="The texts' column.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Say what it would cost, from three timed chunks; no file."),
]
Length = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS", min=2, help="Tokens kept of longer texts, which are refused otherwise."
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
# A size: 500MB, 1GiB, 2e9.
UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}{b}": 1000**n for n, letter in enumerate("KMGT", 1) for b in ("", "B")}
UNITS |= {f"{letter}I{b}": 1024**n for n, letter in enumerate("KMGT", 1) for b in ("", "B")}
NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


PriorPrecision = Annotated[
    float | None,
    typer.Option(
        metavar="D",
        help="For --fit: the weight decay in units of the summed loss (N times the L2 penalty of "
        "a mean loss). Left out: found in the weights and the data.",
    ),
]
Initial = Annotated[
    Path | None,
    typer.Option(
        metavar="WEIGHTS",
        help="For --fit: what the training began with: a state dict (.safetensors, or of "
        "torch.save), or the folder of the model that was fine-tuned. The prior's mean, and where "
        "short trainings without a group begin.",
    ),
]
Test = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A function in the same script that returns a Task with test data; of a MODEL a file.",
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
        "stay (40 is a good number; audit and report take 5 to 20 unless given), or, where the "
        "model is off its own minimum, by short trainings (6 unless given; best as many as it was "
        "trained for).",
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


@dataclass(frozen=True)
class Way:
    """The options that lead to a posterior: one that was saved, or one to fit."""

    posterior: Path | None
    fit: StructureName | None
    prior_precision: float | None
    calibrate: int | None = None
    initial: Path | None = None

    def checked(self, texts: TextOptions | None) -> Way:
        """One way to a posterior; of texts a Kronecker one is fitted where nobody names one.

        Raises:
            InputError: none, or two.
        """
        if self.posterior is not None and self.fit is not None:
            raise InputError("give --posterior or --fit, not both")
        if self.posterior is None and self.fit is None:
            if texts is not None:
                return replace(self, fit=StructureName.kron)
            raise InputError(
                "name a posterior: --posterior FILE, of "
                "Posterior.from_optimizer(...).save(FILE); or --fit kron"
            )
        if self.fit is None and self.prior_precision is not None:
            raise InputError("--prior-precision belongs to --fit; a saved posterior knows its own")
        if self.fit is None and self.initial is not None:
            raise InputError("--initial belongs to --fit; a saved posterior knows its own")
        return self

    def finds(self, task: Task) -> bool:
        """Whether a fit finds δ."""
        named = task.prior_precision if self.prior_precision is None else self.prior_precision
        return named is None

    def stages(self, task: Task) -> list[Stage]:
        """The sweeps over the data that this takes."""
        from blr_analysis.posterior import fit_stages

        if self.posterior is not None:
            return []
        return fit_stages(task, str(self.fit), found=self.finds(task))

    def posterior_of(self, task: Task, say: Teller) -> Posterior:
        """The saved posterior, checked against the task, or a new one; calibrated if asked for."""
        from blr_analysis.posterior import Posterior, fit_laplace
        from blr_analysis.posterior.prior_choice import in_words

        if self.posterior is not None:
            q = Posterior.load(self.posterior)
            q.on(task)
        else:
            structure = str(self.fit)
            say(f"fitting a Laplace posterior, structure {structure}")
            if task.likelihood.is_sequence and structure == "diag":
                say("note: a diagonal posterior is weak for influence; --fit kron is better")
            curvature = "mc_fisher" if task.likelihood.is_sequence else "ggn"
            q = fit_laplace(
                task,
                structure=structure,
                curvature=curvature,
                prior_precision=self.prior_precision,
                initial=None if self.initial is None else read_weights(self.initial),
            )
            if choice := q.record.get("prior_choice"):
                say(f"prior precision {in_words(choice)}")
        return q if self.calibrate is None else _in_scale(task, q, self.calibrate, say)


def read_size(option: str, text: str) -> int:
    """Bytes, at least 1.

    Raises:
        InputError: no size, named by the option.

    >>> read_size("--max-memory", "1.5GB"), read_size("--max-memory", "2 MiB")
    (1500000000, 2097152)
    """
    match = NUMBER.fullmatch(text)
    unit = UNITS.get(match[2].upper()) if match else None
    count = float(match[1]) * unit if match and unit else 0.0
    if not 1 <= count < 2**63:
        raise InputError(f"{option} must be a size such as 500MB, 1GB or 1GiB, got {text!r}")
    return int(count)


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from a file, or from the folder of a Hugging Face model.

    Raises:
        StorageError: it is not there, or holds more than tensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from blr_analysis.errors import StorageError
    from blr_analysis.huggingface.models import load_language_model
    from blr_analysis.posterior.capture.checkpoints import read_state_dict

    place = path.expanduser()
    if place.is_dir():
        return load_language_model(place).model.state_dict()
    try:
        return load_file(place) if place.suffix == ".safetensors" else read_state_dict(place)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot read {str(path)!r}: {error}.") from error


def say_cut(say: Callable[[str], None], task: Task, path: Path, most: int | None) -> None:
    """How many of a task's texts are read in part."""
    if cut := task.dataset.cut:
        say(f"{cut:,} of {task.n_data:,} texts of {path} cut to {most} tokens (--max-length)")


@dataclass(frozen=True)
class TextOptions:
    """The options that lead from a model's folder and files of texts to tasks."""

    data: Path
    base: Path | None = None
    text: str | None = None
    max_length: int | None = None

    @classmethod
    def of(
        cls, task: str, data: Path | None, base: Path | None, text: str | None, length: int | None
    ) -> TextOptions | None:
        """None where the task is one of a script.

        Raises:
            InputError: a model without data, or options of texts beside a script.
        """
        if data is not None:
            if ".py:" in task and not Path(task).expanduser().exists():
                raise InputError(f"{task!r} brings its own data: leave {str(data)!r} out")
            return cls(data, base, text, length)
        if Path(task).expanduser().is_dir():
            raise InputError(f"{task!r} is a model: name what it was trained on, MODEL DATA")
        if (base, text, length) != (None, None, None):
            raise InputError("--base, --text and --max-length belong to MODEL DATA")
        return None


def tasks_of(
    task: str, test: str | None, texts: TextOptions | None, say: Callable[[str], None]
) -> tuple[Task, Task | None]:
    """The task, and that of the test data: of a script, or of a model and its texts."""
    say(f"loading {task}")
    if texts is None:
        from blr_analysis.cli.script import load_tasks

        return load_tasks(task, test)
    from blr_analysis.huggingface.models import load_language_model
    from blr_analysis.huggingface.questions import language_task

    loaded = load_language_model(task, base=texts.base)
    made = []
    for path in [texts.data] if test is None else [texts.data, Path(test)]:
        made.append(language_task(loaded, path, text=texts.text, max_length=texts.max_length))
        say_cut(say, made[-1], path, texts.max_length)
    return made[0], made[1] if test is not None else None


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
    texts: TextOptions | None = None,
) -> Iterator[Inputs]:
    """Options, folder, script (or model and texts) and posterior, in the order in which their
    faults cost least."""
    from blr_analysis import ranks
    from blr_analysis.audit import folder_for

    way, say = way.checked(texts), Teller()
    with folder_for(out) if out is not None and ranks.first() else nullcontext(Path()) as folder:
        ours, theirs = tasks_of(task, test, texts, say)
        if check is not None:
            check(ours)
        yield Inputs(ours, theirs, way.posterior_of(ours, say), folder, say)


def audit_forecast(
    task: str,
    way: Way,
    texts: TextOptions | None,
    test: str | None,
    by: str | None,
    passes: int | None,
) -> Forecast:
    """What the analyses of an audit cost: groups with as many passes as are asked for, or as many
    as a model at its minimum gets."""
    from blr_analysis.audit import check_column
    from blr_analysis.audit.findings import descent_passes, groups_of
    from blr_analysis.backprop.engine import n_outputs
    from blr_analysis.posterior import Forecast, Stage
    from blr_analysis.posterior.stationarity import SAMPLE
    from blr_analysis.sensitivity.sequences import DRAWS

    way = way.checked(texts)
    ours, theirs = tasks_of(task, test, texts, Teller())
    check_column(by, ours)
    size = sum(p.nbytes for p in ours.parameters().values())
    n, some = ours.n_data, min(ours.n_data, SAMPLE)
    outputs = 1 + DRAWS if ours.likelihood.is_sequence else n_outputs(ours, ours.parameters())
    stages = [*way.stages(ours), Stage("sensitivity", n, outputs, rotated=way.fit == "kron")]
    if not ours.likelihood.is_sequence:
        stages.append(Stage("leave one out", n, outputs, rotated=way.fit == "kron"))
    if theirs is not None:
        stages.append(Stage("test data", theirs.n_data))
    if groups := groups_of(ours, by):
        each = passes or descent_passes(groups)
        stages.append(Stage("groups taken out", groups * each * n))
    if not any(stage.name == "gradient of the loss" for stage in stages):
        stages += [Stage("stationarity", n), Stage("gradients of some", some)]
    return Forecast.of(ours, stages, disk=2 * size)


def show_forecast(cost: Forecast, *, besides: str = "") -> None:
    """Passes, time, memory and disk, a line each; and what is not counted."""
    hours, rest = divmod(round(cost.seconds), 3600)
    pairs(
        {
            "passes": f"{cost.passes:.2f} over the data",
            "time": f"about {hours}:{rest // 60:02}:{rest % 60:02}",
            "memory": f"about {cost.memory / 2**30:.1f} GiB",
            "disk": f"{cost.disk / 2**20:,.1f} MiB",
            **({"besides": besides} if besides else {}),
        }
    )


def _in_scale(task: Task, posterior: Posterior, probe: int, say: Teller) -> Posterior:
    from blr_analysis.sensitivity import calibrate

    say("calibrating the posterior")
    better = calibrate(task, posterior, probe=probe)
    error = better.temperature_error
    said = "not measured" if error is None else f"give or take {error:.0%}"
    say(f"temperature {better.temperature:.3g}, {said}")
    return better

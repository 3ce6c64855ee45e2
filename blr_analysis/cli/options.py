"""The options that several commands share, and how a signature holds a group of them.

Every command declares its options as typer reads them. Options that belong together are the fields
of a dataclass: a command has one parameter of that class, and :func:`flattened` hands its fields to
typer. torch is not imported here, so that ``--help`` answers at once.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from blr_analysis.errors import InputError, StorageError
from blr_analysis.terminal import pairs, print_json

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    from blr_analysis.posterior import Forecast
    from blr_analysis.task import Task

DECIMAL_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
BINARY_UNITS = {"KI": 1024, "MI": 1024**2, "GI": 1024**3, "TI": 1024**4}
UNITS = {**DECIMAL_UNITS, **BINARY_UNITS}  # a B may follow: KB, KiB
SIZE = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
DtypeName = StrEnum("DtypeName", "auto float32 bfloat16 float16")
AS_STORED = DtypeName("auto")


def option(
    metavar: str, text: str, *names: str, panel: str | None = None, least: int | None = None
) -> Any:
    """An option that takes a value.

    Args:
        metavar: what the help calls the value.
        text: what the option does.
        names: its spellings; if left out, the parameter's name.
        panel: the heading of the help; None: that of its group.
        least: the smallest value.
    """
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, min=least)


Out = Annotated[Path | None, option("DIR", "Write tables and pictures here.", "--out", "-o")]
OF_LANGUAGE_MODELS = "Language models"
Base = Annotated[
    Path | None,
    option("MODEL", "Where the base of an adapter is, if it was moved.", panel=OF_LANGUAGE_MODELS),
]
Text = Annotated[
    str | None,
    option("COLUMN", "The column with the texts.", panel=OF_LANGUAGE_MODELS),
]
Prompt = Annotated[
    str | None,
    option("COLUMN", "The column with the prompts.", panel=OF_LANGUAGE_MODELS),
]
Answer = Annotated[
    str | None,
    option("COLUMN", "The column with their answers.", panel=OF_LANGUAGE_MODELS),
]
Length = Annotated[
    int | None,
    option(
        "TOKENS",
        "Cut longer texts to this length. If left out, they are refused.",
        least=2,
        panel=OF_LANGUAGE_MODELS,
    ),
]
Eos = Annotated[
    bool | None,
    typer.Option(
        "--eos/--no-eos",
        help="End every text and answer with the end token, as TRL's trainers do. If "
        "left out: what BLRCallback recorded in the training.",
        rich_help_panel=OF_LANGUAGE_MODELS,
    ),
]
Beta = Annotated[
    float | None,
    option(
        "B",
        "β of DPO, for preference pairs. If left out: what BLRCallback recorded, else 0.1.",
        panel=OF_LANGUAGE_MODELS,
    ),
]


@dataclass(frozen=True)
class Shared:
    """The options of commands: where to compute, what may be replaced, what is shown."""

    PANEL: ClassVar[str] = "How to run"

    device: Annotated[str | None, option("NAME", "Where to compute: cpu, cuda, mps.")] = None
    max_memory: Annotated[
        str | None,
        option("SIZE", "How much memory to use beyond model and data, such as 1GB."),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace what was written before.")] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the cost; write nothing.")
    ] = False
    progress: Annotated[
        bool | None,
        typer.Option(help="Show progress bars. If left out: on a terminal, during long work."),
    ] = None
    json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object, for scripts; messages go to stderr."),
    ] = False

    @property
    def memory(self) -> int | None:
        """--max-memory in bytes; None where it was left out."""
        if self.max_memory is None:
            return None
        return read_size("--max-memory", self.max_memory)

    def of(self, task: Task) -> Task:
        """The task, with the device, memory and progress bars that were asked for."""
        from blr_analysis.models import find_device

        if self.device is not None:
            device = find_device(self.device)
            if device != task.device:
                task.model.to(device)
                task.device = device
        if self.memory is not None:
            task.memory_budget = self.memory
        if self.progress is not None:
            task.progress = self.progress
        return task

    def free(self, out: Path | None) -> Path | None:
        """The place to write to; None where none was named.

        Raises:
            StorageError: a file or folder is there, and --force was not given.
        """
        if out is None:
            return None
        place = out.expanduser()
        is_empty_folder = place.is_dir() and not any(place.iterdir())
        if place.exists() and not is_empty_folder and not self.force:
            raise StorageError(f"{str(place)!r} is there already: name another, or give --force.")
        return place

    @contextmanager
    def folder(self, out: Path | None) -> Iterator[Path]:
        """A folder that the block may write to.

        It is ``Path()`` where nothing is to be written: without ``out``, in a dry run, and on all
        ranks but the first.
        """
        from blr_analysis import ranks
        from blr_analysis.files.placing import folder_for

        if self.dry_run or not ranks.first():
            yield Path()
            return
        place = self.free(out)
        if place is None:
            yield Path()
            return
        with folder_for(place) as folder:
            yield folder


@dataclass(frozen=True)
class LoadingOptions:
    """How the weights of MODEL come into memory."""

    PANEL: ClassVar[str] = "How to load a MODEL"

    dtype: Annotated[
        DtypeName,
        option("NAME", "auto (as in its files), float32, bfloat16 or float16."),
    ] = AS_STORED
    load_in_4bit: Annotated[
        bool,
        typer.Option("--load-in-4bit", help="Quantise the base of an adapter (by bitsandbytes)."),
    ] = False
    device_map: Annotated[
        str | None,
        option("MAP", "Spread layers over devices: auto, balanced."),
    ] = None
    online: Annotated[
        bool,
        typer.Option("--online", help="Fetch MODEL and DATA from the Hub where they are not here."),
    ] = False

    def check(self, device: str | None, *, has_model: bool) -> None:
        """Refuse options that have no effect, before any work."""
        if not has_model and self != LoadingOptions():
            raise InputError(
                "--dtype, --load-in-4bit, --device-map and --online belong to MODEL DATA"
            )
        if device is not None and self.device_map is not None:
            raise InputError("--device-map chooses the devices: leave --device out")

    def language_model(self, model: str, base: Path | None, device: str | None) -> Any:
        """The language model in a folder, or of the Hub, with its tokenizer."""
        from blr_analysis.huggingface.models import load_language_model

        return load_language_model(
            model,
            base=base,
            device=device or "cpu",
            dtype=str(self.dtype),
            load_in_4bit=self.load_in_4bit,
            device_map=self.device_map,
            online=self.online,
        )


def read_size(option: str, text: str) -> int:
    """The number of bytes that a size such as "1.5GB" means, at least 1.

    Raises:
        InputError: the text is no size; the message names the option.

    >>> read_size("--max-memory", "1.5GB"), read_size("--max-memory", "2 MiB")
    (1500000000, 2097152)
    """
    refusal = f"{option} must be a size such as 500MB, 1GB or 1GiB, got {text!r}"
    match = SIZE.fullmatch(text)
    if match is None:
        raise InputError(refusal)
    number, suffix = match.groups()
    unit = UNITS.get(suffix.upper().removesuffix("B"))
    if unit is None:
        raise InputError(refusal)
    size = float(number) * unit
    if not 1 <= size < 2**63:
        raise InputError(refusal)
    return int(size)


def flattened(command: Callable[..., Any], idle: Collection[str] = ()) -> Callable[..., Any]:
    """The command with one parameter for each option, as typer reads them.

    A parameter of a dataclass is replaced by the dataclass's fields. The options of
    :class:`Shared` come last, because they are the same for all commands. A command returns its
    findings as plain values, which ``--json`` prints.

    Args:
        command: a function of groups of options and of single ones.
        idle: options of :class:`Shared` that the command does not look at, and does not have.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        p.name: p.annotation for p in parameters if is_dataclass(p.annotation)
    }
    options: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name not in groups:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        elif parameter.annotation is not Shared:
            options += options_of(parameter.annotation)
    if Shared in groups.values():
        options += [shared for shared in options_of(Shared) if shared.name not in idle]

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = gathered(group, values)
        is_for_a_script = any(getattr(value, "json", False) for value in values.values())
        if is_for_a_script:
            print_facts(command, values)
        else:
            command(**values)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def print_facts(command: Callable[..., Mapping[str, Any] | None], options: Any) -> None:
    """Run a command, and print what it returns as JSON; its words go to standard error.

    Only the first of several ranks returns something.
    """
    with redirect_stdout(sys.stderr):
        facts = command(**options)
    if facts is not None:
        print_json(facts)


def gathered(group: Any, values: dict[str, Any]) -> Any:
    """An instance of a dataclass of options; its values are taken out of ``values``.

    A field may be such a dataclass itself. A field without a value has its default.
    """
    annotations = get_type_hints(group)
    arguments = {}
    for field in fields(group):
        kind = annotations[field.name]
        if is_dataclass(kind):
            arguments[field.name] = gathered(kind, values)
        elif field.name in values:
            arguments[field.name] = values.pop(field.name)
    return group(**arguments)


def options_of(group: Any) -> list[inspect.Parameter]:
    """The fields of a dataclass as keyword parameters, under its heading in the help.

    The fields of a dataclass inside it come under that one's heading.
    """
    hints = get_type_hints(group, include_extras=True)
    options: list[inspect.Parameter] = []
    for field in fields(group):
        kind = hints[field.name]
        if is_dataclass(kind):
            options += options_of(kind)
            continue
        option = inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=under_heading(kind, group.PANEL),
        )
        if field.default is not MISSING:
            option = option.replace(default=field.default)
        options.append(option)
    return options


def under_heading(annotation: Any, heading: str) -> Any:
    """The annotation of an option with this heading of the help, unless it names another."""
    kind, *information = get_args(annotation) or (annotation,)
    if not information or not isinstance(information[0], OptionInfo):
        return annotation
    option = copy.copy(information[0])
    option.rich_help_panel = option.rich_help_panel or heading
    return Annotated[kind, option]


def as_duration(seconds: float) -> str:
    """A number of seconds in words.

    >>> as_duration(40), as_duration(1590), as_duration(9000)
    ('1 minute', '27 minutes', '2.5 hours')
    """
    minutes = math.ceil(seconds / 60)
    if minutes > 90:
        return f"{seconds / 3600:.1f} hours"
    if minutes <= 1:
        return "1 minute"
    return f"{minutes} minutes"


def show_forecast(cost: Forecast, *, fit: str = "", besides: str = "") -> dict[str, Any]:
    """Print coverage, passes, time, memory and disk, a line each.

    Args:
        fit: what of it the fit of a posterior takes, in words.
        besides: costs that these do not count, in words.

    Returns:
        The same as plain values.
    """
    rows = {"covers": cost.coverage, "passes": f"{cost.passes:.2f} over the data"}
    if fit:
        rows["fit"] = fit
    rows |= {
        "time": f"about {as_duration(cost.seconds)} (a few examples were timed)",
        "memory": f"about {cost.memory / 2**30:.1f} GiB",
        "disk": f"{cost.disk / 2**20:,.1f} MiB",
    }
    if besides:
        rows["besides"] = besides
    pairs(rows)
    return dry_run(passes=cost.passes, seconds=cost.seconds, memory=cost.memory, disk=cost.disk)


def dry_run(**costs: Any) -> dict[str, Any]:
    """What a dry run returns: its costs, under a name that no run has."""
    return {"dry_run": costs}

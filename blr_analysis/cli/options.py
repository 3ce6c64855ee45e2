"""Options from the functions' own signatures and docstrings, and the set that all commands share.

A command's parameters are its own; those of a dataclass are options that belong together; and what
:func:`takes` names comes from a function, by its name, default and words there. Modules are read
and not imported, so that ``--help`` answers at once.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from blr_analysis.errors import InputError, StorageError
from blr_analysis.terminal import pairs

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    from blr_analysis.posterior import Forecast
    from blr_analysis.task import Task

PACKAGE = Path(__file__).resolve().parent.parent
KINDS: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool}
ARGUMENT = re.compile(r"^    ([a-z_]+(?:, [a-z_]+)*): (.*(?:\n(?:        .*)?)*)", re.MULTILINE)
ROLE = re.compile(r":[a-z]+:`~?([^`]*)`")
UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}{b}": 1000**n for n, letter in enumerate("KMGT", 1) for b in ("", "B")}
UNITS |= {f"{letter}I{b}": 1024**n for n, letter in enumerate("KMGT", 1) for b in ("", "B")}
SIZE = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write tables and pictures here.")
]
Base = Annotated[
    Path | None,
    typer.Option(metavar="MODEL", help="Of an adapter: where its base is, if it was moved."),
]
Text = Annotated[str | None, typer.Option(metavar="COLUMN", help="The texts' column.")]
Length = Annotated[
    int | None, typer.Option(metavar="TOKENS", min=2, help="Kept of longer texts, else refused.")
]


@dataclass(frozen=True)
class Shared:
    """What every command understands."""

    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where to compute: cpu, cuda, mps.")
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Working memory above model and data, such as 1GB."),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace what was written before.")] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and say the cost; write nothing.")
    ] = False
    progress: Annotated[
        bool | None, typer.Option(help="Bars; else on a terminal, when the work is long.")
    ] = None

    @property
    def memory(self) -> int | None:
        """In bytes."""
        return None if self.max_memory is None else read_size("--max-memory", self.max_memory)

    def of(self, task: Task) -> Task:
        """The task, where and in how much memory it shall run."""
        from blr_analysis.task import find_device

        if self.device is not None:
            device = find_device(self.device)
            task.model.to(device)
            task.device = device
        task.memory_budget = self.memory or task.memory_budget
        task.progress = task.progress if self.progress is None else self.progress
        return task

    def free(self, out: Path | None) -> Path | None:
        """Where to write: nothing is there yet, or may be replaced.

        Raises:
            StorageError: something is there, and --force was not given.
        """
        out = None if out is None else out.expanduser()
        taken = out is not None and out.exists() and (not out.is_dir() or any(out.iterdir()))
        if taken and not self.force:
            raise StorageError(f"{str(out)!r} is there already: name another, or give --force.")
        return out

    @contextmanager
    def folder(self, out: Path | None) -> Iterator[Path]:
        """A folder ready to be written, where one was named and this is no dry run."""
        from blr_analysis import ranks
        from blr_analysis.files.placing import folder_for

        if self.dry_run or not ranks.first() or (out := self.free(out)) is None:
            yield Path()
            return
        with folder_for(out) as folder:
            yield folder


def read_size(option: str, text: str) -> int:
    """Bytes, at least 1.

    Raises:
        InputError: no size, named by the option.

    >>> read_size("--max-memory", "1.5GB"), read_size("--max-memory", "2 MiB")
    (1500000000, 2097152)
    """
    match = SIZE.fullmatch(text)
    unit = UNITS.get(match[2].upper()) if match else None
    count = float(match[1]) * unit if match and unit else 0.0
    if not 1 <= count < 2**63:
        raise InputError(f"{option} must be a size such as 500MB, 1GB or 1GiB, got {text!r}")
    return int(count)


def takes(module: str, function: str, *names: str) -> Callable[..., Any]:
    """Gives a command these options of a function; ``"k=top"`` calls its k ``--top``."""

    def added(command: Any) -> Any:
        found = [option(module, function, *name.split("=")) for name in names]
        command.options = [*found, *getattr(command, "options", [])]
        return command

    return added


def option(module: str, function: str, name: str, called: str = "") -> inspect.Parameter:
    """A function's keyword as an option: its default, its kind, and what its docstring says.

    >>> option("sensitivity/what_if.py", "what_if", "seeds").default
    3
    """
    node = next(
        node
        for node in ast.walk(_read(module))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    arg = next(arg for arg in node.args.kwonlyargs if arg.arg == name)
    value = node.args.kw_defaults[node.args.kwonlyargs.index(arg)]
    default = value and ast.literal_eval(value)
    words = {
        each: " ".join(ROLE.sub(r"\1", found[2]).replace("``", "").split())
        for found in ARGUMENT.finditer(ast.get_docstring(node) or "")
        for each in found[1].split(", ")
    }
    kind = KINDS[ast.unparse(arg.annotation or ast.Name("str")).removesuffix(" | None")]
    shown = typer.Option(f"--{(called or name).replace('_', '-')}", help=words[name])
    optional = kind if default is not None else kind | None
    return _keyword(name, Annotated[optional, shown], default)


@cache
def _read(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text("utf-8"))


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def spelled(command: Any) -> Any:
    """The command as typer reads it: every option by itself."""
    own: dict[str, inspect.Parameter] = {}
    last: dict[str, inspect.Parameter] = {}
    groups = {}
    for p in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(p.annotation):
            groups[p.name] = p.annotation
            hints = get_type_hints(p.annotation, include_extras=True)
            for f in fields(p.annotation):
                given = inspect.Parameter.empty if f.default is MISSING else f.default
                place = last if p.annotation is Shared else own
                place[f.name] = _keyword(f.name, hints[f.name], given)
        elif p.kind is not inspect.Parameter.VAR_KEYWORD:
            own[p.name] = _keyword(p.name, p.annotation, p.default)
    taken = {p.name: p for p in getattr(command, "options", [])}
    every = own | taken | last

    def run(**given: Any) -> Any:
        made = {
            name: kind(**{f.name: given.pop(f.name) for f in fields(kind)})
            for name, kind in groups.items()
        }
        return command(**given, **made)

    run.__signature__ = inspect.Signature([*every.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {name: p.annotation for name, p in every.items()}
    return run


def as_duration(seconds: float) -> str:
    """In words.

    >>> as_duration(40), as_duration(1590), as_duration(9000)
    ('1 minute', '27 minutes', '2.5 hours')
    """
    minutes = math.ceil(seconds / 60)
    if minutes > 90:
        return f"{seconds / 3600:.1f} hours"
    return "1 minute" if minutes <= 1 else f"{minutes} minutes"


def show_forecast(cost: Forecast, *, besides: str = "") -> None:
    """Passes, memory and disk, a line each; and what is not counted."""
    pairs(
        {
            "passes": f"{cost.passes:.2f} over the data",
            "time": f"about {as_duration(cost.seconds)}, as a few examples are timed",
            "memory": f"about {cost.memory / 2**30:.1f} GiB",
            "disk": f"{cost.disk / 2**20:,.1f} MiB",
            **({"besides": besides} if besides else {}),
        }
    )

"""The user's own script: SCRIPT.py:NAME, where NAME is a Task or a function that returns one."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from blr_analysis.errors import BLRError, InputError
from blr_analysis.task import Task

MODULE = "blr_analysis_user_script"  # not "__main__": what stands under that guard does not run


def load_tasks(where: str, test: str | None = None) -> tuple[Task, Task | None]:
    """The task that ``SCRIPT.py:NAME`` names and, in the same script, the test task.

    Raises:
        InputError: no such script or name, a script or function that fails, something that is no
            Task. What the user's code raised is named with its line.
    """
    path, name = _parts(where)
    with _beside(path):
        script = _executed(path)
        task = _task(script, name, path)
        return task, None if test is None else _task(script, test, path)


def _parts(where: str) -> tuple[Path, str]:
    path, colon, name = where.rpartition(":")
    if not (colon and path and name.isidentifier()):
        raise InputError(
            f"expected SCRIPT.py:NAME, such as train.py:make_task, got {where!r}; NAME returns a "
            "blr_analysis.Task"
        )
    script = Path(path).expanduser()
    if not script.is_file():
        raise InputError(f"there is no script {path!r} (the folder here is {Path.cwd()})")
    return script, name


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
    if not hasattr(script, name):
        known = ", ".join(_candidates(script)) or "none"
        raise InputError(f"{str(path)!r} defines no {name!r}; its functions and tasks: {known}")
    task = getattr(script, name)
    if callable(task) and not isinstance(task, Task):
        with _blamed(path, f"{name}() in {str(path)!r} failed"):
            task = task()
        what = f"what {name}() in {str(path)!r} returned"
    else:
        what = f"{name} in {str(path)!r}"
    if not isinstance(task, Task):
        raise InputError(
            f"{what} is of type {type(task).__name__}, expected a blr_analysis.Task: "
            "Task(model, data, likelihood=...)"
        )
    return task


def _candidates(script: ModuleType) -> Iterator[str]:
    for name, value in vars(script).items():
        own = callable(value) and getattr(value, "__module__", None) == MODULE
        if not name.startswith("_") and (own or isinstance(value, Task)):
            yield name


@contextmanager
def _beside(path: Path) -> Iterator[None]:
    """The script's folder in front of the import path, as ``python SCRIPT.py`` has it."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _blamed(path: Path, what: str) -> Iterator[None]:
    """Turn what the user's code raises into an InputError that names the line."""
    try:
        yield
    except (Exception, SystemExit) as error:  # the user's own code
        said = str(error) if isinstance(error, BLRError) else f"{type(error).__name__}: {error}"
        raise InputError(f"{what}{_line(error, path)}: {said}") from error


def _line(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f" in line {error.lineno}"
    mine = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == path.resolve()
    ]
    return f" in line {mine[-1]}" if mine else ""

"""From arguments to an exit code: every failure is one line on standard error.

0    done
1    an unexpected fault (``--debug`` shows where)
2    a wrong command line, bad input, or files that cannot be read or written
130  interrupted
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from tqdm import tqdm

from blr_analysis.cli.commands import app
from blr_analysis.errors import BLRError, InputError

NAME = "blr-analysis"
TOGETHER = {"audit", "index", "fisher"}  # the commands that several ranks share
UNEXPECTED = 1
BAD_INPUT = 2
INTERRUPTED = 130
# Raised by a wrong command line: click's error, which newer releases of typer bring themselves.
_BadUsage = typer.BadParameter.__bases__[0].__bases__[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    >>> main(["what-if"])
    2
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"] or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals without Greek letters
    try:
        if "" in arguments:  # typer would take it for the current folder
            raise InputError("an argument is empty: name a value, or leave it out")
        with _together(arguments), warnings.catch_warnings():
            if not debug:
                warnings.showwarning = _warn
            code = app(arguments, prog_name=NAME, standalone_mode=False)
        sys.stdout.flush()
        code = code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:  # typer turns a broken pipe into SystemExit
        if not isinstance(error.__context__ or error, BrokenPipeError):
            raise
        with contextlib.suppress(OSError):  # the reader (``| head``) needs no more: no failure
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        code = _report(error, debug=debug)
    if code == INTERRUPTED:
        print(f"{NAME}: interrupted", file=sys.stderr)
    return code


def _report(error: Exception, *, debug: bool) -> int:
    """Print an error and return its exit code.

    Every rank has the same expected errors, so that only the first one prints them.
    """
    if debug:
        traceback.print_exc()
    is_expected = isinstance(error, (BLRError, _BadUsage))
    ranks = sys.modules.get("blr_analysis.ranks")
    is_first_rank = ranks is None or ranks.first()
    if is_first_rank or not is_expected:
        hint = "" if debug or is_expected else " (--debug shows where)"
        print(f"{NAME}: {_message(error)}{hint}", file=sys.stderr)
    return BAD_INPUT if is_expected else UNEXPECTED


@contextlib.contextmanager
def _together(arguments: Sequence[str]) -> Iterator[None]:
    """Under ``torchrun``, the block runs in the process group; only the first rank prints."""
    if "RANK" not in os.environ:  # torch need not be loaded then
        yield
        return
    from blr_analysis import ranks

    with ranks.opened(), contextlib.ExitStack() as stack:
        if not ranks.first():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        may_run_together = bool({"--help", "-h", "--version", *TOGETHER} & {*arguments})
        if ranks.launched() and not may_run_together:
            raise InputError(f"{arguments[0]} runs alone: start it without torchrun")
        yield


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line, without the place in the code where it was raised."""
    tqdm.write(f"warning: {_one_line(str(message))}", file=sys.stderr)


def _message(error: Exception) -> str:
    """The message of an error in one line."""
    if isinstance(error, _BadUsage):
        command = getattr(getattr(error, "ctx", None), "command_path", NAME)
        text = error.format_message()  # type: ignore[attr-defined]
        return f"{_one_line(text).rstrip('.')}; see {command} --help"
    if isinstance(error, BLRError):
        return _one_line(str(error))
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"unexpected {type(error).__name__}: {_one_line(str(error))}"


def _one_line(text: str) -> str:
    return " ".join(text.split())

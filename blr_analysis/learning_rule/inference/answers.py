"""What functions that a user gives (a likelihood, a kernel, a loss) must answer with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import BLRError, InputError


def answer(wanted: str, shape: torch.Size, function: Callable[..., Any], *given: Any) -> Tensor:
    """``function(*given)``, a tensor of this shape.

    Args:
        wanted: what the function must be, in words.
        shape: of its answer.
        function: the user's.
        given: its arguments.

    Raises:
        InputError: it raises something, or answers with something else.

    >>> answer("f must be a function x -> y [N]", torch.Size([2]), torch.sum, torch.ones(2))
    Traceback (most recent call last):
    ...
    blr_analysis.errors.InputError: f must be a function x -> y [N], here [2]; it gave []
    """
    try:
        value = function(*given)
    except BLRError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise InputError(f"{wanted}; it raised {reason}") from error
    if not isinstance(value, Tensor) or value.shape != shape:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{wanted}, here {list(shape)}; it gave {got}")
    return value

"""What a state-space model and its series must be before the filter takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import instance
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.gaussian import FullGaussian

# Every matrix or offset: how many dimensions it has at one time, and whether it moves the state
# from one time to the next (so that a series of T observations has T − 1 of them).
PARTS = {
    "transition": (2, True),
    "transition_noise": (2, True),
    "transition_offset": (1, True),
    "observation": (2, False),
    "observation_noise": (2, False),
    "observation_offset": (1, False),
}


def checked_matrices(model: Any) -> dict[str, Tensor]:
    """The parts of a model in the dtype of its prior, by name.

    Raises:
        InputError: shapes that do not fit each other, values that are not finite, or noise whose
            covariance is no covariance.
    """
    instance("prior", model.prior, FullGaussian, "a FullGaussian")
    if model.prior.mean.ndim != 1:
        raise InputError("the prior of the first state is one distribution, not copies")
    for name, (rank, _) in PARTS.items():
        if rank == 2 or getattr(model, name) is not None:
            instance(name, getattr(model, name), Tensor, "a tensor")
    if model.observation.ndim < 2 or not model.observation.shape[-2]:
        found = tuple(model.observation.shape)
        raise InputError(f"observation must be a matrix of one row or more, got {found}")
    size, seen = model.prior.mean.shape[0], model.observation.shape[-2]
    wanted = {"transition": (size, size), "observation": (seen, size)}
    found = {}
    for name, (rank, moves) in PARTS.items():
        value = getattr(model, name)
        if value is None:
            continue
        shape = wanted.get(name, ((size,) if moves else (seen,)) * rank)
        if value.shape[max(value.ndim - rank, 0) :] != shape or value.ndim > rank + 1:
            raise InputError(
                f"{name} must be {list(shape)}, with or without a leading dimension of time, got "
                f"{tuple(value.shape)}"
            )
        if value.is_complex():
            raise InputError(f"{name} must be real, got {value.dtype}")
        if not bool(torch.isfinite(value).all()):
            raise InputError(f"{name} is not finite")
        found[name] = value.to(model.prior.mean)
    _check_covariance("transition_noise", found["transition_noise"], singular=True)
    _check_covariance("observation_noise", found["observation_noise"], singular=False)
    return found


def checked_series(model: Any, data: Any) -> Tensor:
    """The series ``[T, E]`` in the dtype of the model, NaN where nothing was observed.

    Raises:
        DataError: misshapen, empty, infinite, or not as long as the model's matrices say.
    """
    seen = model.observation.shape[-2]
    if not isinstance(data, Tensor) or data.ndim != 2 or not len(data) or data.shape[1] != seen:
        found = tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__
        raise DataError(f"the series must be a non-empty tensor [T, {seen}], got {found}")
    if data.is_complex():
        raise DataError(f"the series must be real, got {data.dtype}")
    if bool(torch.isinf(data).any()):
        raise DataError(f"the series is infinite at time {int(data.isinf().any(1).nonzero()[0])}")
    for name, (rank, moves) in PARTS.items():
        value, times = getattr(model, name), len(data) - moves
        if value is not None and value.ndim > rank and len(value) != times:
            raise DataError(
                f"{name} varies over {len(value)} times, but a series of {len(data)} observations "
                f"needs {times}"
            )
    return data.to(model.prior.mean)


def checked_observation(model: Any, y: Any) -> Tensor:
    """One observation ``[E]`` in the dtype of the model.

    Raises:
        DataError: another shape.
    """
    seen = model.observation.shape[-2]
    if not isinstance(y, Tensor) or y.shape != (seen,):
        found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise DataError(f"an observation must be a tensor [{seen}], got {found}")
    return y.to(model.prior.mean)


def _check_covariance(name: str, value: Tensor, *, singular: bool) -> None:
    if not bool(torch.isclose(value, value.mT).all()):
        raise InputError(f"{name} is not symmetric")
    smallest, size = torch.linalg.eigvalsh(value).min(), value.abs().max()
    if smallest < -1e-6 * size or (not singular and smallest <= 0):
        kind = "positive semi-definite" if singular else "positive definite"
        raise InputError(f"{name} is not {kind}: its smallest eigenvalue is {float(smallest):.3g}")

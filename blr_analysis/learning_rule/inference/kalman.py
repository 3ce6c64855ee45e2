"""Kalman filter and smoother: conjugate Bayes along a chain, ρ = 1 (Khan & Rue, section 5.1).

    x_1 ~ prior,   x_{t+1} = F x_t + b + w,  w ~ N(0, Q),   y_t = H x_t + d + v,  v ~ N(0, R)

The filter predicts the next state and takes one step of the rule with the observation's site

    λ̃_t = (Hᵀ R⁻¹ (y_t − d), −½ Hᵀ R⁻¹ H).

The smoother adds what the future says of x_t, a natural parameter as well: with J and h the
precision and the linear part of site and message at t+1, the message at t has

    Fᵀ (I + J Q)⁻¹ J F      and      Fᵀ (I + J Q)⁻¹ (h − J b),

and the marginal of x_t is the sum past + present + future. That is Rauch, Tung and Striebel's
smoother in information form; Q may be singular, and the prior as vague as one likes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import instance
from blr_analysis.data import chosen_indices
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import Natural, add, subtract
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.inference.conjugate import bayes
from blr_analysis.learning_rule.inference.fitted import Fitted
from blr_analysis.progress import track

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


@dataclass(frozen=True, eq=False)
class StateSpace:
    """A linear-Gaussian state-space model, in the prior's dtype.

    Each matrix is one for all times, or has a leading dimension: T for the observations, T − 1
    (t → t + 1) for the transitions.

    Attributes:
        transition: F ``[D, D]``.
        transition_noise: the covariance Q ``[D, D]``; may be singular.
        observation: H ``[E, D]``.
        observation_noise: the covariance R ``[E, E]``, positive definite.
        prior: the distribution of the first state; a precision near 0 leaves it to the data.
        transition_offset: b ``[D]``; None for 0.
        observation_offset: d ``[E]``; None for 0.

    Raises:
        InputError: shapes that do not fit each other, values that are not finite, or noise
            whose covariance is no covariance.

    Example:
        A random walk, seen with noise, and the second observation missing:

        >>> one = torch.eye(1, dtype=torch.float64)
        >>> prior = FullGaussian(torch.zeros(1, dtype=torch.float64), 1e-9 * one)
        >>> fitted = StateSpace(one, one, one, one, prior).fit(
        ...     torch.tensor([[1.0], [math.nan], [4.0]])
        ... )
        >>> fitted.q.mean.flatten()
        tensor([1.7500, 2.5000, 3.2500], dtype=torch.float64)
    """

    transition: Tensor
    transition_noise: Tensor
    observation: Tensor
    observation_noise: Tensor
    prior: FullGaussian
    transition_offset: Tensor | None = None
    observation_offset: Tensor | None = None

    def __post_init__(self) -> None:
        instance("prior", self.prior, FullGaussian, "a FullGaussian")
        if self.prior.mean.ndim != 1:
            raise InputError("the prior of the first state is one distribution, not copies")
        for name, (rank, _) in PARTS.items():
            if rank == 2 or getattr(self, name) is not None:
                instance(name, getattr(self, name), Tensor, "a tensor")
        if self.observation.ndim < 2 or not self.observation.shape[-2]:
            raise InputError(f"observation must be a matrix, got {tuple(self.observation.shape)}")
        size, seen = len(self.prior.mean), self.observation.shape[-2]
        for name, (rank, moves) in PARTS.items():
            if (value := getattr(self, name)) is None:
                continue
            shape = (
                (seen, size) if name == "observation" else ((size,) if moves else (seen,)) * rank
            )
            if value.shape[max(value.ndim - rank, 0) :] != shape or value.ndim > rank + 1:
                raise InputError(
                    f"{name} must be {list(shape)}, or that for each time, got {list(value.shape)}"
                )
            if value.is_complex() or not bool(torch.isfinite(value).all()):
                raise InputError(f"{name} must be real and finite")
            object.__setattr__(self, name, value.to(self.prior.mean))
        _check_covariance("transition_noise", self.transition_noise, singular=True)
        _check_covariance("observation_noise", self.observation_noise, singular=False)

    def fit(self, data: Tensor, *, progress: bool | None = None) -> FittedStates:
        """Filter and smooth a series.

        Args:
            data: y ``[T, E]``; NaN where a component was not observed (if none was, the
                states are the prior's predictions, and the log-likelihood is 0).
            progress: whether to show a bar; None shows it on a terminal after a second.

        Returns:
            The marginals of all states given all observations, as T copies of a Gaussian; the
            history is Σ_{s≤t} log p(y_s | y_1 … y_{s−1}), one number for each t.

        Raises:
            DataError: a series that is misshapen, empty, infinite somewhere, or so far off that
                its log-likelihood is.
            InputError: a state without uncertainty in some direction.
        """
        data = self._series(data)
        sites = _stack([self.site(t, y) for t, y in enumerate(data)])
        predicted, filtered, history = self._filter(data, sites, progress)
        q = self._smooth(filtered, sites)
        return FittedStates(
            q=q,
            history=history,
            objective="log-likelihood",
            prior=None,
            n_data=len(data),
            site_of=lambda chosen: {k: v[chosen] for k, v in sites.items()},
            predictive=self.log_predictive,
            data=data,
            step=self._step,
            model=self,
            predicted=predicted,
            filtered=filtered,
        )

    def _step(self, q: FullGaussian, data: Tensor, kept: Tensor) -> FullGaussian:
        """The states of ``q`` by these observations; exact, so that it rests at once."""
        seen = torch.full_like(data, math.nan)
        seen[kept] = data[kept]
        states, size = self.fit(seen, progress=False).q, len(q.mean)
        return FullGaussian(states.mean[:size], states.precision[:size])

    def site(self, time: int, y: Tensor) -> Natural:
        """λ̃_t of the components of y_t ``[E]`` that were observed.

        Raises:
            DataError: an observation of another shape.
        """
        size = self.observation.shape[-2]
        if not isinstance(y, Tensor) or y.shape != (size,):
            got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise DataError(f"an observation must be a tensor [{size}], got {got}")
        y = y.to(self.prior.mean)
        seen = ~torch.isnan(y)
        matrix, noise, offset = self._observed(time, seen)
        weighted = torch.linalg.solve(noise, matrix).mT
        return {"linear": weighted @ (y[seen] - offset), "square": -0.5 * weighted @ matrix}

    def log_predictive(self, q: FullGaussian, data: Tensor) -> Tensor:
        """log p(y_t) with x_t ~ the t-th copy of ``q``, ``[T]``; 0 where nothing was observed.

        Raises:
            DataError: a series that is misshapen, or not as long as the states.
        """
        data = self._series(data)
        if len(data) != len(q.mean):
            raise DataError(f"{len(q.mean)} states need as many observations, got {len(data)}")
        means, covariances = q.mean, q.covariance
        scores = [self._score(t, means[t], covariances[t], y) for t, y in enumerate(data)]
        return torch.stack(scores)

    def _series(self, data: Any) -> Tensor:
        """The series ``[T, E]`` in the dtype of the model, or what is wrong with it."""
        seen = self.observation.shape[-2]
        if not isinstance(data, Tensor) or data.ndim != 2 or not len(data) or data.shape[1] != seen:
            got = list(data.shape) if isinstance(data, Tensor) else type(data).__name__
            raise DataError(f"the series must be a non-empty tensor [T, {seen}], got {got}")
        if data.is_complex():
            raise DataError(f"the series must be real, got {data.dtype}")
        if bool(torch.isinf(data).any()):
            time = int(data.isinf().any(1).nonzero()[0])
            raise DataError(f"the series is infinite at time {time}")
        for name, (rank, moves) in PARTS.items():
            value, times = getattr(self, name), len(data) - moves
            if value is not None and value.ndim > rank and len(value) != times:
                raise DataError(f"{name} has {len(value)} times, but needs {times}")
        return data.to(self.prior.mean)

    def _score(self, time: int, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        seen = ~torch.isnan(y)
        matrix, noise, offset = self._observed(time, seen)
        factor = torch.linalg.cholesky(matrix @ covariance @ matrix.mT + noise)
        residual = (y[seen] - matrix @ mean - offset).unsqueeze(-1)
        scaled = torch.linalg.solve_triangular(factor, residual, upper=False)
        logdet = 2 * factor.diagonal().log().sum()
        return -0.5 * (scaled.square().sum() + logdet + int(seen.sum()) * math.log(2 * math.pi))

    def _observed(self, time: int, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        noise = _at(self.observation_noise, time, 2)[seen][:, seen]
        offset = self.observation_offset
        offset = noise.new_zeros(len(noise)) if offset is None else _at(offset, time, 1)[seen]
        return _at(self.observation, time, 2)[seen], noise, offset

    def _moves(self, time: int) -> tuple[Tensor, Tensor, Tensor]:
        move, offset = _at(self.transition, time, 2), self.transition_offset
        offset = move.new_zeros(len(move)) if offset is None else _at(offset, time, 1)
        return move, _at(self.transition_noise, time, 2), offset

    def _filter(
        self, data: Tensor, sites: Natural, progress: bool | None
    ) -> tuple[FullGaussian, FullGaussian, list[float]]:
        predicted, filtered, history, total = [], [], [], 0.0
        ahead = self.prior
        for t in track(range(len(data)), label="filtering", show=progress):
            if t:
                ahead = self._predict(filtered[-1], t - 1)
            total += float(self._score(t, ahead.mean, ahead.covariance, data[t]).detach())
            predicted.append(ahead)
            filtered.append(bayes(ahead, {k: v[t] for k, v in sites.items()}))
            if not math.isfinite(total):
                raise DataError(f"the log-likelihood is {total} from time {t} on: scale the series")
            history.append(total)
        return _copies(predicted), _copies(filtered), history

    def _predict(self, state: FullGaussian, time: int) -> FullGaussian:
        move, noise, offset = self._moves(time)
        covariance = move @ state.covariance @ move.mT + noise
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if bool(failed):
            raise InputError(
                f"the predicted covariance of state {time + 1} is singular: raise transition_noise"
            )
        return FullGaussian(move @ state.mean + offset, torch.cholesky_inverse(factor))

    def _smooth(self, filtered: FullGaussian, sites: Natural) -> FullGaussian:
        message = {k: torch.zeros_like(v[0]) for k, v in sites.items()}
        messages = [message]
        for t in reversed(range(len(filtered.mean) - 1)):
            message = self._backward(add(message, {k: v[t + 1] for k, v in sites.items()}), t)
            messages.append(message)
        return filtered.with_natural(add(filtered.natural, _stack(messages[::-1])))

    def _backward(self, ahead: Natural, time: int) -> Natural:
        """What x_t is told by everything after it, from the same for x_{t+1} and its site."""
        move, noise, offset = self._moves(time)
        precision = -2 * ahead["square"]
        damped = torch.linalg.solve(torch.eye(len(move)).to(move) + noise @ precision, move).mT
        folded = damped @ precision @ move
        linear = damped @ (ahead["linear"] - precision @ offset)
        return {"linear": linear, "square": -0.25 * (folded + folded.mT)}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FittedStates(Fitted[FullGaussian]):
    """Smoothed states; ``q`` has a copy for each time, and examples are observations.

    Attributes:
        model: the state-space model.
        predicted: x_t given y_1 … y_{t−1}, a copy for each t.
        filtered: x_t given y_1 … y_t.

    Example:
        A random walk from N(0, 1): what is filtered has seen the present, what is smoothed all.

        >>> one = torch.eye(1, dtype=torch.float64)
        >>> prior = FullGaussian(torch.zeros(1, dtype=torch.float64), one)
        >>> fitted = StateSpace(one, one, one, one, prior).fit(torch.tensor([[1.0], [4.0]]))
        >>> fitted.filtered.mean.flatten()
        tensor([0.5000, 2.6000], dtype=torch.float64)
        >>> fitted.q.mean.flatten()
        tensor([1.2000, 2.6000], dtype=torch.float64)
        >>> fitted.without([1]).mean.flatten()
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    model: StateSpace
    predicted: FullGaussian
    filtered: FullGaussian

    def without(self, indices: Any) -> FullGaussian:
        """The states without these observations: their sites leave the chain, exactly.

        Raises:
            InputError: a time that does not exist.
        """
        data = self.data.clone()
        data[chosen_indices(indices, self.n_data)] = math.nan
        return self.model.fit(data, progress=False).q

    def left_out(self) -> Tensor:
        """log p(y_t | all other observations), in nats ``[T]``; exact, in one pass.

        A site touches only its own state, so that the marginal without it is λ_t − λ̃_t. Where the
        noise of observations is far below that of the states, by 1e4 in single precision and by
        1e10 in double, nearly nothing is left of that difference but rounding.
        """
        cavities = self.q.with_natural(subtract(self.q.natural, self.sites))  # type: ignore[arg-type]
        return self.model.log_predictive(cavities, self.data)


def _at(value: Tensor, time: int, rank: int) -> Tensor:
    return value[time] if value.ndim > rank else value


def _stack(parts: list[Natural]) -> Natural:
    return {k: torch.stack([part[k] for part in parts]) for k in parts[0]}


def _copies(parts: list[FullGaussian]) -> FullGaussian:
    means, precisions = [p.mean for p in parts], [p.precision for p in parts]
    return FullGaussian(torch.stack(means), torch.stack(precisions))


def _check_covariance(name: str, value: Tensor, *, singular: bool) -> None:
    smallest, size = torch.linalg.eigvalsh(value).min(), value.abs().max()
    if not bool(torch.isclose(value, value.mT).all()):
        raise InputError(f"{name} is not symmetric")
    if smallest < -1e-6 * size or (not singular and smallest <= 0):
        kind = "positive semi-definite" if singular else "positive definite"
        raise InputError(f"{name} is not {kind}: its smallest eigenvalue is {float(smallest):.3g}")

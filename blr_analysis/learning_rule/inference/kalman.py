"""Kalman filter and smoother: conjugate Bayes along a chain, ρ = 1 (Khan & Rue, section 5.1).

    x_1 ~ prior,   x_{t+1} = F x_t + w,  w ~ N(0, Q),   y_t = H x_t + v,  v ~ N(0, R)

The filter predicts the next state and takes one step of the rule with the observation's site

    λ̃_t = (Hᵀ R⁻¹ y_t, −½ Hᵀ R⁻¹ H).

The smoother adds a message from the future to x_t, a natural parameter as well: with J and h the
precision and the linear part of site and message at t+1, the message at t has

    Fᵀ (I + J Q)⁻¹ J F      and      Fᵀ (I + J Q)⁻¹ h,

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
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import Natural, add, subtract
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.inference.conjugate import bayes, wide
from blr_analysis.learning_rule.inference.fitted import Fitted, Model, joined, rows, stacked
from blr_analysis.progress import track


@dataclass(frozen=True, eq=False)
class StateSpace(Model):
    """A linear-Gaussian state-space model, in double precision.

    Attributes:
        transition: F ``[D, D]``.
        transition_noise: the covariance Q ``[D, D]``; may be singular.
        observation: H ``[E, D]``.
        observation_noise: the covariance R ``[E, E]``, positive definite.
        prior: the distribution of the first state; a precision near 0 leaves it to the data.

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

    def __post_init__(self) -> None:
        instance("prior", self.prior, FullGaussian, "a FullGaussian")
        if self.prior.mean.ndim != 1:
            raise InputError("the prior of the first state is one distribution, not copies")
        object.__setattr__(self, "prior", wide(self.prior))
        instance("observation", self.observation, Tensor, "a matrix [E, D]")
        n_state = len(self.prior.mean)
        n_observed = len(self.observation)
        self._check_matrix("transition", (n_state, n_state))
        self._check_matrix("transition_noise", (n_state, n_state))
        self._check_matrix("observation", (n_observed, n_state))
        self._check_matrix("observation_noise", (n_observed, n_observed))
        self._check_covariance("transition_noise", least=-1e-6)
        self._check_covariance("observation_noise", least=1e-15)

    def _check_matrix(self, name: str, shape: tuple[int, int]) -> None:
        value = getattr(self, name)
        if not isinstance(value, Tensor) or value.shape != shape or value.is_complex():
            raise InputError(f"{name} must be a real matrix {[*shape]}")
        if not value.numel() or not bool(torch.isfinite(value).all()):
            raise InputError(f"{name} must be finite, and not empty")
        object.__setattr__(self, name, value.to(self.prior.mean))

    def _check_covariance(self, name: str, *, least: float) -> None:
        """``least``: of the largest entry, a bound that every eigenvalue lies above."""
        value = getattr(self, name)
        largest = value.abs().max().clamp(min=1e-300)
        is_symmetric = (value - value.mT).abs().max() <= 1e-8 * largest
        if not is_symmetric or torch.linalg.eigvalsh(value).min() <= least * largest:
            raise InputError(f"{name} is no covariance: not symmetric, or not positive")

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
        data = self.check(data)
        sites = self.sites(None, data)
        predicted, filtered, history = self._filter(data, sites, progress)
        return FittedStates(
            q=self._smooth(filtered, sites),
            history=history,
            objective="log-likelihood",
            model=self,
            data=data,
            messages=sites,
            predicted=predicted,
            filtered=filtered,
        )

    def check(self, data: Any) -> Tensor:
        size = self.observation.shape[-2]
        shape = list(data.shape) if isinstance(data, Tensor) else type(data).__name__
        is_series = isinstance(data, Tensor) and data.ndim == 2 and len(data) > 0
        if not is_series or data.shape[1] != size:
            raise DataError(f"the series must be a non-empty tensor [T, {size}], got {shape}")
        if data.is_complex() or bool(torch.isinf(data).any()):
            raise DataError("the series must be real, and finite or NaN where nothing was observed")
        return data.to(self.prior.mean)

    def sites(self, q: Any, data: Tensor) -> Natural:
        """λ̃_t of the components of every y_t that were observed."""
        return stacked([_site(*self._observed(y)) for y in data])

    def step(self, q: FullGaussian, data: Tensor) -> FullGaussian:
        """The states of ``q`` by these observations; exact, so that it rests at once."""
        states = self.fit(data, progress=False).q
        count = len(q.mean)
        return FullGaussian(states.mean[:count], states.precision[:count])

    def log_predictive(self, q: FullGaussian, data: Tensor) -> Tensor:
        """log p(y_t) with x_t ~ the t-th copy of ``q``, ``[T]``; 0 where nothing was observed."""
        if len(data) != len(q.mean):
            raise DataError(f"{len(q.mean)} states need as many observations, got {len(data)}")
        states = zip(q.mean, q.covariance, data, strict=True)
        return torch.stack([_score(m, v, *self._observed(y)) for m, v, y in states])

    def _observed(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H, R and y of the components that were observed."""
        is_observed = ~torch.isnan(y)
        return (
            self.observation[is_observed],
            self.observation_noise[is_observed][:, is_observed],
            y[is_observed],
        )

    def _filter(
        self, data: Tensor, sites: Natural, progress: bool | None
    ) -> tuple[FullGaussian, FullGaussian, list[float]]:
        predicted: list[FullGaussian] = []
        filtered: list[FullGaussian] = []
        history: list[float] = []
        total = 0.0
        for t in track(range(len(data)), label="filtering", show=progress):
            ahead = self._predicted(filtered[-1]) if t else self.prior
            score = _score(ahead.mean, ahead.covariance, *self._observed(data[t]))
            total += float(score.detach())
            if not math.isfinite(total):
                raise DataError(f"the log-likelihood is {total} from time {t} on: scale the series")
            predicted.append(ahead)
            filtered.append(bayes(ahead, rows(sites, torch.tensor(t))))
            history.append(total)
        return _copies(predicted), _copies(filtered), history

    def _predicted(self, state: FullGaussian) -> FullGaussian:
        move = self.transition
        covariance = move @ state.covariance @ move.mT + self.transition_noise
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if bool(failed):
            raise InputError("a predicted covariance is singular: raise transition_noise")
        return FullGaussian(move @ state.mean, torch.cholesky_inverse(factor))

    def _smooth(self, filtered: FullGaussian, sites: Natural) -> FullGaussian:
        message = {k: torch.zeros_like(v[0]) for k, v in sites.items()}
        messages = [message]
        for t in reversed(range(1, len(filtered.mean))):
            message = self._backward(add(message, rows(sites, torch.tensor(t))))
            messages.append(message)
        return filtered.with_natural(add(filtered.natural, stacked(messages[::-1])))

    def _backward(self, ahead: Natural) -> Natural:
        """The message to x_t from everything after it, by the one to x_{t+1} and its site."""
        move = self.transition
        precision = -2 * ahead["square"]
        damping = torch.eye(len(move)).to(move) + self.transition_noise @ precision
        damped = torch.linalg.solve(damping, move).mT
        folded = damped @ precision @ move
        return {"linear": damped @ ahead["linear"], "square": -0.25 * (folded + folded.mT)}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FittedStates(Fitted[FullGaussian]):
    """Smoothed states; ``q`` has a copy for each time, and examples are observations.

    Attributes:
        predicted: x_t given y_1 … y_{t−1}, a copy for each t.
        filtered: x_t given y_1 … y_t.

    Example:
        A random walk from N(0, 1): filtered states have seen the present, smoothed ones all.

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

    predicted: FullGaussian
    filtered: FullGaussian

    def without(self, indices: Any) -> FullGaussian:
        """The states without these observations: their sites leave the chain, exactly.

        Raises:
            InputError: a time that does not exist.
        """
        return self.model.fit(self._changed(self._chosen(indices), None), progress=False).q

    def left_out(self) -> Tensor:
        """log p(y_t | all other observations), in nats ``[T]``; exact, in one pass.

        A site touches only its own state, so that the marginal without it is λ_t − λ̃_t. Where the
        noise of observations is below that of the states by 1e10, nearly nothing is left of that
        difference but rounding.
        """
        cavities = self.q.with_natural(subtract(self.q.natural, self.sites))  # type: ignore[arg-type]
        return self.model.log_predictive(cavities, self.data)

    def _changed(self, removed: Tensor, add: Any) -> Tensor:
        data = self.data.clone()
        data[removed] = math.nan
        return data if add is None else joined(data, self.model.check(add))


def _copies(states: list[FullGaussian]) -> FullGaussian:
    """One distribution with a copy for each of these."""
    return FullGaussian(**stacked([vars(state) for state in states]))


def _site(matrix: Tensor, noise: Tensor, y: Tensor) -> Natural:
    weighted = torch.linalg.solve(noise, matrix).mT
    return {"linear": weighted @ y, "square": -0.5 * weighted @ matrix}


def _score(mean: Tensor, covariance: Tensor, matrix: Tensor, noise: Tensor, y: Tensor) -> Tensor:
    """log N(y | H m, H V Hᵀ + R)."""
    spread = matrix @ covariance @ matrix.mT + noise
    residual = y - matrix @ mean
    square = residual @ torch.linalg.solve(spread, residual)
    return -0.5 * (square + torch.logdet(2 * math.pi * spread))

"""Kalman filter and smoother: conjugate Bayes along a chain, ρ = 1 (Khan & Rue, section 5.1).

    x_1 ~ prior,   x_{t+1} = F x_t + w,  w ~ N(0, Q),   y_t = H x_t + v,  v ~ N(0, R)

The filter predicts the next state and takes one step of the rule with the observation's site

    λ̃_t = (Hᵀ R⁻¹ y_t, −½ Hᵀ R⁻¹ H).

The smoother adds a message from the future, which is a natural parameter as well. Let J and h be
the precision and the linear part of everything that is known of x_{t+1} from times t+1 and later.
Then the message to x_t has the precision and the linear part

    Fᵀ (I + J Q)⁻¹ J F      and      Fᵀ (I + J Q)⁻¹ h,

and the natural parameters of x_t are the sum of past, present and future. This is the smoother of
Rauch, Tung and Striebel in information form. Q may be singular, and the prior arbitrarily vague.
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

# All three are shares of the largest entry of a covariance.
ASYMMETRY = 1e-8  # which rounding may leave
NEGATIVE_BY_ROUNDING = -1e-6  # smallest eigenvalue of Q, which may be singular
POSITIVE = 1e-15  # smallest eigenvalue of R, which is inverted


@dataclass(frozen=True, eq=False)
class StateSpace(Model):
    """A linear-Gaussian state-space model, in double precision.

    Attributes:
        transition: F ``[D, D]``.
        transition_noise: the covariance Q ``[D, D]``; may be singular.
        observation: H ``[E, D]``.
        observation_noise: the covariance R ``[E, E]``, positive definite.
        prior: the distribution of the first state; with a precision near 0 the data alone decide.

    Raises:
        InputError: shapes do not fit each other, values are not finite, or a covariance is not
            symmetric and positive.

    Example:
        A random walk with noisy observations, of which the second is missing:

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
        self._check_covariance("transition_noise", least=NEGATIVE_BY_ROUNDING)
        self._check_covariance("observation_noise", least=POSITIVE)

    def _check_matrix(self, name: str, shape: tuple[int, int]) -> None:
        """Refuse another shape or infinite entries; turn the field to the prior's precision."""
        value = getattr(self, name)
        if not isinstance(value, Tensor) or value.shape != shape or value.is_complex():
            raise InputError(f"{name} must be a real matrix {[*shape]}")
        if not value.numel() or not bool(torch.isfinite(value).all()):
            raise InputError(f"{name} must be finite, and not empty")
        object.__setattr__(self, name, value.to(self.prior.mean))

    def _check_covariance(self, name: str, *, least: float) -> None:
        """Refuse a matrix with an eigenvalue of at most ``least`` times its largest entry."""
        value = getattr(self, name)
        largest = value.abs().max().clamp(min=1e-300)  # a matrix of zeros is a covariance
        is_symmetric = (value - value.mT).abs().max() <= ASYMMETRY * largest
        if not is_symmetric or torch.linalg.eigvalsh(value).min() <= least * largest:
            raise InputError(f"{name} is no covariance: not symmetric, or not positive")

    def fit(self, data: Tensor, *, progress: bool | None = None) -> FittedStates:
        """Filter and smooth a series.

        Args:
            data: y ``[T, E]``; NaN where a component was not observed. Without any observation
                the states are the prior's predictions, and the log-likelihood is 0.
            progress: whether to show a bar; None shows it on a terminal after a second.

        Returns:
            The marginals of all T states given all observations, as one Gaussian with a leading
            dimension T. ``history`` is Σ_{s≤t} log p(y_s | y_1 … y_{s−1}), one number for each t.

        Raises:
            DataError: the series is misshapen, empty, infinite somewhere, or so far from the
                model that its log-likelihood is infinite.
            InputError: a state has no uncertainty in some direction.
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
        """λ̃_t of each time ``[T]``, from the components of y_t that were observed."""
        return stacked([self._site(y) for y in data])

    def step(self, q: FullGaussian, data: Tensor) -> FullGaussian:
        """The first len(q) states given these observations: exact, so a further step moves none."""
        states = self.fit(data, progress=False).q
        n_states = len(q.mean)
        return FullGaussian(states.mean[:n_states], states.precision[:n_states])

    def log_predictive(self, q: FullGaussian, data: Tensor) -> Tensor:
        """log p(y_t) in nats, with x_t ~ the t-th entry of ``q``, ``[T]``; 0 of no observation."""
        if len(data) != len(q.mean):
            raise DataError(f"{len(q.mean)} states need as many observations, got {len(data)}")
        states = zip(q.mean, q.covariance, data, strict=True)
        return torch.stack([self._score(mean, covariance, y) for mean, covariance, y in states])

    def _observed(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H, R and y of the components that were observed."""
        is_observed = ~torch.isnan(y)
        return (
            self.observation[is_observed],
            self.observation_noise[is_observed][:, is_observed],
            y[is_observed],
        )

    def _site(self, y: Tensor) -> Natural:
        """λ̃ = (Hᵀ R⁻¹ y, −½ Hᵀ R⁻¹ H) of one observation."""
        matrix, noise, y = self._observed(y)
        weighted = torch.linalg.solve(noise, matrix).mT
        return {"linear": weighted @ y, "square": -0.5 * weighted @ matrix}

    def _score(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        """log N(y | H m, H V Hᵀ + R) of one observation, for a state N(m, V); in nats."""
        matrix, noise, y = self._observed(y)
        predicted_covariance = matrix @ covariance @ matrix.mT + noise
        residual = y - matrix @ mean
        square = residual @ torch.linalg.solve(predicted_covariance, residual)
        return -0.5 * (square + torch.logdet(2 * math.pi * predicted_covariance))

    def _filter(
        self, data: Tensor, sites: Natural, progress: bool | None
    ) -> tuple[FullGaussian, FullGaussian, list[float]]:
        """x_t given y_1 … y_{t−1}, x_t given y_1 … y_t, and the log-likelihood up to each t."""
        predicted: list[FullGaussian] = []
        filtered: list[FullGaussian] = []
        history: list[float] = []
        log_likelihood = 0.0
        for t in track(range(len(data)), label="filtering", show=progress):
            prediction = self._predicted(filtered[-1]) if t > 0 else self.prior
            score = self._score(prediction.mean, prediction.covariance, data[t])
            log_likelihood += float(score.detach())
            if not math.isfinite(log_likelihood):
                raise DataError(
                    f"the log-likelihood is {log_likelihood} from time {t} on: scale the series"
                )
            predicted.append(prediction)
            filtered.append(bayes(prediction, _at(sites, t)))
            history.append(log_likelihood)
        return _as_one(predicted), _as_one(filtered), history

    def _predicted(self, state: FullGaussian) -> FullGaussian:
        """The next state, F x + w, from this one."""
        transition = self.transition
        covariance = transition @ state.covariance @ transition.mT + self.transition_noise
        factor, failure = torch.linalg.cholesky_ex(covariance)
        if int(failure) != 0:
            raise InputError("a predicted covariance is singular: raise transition_noise")
        return FullGaussian(transition @ state.mean, torch.cholesky_inverse(factor))

    def _smooth(self, filtered: FullGaussian, sites: Natural) -> FullGaussian:
        """Every state given all observations: filtered, and multiplied by its future's message."""
        message = {name: torch.zeros_like(site[0]) for name, site in sites.items()}
        messages = [message]
        for t in reversed(range(1, len(filtered.mean))):
            message = self._backward(add(message, _at(sites, t)))
            messages.append(message)
        from_future = stacked(messages[::-1])
        return filtered.with_natural(add(filtered.natural, from_future))

    def _backward(self, ahead: Natural) -> Natural:
        """The message to x_t from its future; ``ahead`` is the sum of message and site at t+1."""
        transition = self.transition
        precision = -2 * ahead["square"]  # J
        identity = torch.eye(len(transition)).to(transition)
        damping = identity + self.transition_noise @ precision
        damped = torch.linalg.solve(damping, transition).mT  # Fᵀ (I + J Q)⁻¹
        message_precision = damped @ precision @ transition
        symmetric_precision = 0.5 * (message_precision + message_precision.mT)
        return {"linear": damped @ ahead["linear"], "square": -0.5 * symmetric_precision}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FittedStates(Fitted[FullGaussian]):
    """Smoothed states: ``q`` has a leading dimension T, and the examples are the observations.

    Attributes:
        predicted: x_t given y_1 … y_{t−1}, with a leading dimension T.
        filtered: x_t given y_1 … y_t, with a leading dimension T.

    Example:
        A random walk from N(0, 1). A filtered state depends on the past and the present, a
        smoothed state on the future as well.

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
        """The states given all but these observations; exact, by filtering and smoothing again.

        Raises:
            InputError: there is no observation of this index.
        """
        remaining = self._changed(self._chosen(indices), None)
        return self.model.fit(remaining, progress=False).q

    def left_out(self) -> Tensor:
        """log p(y_t | all other observations), in nats ``[T]``; exact, in one pass.

        The site of y_t is part of λ_t only, so that the marginal of x_t without it is λ_t − λ̃_t.
        If the noise of the observations is 1e10 times smaller than that of the states, this
        difference is little more than rounding error.
        """
        cavities = self.q.with_natural(subtract(self.q.natural, self.sites))  # type: ignore[arg-type]
        return self.model.log_predictive(cavities, self.data)

    def _changed(self, removed: Tensor, add: Any) -> Tensor:
        """The series with NaN in the place of removed observations, and further ones behind it."""
        data = self.data.clone()
        data[removed] = math.nan
        if add is None:
            return data
        return joined(data, self.model.check(add))


def _at(sites: Natural, t: int) -> Natural:
    """The site of time t."""
    return rows(sites, torch.tensor(t))


def _as_one(states: list[FullGaussian]) -> FullGaussian:
    """One FullGaussian with a leading dimension for these states."""
    means = torch.stack([state.mean for state in states])
    precisions = torch.stack([state.precision for state in states])
    return FullGaussian(means, precisions)

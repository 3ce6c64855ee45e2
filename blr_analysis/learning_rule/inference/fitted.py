"""A fitted probabilistic model: its posterior, and what each example contributed to it.

At a fixed point of the rule the natural parameters are a sum with one term for each example,

    λ = λ_prior + Σ_i λ̃_i,      λ^{\\M} = λ − Σ_{i∈M} λ̃_i          (Khan & Rue, Eqs. 5 and 54)

so that a subtraction removes the examples M from a posterior. It is exact for conjugate models,
whose sites λ̃_i do not depend on the other examples. For other models it is the first step of
fitting again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from scipy.sparse import vstack
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from blr_analysis.checks import positive_int, share, tolerance
from blr_analysis.data import chosen_indices
from blr_analysis.errors import DataError, InputError, told_as
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural, add, scale
from blr_analysis.progress import track
from blr_analysis.views import Plottable, Tabular

Q = TypeVar("Q", bound=ExponentialFamily | Mapping[str, ExponentialFamily])
# Natural parameters of one family, or of the factors of a mean field by name; each tensor has a
# leading dimension for the examples.
Sites = Natural | Mapping[str, Natural]
CHUNK = 1024  # examples whose sites are held at a time
ROUNDING = 1e-15  # relative error of an objective
BAD_DATA = "data must be N examples, a tensor [N, …] or a tuple of them"
ONE_STEP = "left out by one step of fitting again: single examples may be off by half"


class NotConverged(UserWarning):
    """A fit stopped at its limit of iterations."""


class Model:
    """What a :class:`Fitted` asks of the model that was fitted.

    ``data`` are those that :meth:`check` returned. ``q`` is one distribution for all M examples,
    or has a leading dimension M: one distribution for each example.
    """

    def check(self, data: Any) -> Any:
        """The examples as the model computes with them.

        Raises:
            DataError: they are no tensors of N examples, empty, or not finite.
        """
        parts = tree_leaves(data)
        if not all(isinstance(part, Tensor) and part.ndim > 0 for part in parts):
            raise DataError(BAD_DATA)
        n_data = count(data)
        if any(len(part) != n_data for part in parts):
            raise DataError(BAD_DATA)
        is_finite = all(bool(part.isfinite().all()) for part in parts)
        if n_data == 0 or not is_finite:
            raise DataError("data are empty, or contain NaN or inf; drop those examples")
        return data

    def sites(self, q: Any, data: Any) -> Sites:
        """λ̃_i of M examples at ``q``, with a leading dimension M."""
        raise InputError("this posterior has no sites, so no example can be taken out of it")

    def log_predictive(self, q: Any, data: Any) -> Tensor:
        """log ∫ p(y_i|θ) q(θ) dθ of M examples, in nats ``[M]``."""
        raise InputError("the predictive distribution of this model has no closed form")

    def step(self, q: Any, data: Any) -> Any:
        """q after one step of the rule, ρ = 1, on these examples."""
        raise InputError("this model has no step to repeat: fit it again")


NO_MODEL = Model()  # raises for every question


@dataclass(frozen=True, eq=False, repr=False)
class Fitted(Tabular, Plottable, Generic[Q]):
    """A posterior, how it was found, and its sites.

    It has the attributes of the posterior: ``fitted.mean``, ``fitted.natural`` and
    ``fitted.sample()`` are those of ``fitted.q``, and ``fitted["name"]`` is a factor of a mean
    field. ``fitted.table`` has a row for each example and its effect on the posterior;
    ``fitted.plot()`` draws the history.

    Attributes:
        q: the posterior: a member of a family, or the factors of a mean field by name.
        history: the objective after each iteration, in nats.
        objective: what ``history`` holds: ``"ELBO"``, ``"log-likelihood"``, ``"log evidence"``.
        prior: the prior, with the structure of ``q``; None where there is none.
        model: what was fitted.
        data: the examples, as the model computes with them; None where no example can be removed.
        messages: the sites at the end of the fit; None where the model computes them at ``q``.
        converged: whether the fit stopped by its tolerance (True for fits in one step).
        note: one line on what :meth:`without` and :meth:`left_out` approximate; may be empty.

    Example:
        >>> from blr_analysis.learning_rule.families import FullGaussian
        >>> from blr_analysis.learning_rule.inference import Conjugate, linear
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0])
        >>> model = Conjugate(FullGaussian(torch.zeros(1), torch.eye(1)), linear(1.0))
        >>> fitted = model.fit((x, y))
        >>> fitted.q.mean.item(), fitted.without([1]).mean.item()
        (1.1667, 0.5000)
        >>> fitted.left_out().tolist()
        [-1.0268, -2.1349]
    """

    q: Q
    history: Sequence[float]
    objective: str
    prior: Q | None = None
    model: Any = NO_MODEL
    data: Any = None
    messages: Any = None
    converged: bool = True
    note: ClassVar[str] = ""

    def __repr__(self) -> str:
        facts = []
        if len(self.history) > 0:
            facts.append(f"{self.objective} {self.history[-1]:.6g} nats")
        facts.append(f"N={self.n_data}")
        facts.append(f"iterations={len(self.history)}")
        facts.append(f"converged={self.converged}")
        text = ", ".join(facts)
        if self.note:
            text = f"{text}; {self.note}"
        return f"{type(self).__name__}({text})"

    def __getattr__(self, name: str) -> Any:
        """An attribute of q, where the fit has none of this name."""
        q = self.__dict__.get("q")
        is_public = not name.startswith("_")
        if is_public and not isinstance(q, Mapping) and hasattr(q, name):
            return getattr(q, name)
        kind = type(q).__name__
        raise AttributeError(f"neither {type(self).__name__} nor its q, a {kind}, has {name!r}")

    def __getitem__(self, name: str) -> Any:
        """A factor of a mean field."""
        if not isinstance(self.q, Mapping):
            raise InputError(f"no factor is called {name!r}: q has none")
        if name not in self.q:
            raise InputError(f"no factor is called {name!r}: its factors are {[*self.q]}")
        return self.q[name]

    @property
    def n_data(self) -> int:
        """N, the number of examples."""
        return 0 if self.data is None else count(self.data)

    @property
    def sites(self) -> Sites:
        """λ̃_i of every example, with a leading dimension N.

        Raises:
            InputError: the model has no sites.
        """
        return self.site_of(torch.arange(self.n_data))

    def site_of(self, chosen: Tensor) -> Any:
        """λ̃_i of the examples ``[M]``, with a leading dimension M."""
        if self.data is None:
            return NO_MODEL.sites(self.q, None)
        if self.messages is not None:
            return rows(self.messages, chosen)
        return self.model.sites(self.q, rows(self.data, chosen))

    def without(self, indices: Any) -> Q:
        """The posterior without these examples, λ − Σ_{i∈M} λ̃_i.

        For conjugate models it is what a fit without them finds. For other models it is the first
        step of fitting again, because the sites of the other examples stay as they are.

        Args:
            indices: examples, as indices (a repeated index counts once) or as a mask ``[N]``.

        Raises:
            InputError: there is no such example, or the model has no sites.
        """
        chosen = self._chosen(indices)
        if len(chosen) == 0:
            return self.q
        return self._less(self._total(chosen))

    def refitted(self, remove: Any = (), *, add: Any = None, steps: int = 1) -> Iterator[Q]:
        """Posteriors on the way to a new fit on other data.

        The first is λ − Σ_{i∈M} λ̃_i. Each further one comes after one more step of the rule on the
        remaining and the added examples.

        Args:
            remove: examples to remove, as indices or as a mask ``[N]``.
            add: further examples, in the form that the model takes.
            steps: the number of steps.

        Raises:
            InputError: there is no such example, or the model has no steps.
        """
        q = self.without(remove)
        yield q
        data = self._changed(self._chosen(remove), add)
        for _ in range(steps):
            q = self.model.step(q, data)
            yield q

    def predictive(self, q: Any, data: Any) -> Tensor:
        """log ∫ p(y_j|θ) q(θ) dθ of M examples under any posterior of the model, ``[M]``."""
        return self.model.log_predictive(q, self.model.check(data))

    def log_predictive(self, data: Any) -> Tensor:
        """log ∫ p(y_j|θ) q(θ) dθ of M further examples, in nats, ``[M]``.

        Raises:
            InputError: the model's predictive distribution has no closed form.
        """
        return self.predictive(self.q, data)

    def left_out(self) -> Tensor:
        """log p(y_i | λ − λ̃_i), every example under the posterior without it, in nats ``[N]``.

        Its sum is the leave-one-out estimate of predictive fit: exact for conjugate models.

        Raises:
            InputError: the model has no sites, or its predictive has no closed form.
        """
        scores = []
        for chosen in torch.arange(self.n_data).split(CHUNK):
            without_each = self._less(self.site_of(chosen))
            scores.append(self.model.log_predictive(without_each, rows(self.data, chosen)))
        return torch.cat(scores)

    def _chosen(self, indices: Any) -> Tensor:
        """The indices of these examples, sorted and without repetition."""
        different = set(chosen_indices(indices, self.n_data))
        return torch.tensor(sorted(different), dtype=torch.long)

    def _total(self, chosen: Tensor) -> Any:
        """Σ_{i∈M} λ̃_i."""
        return total(self.site_of, chosen)

    def _changed(self, removed: Tensor, add: Any) -> Any:
        """The remaining examples, followed by the added ones."""
        remains = torch.ones(self.n_data, dtype=torch.bool)
        remains[removed] = False
        data = rows(self.data, remains.nonzero().flatten())
        if add is None:
            return data
        return joined(data, self.model.check(add))

    def _less(self, sites: Sites) -> Q:
        """The posterior without these sites; see :func:`moved`."""
        return moved(self.q, sites, -1.0)


def moved(q: Q, sites: Sites, sign: float) -> Q:
    """The posterior λ + sign·λ̃, node by node.

    Where λ̃ has a leading dimension M, so has the result: one posterior for each site.
    """
    if not isinstance(q, Mapping):
        return q.with_natural(add(q.natural, scale(sites, sign)))  # type: ignore[arg-type,return-value]
    changed = {name: moved(q[name], site, sign) for name, site in sites.items()}  # type: ignore[index]
    return {**q, **changed}  # type: ignore[dict-item,return-value]


def rows(data: Any, chosen: Any) -> Any:
    """These examples (rows) of every tensor in tuples or dictionaries, or of a sparse matrix."""

    def rows_of(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part[chosen]
        return part[chosen.numpy()]

    return tree_map(rows_of, data)


def total(site_of: Callable[[Tensor], Sites], indices: Tensor) -> Any:
    """Σ_{i∈M} λ̃_i, holding the sites of at most a chunk of examples at a time."""
    sums = []
    for chunk in indices.split(CHUNK):
        sums.append(tree_map(lambda leaf: leaf.sum(0), site_of(chunk)))
    return tree_map(lambda *parts: sum(parts[1:], start=parts[0]), *sums)


def count(data: Any) -> int:
    """N, of a tensor ``[N, …]`` or a tuple of them."""
    return tree_leaves(data)[0].shape[0]


def stacked(parts: Sequence[Any]) -> Any:
    """One dictionary of tensors from many: each tensor has a leading dimension for the many."""
    return tree_map(lambda *leaves: torch.stack(leaves), *parts)


def joined(data: Any, further: Any) -> Any:
    """Examples, followed by further ones."""

    def joined_rows(first: Any, second: Any) -> Any:
        if isinstance(first, Tensor):
            return torch.cat([first, second])
        return vstack([first, second], format="csr")

    return tree_map(joined_rows, data, further)


def minibatch(n_data: int, size: int | None, generator: torch.Generator | None) -> Tensor:
    """The indices of the examples of one step, ``[B]``; all of them where ``size`` is None."""
    if size is None:
        return torch.arange(n_data)
    if positive_int("batch", size) > n_data:
        raise InputError(f"batch is {size} of {n_data} examples")
    return torch.randperm(n_data, generator=generator)[:size]


def rate_at(rho: float | Callable[[int], float], t: int) -> float:
    """ρ_t of step t = 1, 2, …, from one number or a schedule.

    >>> rate_at(lambda t: t**-0.5, 4)
    0.5
    """
    return share("rho", rho(t) if callable(rho) else rho)


def until_flat(
    step: Callable[[int], float],
    objective: str,
    n_data: int = 1,
    *,
    noisy: bool = False,
    max_iter: int = 1000,
    tol: float = 1e-9,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Call ``step(t)`` for t = 0, 1, … until the objective that it returns stands still.

    Args:
        step: makes one iteration and returns the objective.
        objective: its name.
        n_data: N.
        noisy: the objective is random: all ``max_iter`` steps are made, without a warning.
        max_iter: the largest number of steps; a warning says that they were not enough.
        tol: the objective stands still where it changes by at most ``tol`` times N, or by rounding.
        progress: whether to show a bar.

    Returns:
        ``history``, ``objective`` and ``converged`` of a :class:`Fitted`.

    Raises:
        InputError: the objective became infinite or NaN.
    """
    positive_int("max_iter", max_iter)
    tolerance("tol", tol)
    history: list[float] = []
    converged = False
    for t in track(range(max_iter), label=objective, show=progress):
        value = step(t)
        if not (math.isfinite(value) or noisy):
            raise InputError(f"the {objective} became {value} at iteration {t + 1}")
        history.append(value)
        if t == 0 or noisy:
            continue
        rounding = ROUNDING * (1 + abs(value))
        change = abs(value - history[-2])
        converged = change <= max(tol * n_data, rounding)
        if converged:
            break
    if not (converged or noisy):
        message = f"the {objective} still changed by more than {tol:g} an example after {max_iter}"
        warnings.warn(f"{message} iterations: raise max_iter or tol", NotConverged, stacklevel=3)
    return {"history": history, "objective": objective, "converged": converged}


def answer(
    contract: str, shape: torch.Size, function: Callable[..., Any], *arguments: Any
) -> Tensor:
    """The tensor of this shape that the user's ``function(*arguments)`` has to return.

    Raises:
        InputError: the function failed or returned another thing; the message is the ``contract``.

    >>> answer("f must be a function x -> y [N]", torch.Size([2]), torch.sum, torch.ones(2))
    Traceback (most recent call last):
    ...
    blr_analysis.errors.InputError: f must be a function x -> y [N], here [2]; it gave []
    """
    with told_as(InputError, f"{contract}; it raised"):
        value = function(*arguments)
    if not isinstance(value, Tensor):
        raise InputError(f"{contract}, here {list(shape)}; it gave {type(value).__name__}")
    if value.shape != shape:
        raise InputError(f"{contract}, here {list(shape)}; it gave {list(value.shape)}")
    return value

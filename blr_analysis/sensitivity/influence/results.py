"""What influence comes as: a matrix, the strongest training examples, sums over groups."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.checks import positive_int
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError
from blr_analysis.sensitivity.selection import Selection, groups_by
from blr_analysis.views import Listed, Tabular, make_plot

Normalize = bool | str

SHOWN = 5  # of either sign in a table or picture, where nobody says how many


@dataclass(frozen=True)
class ProjectionError:
    """How far a projected influence is from the exact one, measured on random pairs.

    Attributes:
        relative_rms: √(Σ(estimate − exact)² / Σ exact²) over the pairs.
        spearman: rank correlation of estimate and exact over the pairs.
        pairs: how many (training example, test example) pairs were computed exactly.
    """

    relative_rms: float
    spearman: float
    pairs: int

    @classmethod
    def between(cls, estimate: Tensor, exact: Tensor) -> ProjectionError:
        """The error of ``estimate`` against ``exact``, of any equal shapes."""
        a, b = estimate.double().flatten(), exact.double().flatten()
        size = float(b.norm())
        gap = float((a - b).norm())
        rms = gap / size if size else (0.0 if gap == 0 else float("inf"))
        ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
        rank = float(torch.corrcoef(ranks)[0, 1]) if len(a) > 1 else 1.0
        return cls(rms, rank, len(a))


def quantity_of(normalize: Normalize) -> str:
    """What the values are called.

    Raises:
        InputError: neither True, False nor "cosine".
    """
    if not isinstance(normalize, bool) and normalize != "cosine":
        raise InputError(f'normalize must be True, False or "cosine", got {normalize!r}')
    return "cosine" if normalize == "cosine" else ("influence", "normalized_influence")[normalize]


def rooted(squares: Any) -> Tensor:
    """√ of gᵀΣg; 1 where there is no gradient."""
    roots = squares.clamp_min(0).sqrt()
    return torch.where(roots > 0, roots, 1)


@dataclass(frozen=True)
class Pairs:
    """The training and test examples that an influence is between, and how it was computed.

    Attributes:
        subject: the posterior and its training data
            (:class:`~blr_analysis.sensitivity.subjects.Subject`).
        test: the test examples, as the model takes them.
        quantity: "influence", "normalized_influence" or "cosine".
        checkpoints: of how many posteriors it is the mean.
        unlike: how the test data differ from the training data, in one line; "".
    """

    subject: Any = field(repr=False)
    test: Any = field(repr=False)
    measure: str = "loss"
    quantity: str = "influence"
    checkpoints: int = 1
    unlike: str = ""

    @property
    def note(self) -> str:
        """Why not to trust it, in one line; "" where nothing speaks against it."""
        return "; ".join(filter(None, [self.unlike, self.subject.note]))

    def __str__(self) -> str:
        """What sets it apart from the plain influence of one posterior; usually nothing."""
        words = [] if self.quantity == "influence" else [self.quantity]
        if self.checkpoints > 1:
            words.append(f"mean of {self.checkpoints} checkpoints")
        if self.note:
            words.append(self.note)
        return ", ".join(words)

    def described(self, indices: Tensor, *, test: bool = False) -> dict[str, Tensor]:
        """Target and prediction of these examples, by forward passes; empty without outputs."""
        return self.subject.described(indices, self.test if test else None)


class BetweenTasks:
    """What knows the two tasks that it is between."""

    pairs: Pairs
    __dir__ = Listed.__dir__  # of a tensor too, which has 600 names of its own

    def plot(self, test: int = 0, ax: Any = None, **options: Any) -> Any:
        """The most helpful and most harmful training examples of one test example.

        See :func:`blr_analysis.plots.plot_influence` for the options.
        """
        return make_plot(self, ax, test=test, **options)


class Influence(BetweenTasks, Tensor, Tabular):
    """Influence ``[N_train, N_test]``: a tensor on the CPU that knows what it is about.

    ``influence[i, j]`` is the rise of test loss j, in nats, when training example i is left out:
    positive where i helps j, negative where it harms. Everything that works on a tensor works on
    it and gives plain tensors; :meth:`top`, :meth:`group`, :attr:`table` and :meth:`plot` come on
    top. What is saved or pickled is the plain matrix.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # as Parameter: results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def of(cls, matrix: Tensor, pairs: Pairs) -> Influence:
        """This matrix, with the tasks that it is between."""
        made = torch.Tensor._make_subclass(cls, matrix.detach(), False)
        made.pairs = pairs
        return made

    @property
    def note(self) -> str:
        """How far its scale is to be trusted, in one line; "" where it is."""
        return self.pairs.note

    @property
    def matrix(self) -> Tensor:
        """The plain tensor, sharing memory."""
        return self.detach()

    @torch.inference_mode(False)  # also where the caller switched it on
    def top(self, k: int = SHOWN) -> TopInfluence:
        """The k most helpful and the k most harmful training examples of every test example.

        Raises:
            InputError: k below 1 or above the number of training examples.
        """
        check_k(k, self.shape[0])
        best = Best(k)
        best.add(torch.arange(self.shape[0]), self.matrix)
        return joined([best], self.pairs)

    @torch.inference_mode(False)  # also where the caller switched it on
    def group(self, selection: Selection | None = None, *, by: str | None = None) -> GroupInfluence:
        """Influence of groups of training examples: the sum over their members, first order.

        Args:
            selection: one group: a mask ``[N]``, indices, or a function of a table's row.
            by: one group per value of "target" (default) or of a metadata column.

        Raises:
            InputError: a selection of nothing, no such column, both arguments, or normalized
                influence, whose sums mean nothing.
        """
        if self.pairs.quantity != "influence":
            raise InputError("only plain influences add up to a group's; leave normalize= out")
        if selection is not None and by is not None:
            raise InputError("give a selection or by=, not both")
        subject = self.pairs.subject
        if selection is not None:
            groups: dict[Any, Tensor] = {"selection": subject.select(selection, "selection")}
        else:
            groups = groups_by("target" if by is None else by, subject)
        values = torch.stack([self.matrix[rows].sum(0) for rows in groups.values()])
        sizes = torch.tensor([len(rows) for rows in groups.values()])
        return GroupInfluence(tuple(groups), sizes, values)

    def __repr__(self, **options: Any) -> str:
        if self.ndim != 2 or not hasattr(self, "pairs"):
            return super().__repr__(**options)
        about = ", ".join(filter(None, (str(self.dtype).removeprefix("torch."), str(self.pairs))))
        n, m = self.shape
        return f"Influence({n:,} training × {m:,} test examples, {about}; see .top(k), .plot(test))"

    def _repr_html_(self) -> str:
        """One line: the table needs forward passes, and a matrix tells nobody anything."""
        return f"<p><code>{html.escape(repr(self))}</code></p>"

    def __deepcopy__(self, memo: Any) -> Influence:
        return Influence.of(self.matrix.clone(), self.pairs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.matrix.__reduce_ex__(protocol)


@dataclass(frozen=True, repr=False)
class Matches(Tabular):
    """The training examples that matter most to each question, strongest first.

    Attributes:
        helpful: their indices ``[M, k]``: leaving them out raises the question's loss most.
        helpful_values: influence ``[M, k]`` in nats (or normalized), falling.
        harmful: indices ``[M, k]``: leaving them out lowers the question's loss most.
        harmful_values: influence ``[M, k]``, rising from the most negative. With few
            training examples of one sign, the last of either list are of the other; table and
            plot leave those out. Where only helpful ones were asked for, these two are ``[M, 0]``.
        metadata: of the training examples, by column.
        quantity: what the values are: "influence", "normalized_influence" or "cosine".
        note: how far their scale is to be trusted, in one line; "" where it is.
    """

    helpful: Tensor
    helpful_values: Tensor
    harmful: Tensor
    harmful_values: Tensor
    metadata: Mapping[str, Sequence[Any]]
    quantity: str = field(default="influence", kw_only=True)
    note: str = field(default="", kw_only=True)

    @property
    def k(self) -> int:
        return self.helpful.shape[1]

    @property
    def own_sign(self) -> tuple[Tensor, Tensor]:
        """Which of ``helpful`` do help, and which of ``harmful`` do harm, ``[M, k]`` each."""
        return self.helpful_values > 0, self.harmful_values < 0

    def sides(self, question: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Indices and influences of those that help a question, and of those that harm it."""
        helps, harms = (kept[question] for kept in self.own_sign)
        return (
            (self.helpful[question][helps], self.helpful_values[question][helps]),
            (self.harmful[question][harms], self.harmful_values[question][harms]),
        )

    def described(self, indices: Tensor, *, test: bool = False) -> dict[str, Tensor]:
        """Further columns of these training (or test) examples."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.helpful.shape[0]:,} questions, k={self.k}; see .table)"


@dataclass(frozen=True, repr=False)
class TopInfluence(BetweenTasks, Matches):
    """:class:`Matches` between two tasks: a question is an example of the test task.

    Attributes:
        pairs: the tasks.
    """

    pairs: Pairs

    def described(self, indices: Tensor, *, test: bool = False) -> dict[str, Tensor]:
        return self.pairs.described(indices, test=test)

    def __repr__(self) -> str:
        m = self.helpful.shape[0]
        about = ", ".join(filter(None, (f"{m:,} test examples, k={self.k}", str(self.pairs))))
        return f"TopInfluence({about}; see .table, .plot(test))"


@dataclass(frozen=True)
class GroupInfluence(Tabular):
    """First-order effect of leaving out groups of training examples.

    Attributes:
        groups: the value that each group shares; "selection" for one that was named.
        sizes: examples in each group, ``[G]``.
        values: rise of each test loss without the group, ``[G, N_test]``, nats.
    """

    groups: tuple[Any, ...]
    sizes: Tensor
    values: Tensor

    def __repr__(self) -> str:
        groups, tests = self.values.shape
        return f"GroupInfluence({groups:,} groups × {tests:,} test examples; see .table, .mean)"

    @property
    def mean(self) -> Tensor:
        """Rise of the mean test loss, ``[G]``: the predicted change of test NLL."""
        return self.values.double().mean(1).to(self.values.dtype)


class Best:
    """The k largest and k smallest of each column, of rows that come in chunks."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._kept: list[tuple[Tensor, Tensor] | None] = [None, None]

    def add(self, rows: Tensor, values: Tensor) -> None:
        """Rows ``[B]`` with values ``[B, M]``."""
        values, rows = values.cpu(), rows.cpu()
        for side, largest in enumerate((True, False)):
            kept = self._kept[side]
            few = min(self.k, len(values))
            best, places = values.topk(few, dim=0, largest=largest)
            names = rows[places]
            if kept is not None:
                best, names = torch.cat([kept[0], best]), torch.cat([kept[1], names])
                best, places = best.topk(min(self.k, len(best)), dim=0, largest=largest)
                names = names.gather(0, places)
            self._kept[side] = best, names

    def sides(self) -> list[tuple[Tensor, Tensor]]:
        """Values and rows ``[k, M]`` of the largest, then of the smallest."""
        return [kept for kept in self._kept if kept is not None]

    def shared(self, n_data: int) -> None:
        """Choose among what all ranks kept of their shares of ``n_data`` rows."""
        size = ranks.count()
        if size == 1:
            return
        for side, largest in enumerate((True, False)):
            kept = self._kept[side]
            assert kept is not None
            most, columns = min(self.k, -(-n_data // size)), kept[0].shape[1]
            nothing = -torch.inf if largest else torch.inf
            values, names = (part.new_zeros(size, most, columns) for part in kept)
            values[ranks.rank()] = nothing
            for whole, part in zip((values, names), kept, strict=True):
                whole[ranks.rank(), : len(part)] = part
            ranks.total([values, names])
            best, places = values.flatten(0, 1).topk(self.k, dim=0, largest=largest)
            self._kept[side] = best, names.flatten(0, 1).gather(0, places)


def joined(blocks: Sequence[Best], pairs: Pairs) -> TopInfluence:
    """One result of consecutive blocks of test examples."""
    each = [block.sides() for block in blocks]
    high, helpful, low, harmful = (
        torch.cat([sides[side][part] for sides in each], dim=1).mT.contiguous()
        for side in (0, 1)
        for part in (0, 1)
    )
    sides = (helpful, high, harmful, low)
    metadata = pairs.subject.metadata
    return TopInfluence(*sides, metadata, pairs, quantity=pairs.quantity, note=pairs.note)


def check_k(k: Any, n: int) -> int:
    """How many to keep of n training examples."""
    if positive_int("k", k) > n:
        raise InputError(f"k={k} is more than the {n} training examples; choose k up to {n}")
    return k


def index_of_test(test: Any, n: int) -> int:
    """One test example."""
    if isinstance(test, (bool, np.bool_)) or np.ndim(test) != 0:
        raise InputError(f"test must be the index of one test example, got {test!r}")
    return chosen_indices([test], n, "test")[0]

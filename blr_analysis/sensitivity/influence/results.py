"""What influence comes as: a matrix, the strongest training examples, sums over groups."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    if normalize == "cosine":
        return "cosine"
    return "normalized_influence" if normalize else "influence"


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
        influence = torch.Tensor._make_subclass(cls, matrix.detach(), False)
        influence.pairs = pairs
        return influence

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
        n_train, n_test = self.shape
        facts = [f"{n_train:,} training × {n_test:,} test examples"]
        facts.append(str(self.dtype).removeprefix("torch."))
        if str(self.pairs):
            facts.append(str(self.pairs))
        return f"Influence({', '.join(facts)}; see .top(k), .plot(test))"

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
        help_at_all, harm_at_all = self.own_sign
        helps = help_at_all[question]
        harms = harm_at_all[question]
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
        facts = [f"{len(self.helpful):,} test examples", f"k={self.k}"]
        if str(self.pairs):
            facts.append(str(self.pairs))
        return f"TopInfluence({', '.join(facts)}; see .table, .plot(test))"


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


class Ranked(NamedTuple):
    """The best of each column: values and their rows, ``[k, M]`` each."""

    values: Tensor
    rows: Tensor

    def first(self, k: int, *, largest: bool) -> Ranked:
        """The k largest of each column, or the k smallest."""
        count = min(k, len(self.values))
        best, places = self.values.topk(count, dim=0, largest=largest)
        return Ranked(best, self.rows.gather(0, places))

    def beside(self, other: Ranked) -> Ranked:
        """Both, one below the other."""
        return Ranked(
            torch.cat([self.values, other.values]),
            torch.cat([self.rows, other.rows]),
        )

    def of_all_ranks(self, k: int, n_data: int, *, largest: bool) -> Ranked:
        """The best among what every rank has of its share of ``n_data`` rows."""
        size = ranks.count()
        rank = ranks.rank()
        most = min(k, -(-n_data // size))
        columns = self.values.shape[1]
        values = self.values.new_zeros(size, most, columns)
        rows = self.rows.new_zeros(size, most, columns)
        values[rank] = -torch.inf if largest else torch.inf  # fewer rows than the others have
        values[rank, : len(self.values)] = self.values
        rows[rank, : len(self.rows)] = self.rows
        ranks.total([values, rows])
        return Ranked(values.flatten(0, 1), rows.flatten(0, 1)).first(k, largest=largest)


class Best:
    """The k largest and k smallest of each column, of rows that come in chunks."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._largest: Ranked | None = None
        self._smallest: Ranked | None = None

    def add(self, rows: Tensor, values: Tensor) -> None:
        """Rows ``[B]`` with values ``[B, M]``."""
        on_cpu = values.cpu()
        chunk = Ranked(on_cpu, rows.cpu()[:, None].expand(on_cpu.shape))
        self._largest = self._with(self._largest, chunk, largest=True)
        self._smallest = self._with(self._smallest, chunk, largest=False)

    def _with(self, before: Ranked | None, chunk: Ranked, *, largest: bool) -> Ranked:
        best = chunk.first(self.k, largest=largest)
        if before is None:
            return best
        return before.beside(best).first(self.k, largest=largest)

    def sides(self) -> tuple[Ranked, Ranked]:
        """The largest, then the smallest."""
        assert self._largest is not None
        assert self._smallest is not None
        return self._largest, self._smallest

    def shared(self, n_data: int) -> None:
        """Choose among what all ranks have of their shares of ``n_data`` rows."""
        if ranks.count() == 1:
            return
        largest, smallest = self.sides()
        self._largest = largest.of_all_ranks(self.k, n_data, largest=True)
        self._smallest = smallest.of_all_ranks(self.k, n_data, largest=False)


def joined(blocks: Sequence[Best], pairs: Pairs) -> TopInfluence:
    """One result of consecutive blocks of test examples."""
    largest = [block.sides()[0] for block in blocks]
    smallest = [block.sides()[1] for block in blocks]
    return TopInfluence(
        helpful=_side_by_side([side.rows for side in largest]),
        helpful_values=_side_by_side([side.values for side in largest]),
        harmful=_side_by_side([side.rows for side in smallest]),
        harmful_values=_side_by_side([side.values for side in smallest]),
        metadata=pairs.subject.metadata,
        pairs=pairs,
        quantity=pairs.quantity,
        note=pairs.note,
    )


def _side_by_side(blocks: Sequence[Tensor]) -> Tensor:
    """``[M, k]`` from ``[k, M_b]`` of each block."""
    return torch.cat(list(blocks), dim=1).mT.contiguous()


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

"""Results of influence: the matrix, the strongest training examples, and sums over groups."""

from __future__ import annotations

import html
import math
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
from blr_analysis.sensitivity.agreement import rank_correlations
from blr_analysis.sensitivity.selection import Selection, groups_by
from blr_analysis.views import Listed, Tabular, make_plot

Normalize = bool | str
Side = tuple[Tensor, Tensor]  # indices of training examples, and their influences

SHOWN = 5  # examples of either sign in a table or picture, by default


ENOUGH_PAIRS = 25  # of ten examples: nine errors in ten are then within a factor of two


@dataclass(frozen=True)
class ProjectionError:
    """How far a projected influence is from the exact one, measured on random pairs.

    Attributes:
        relative_rms: √(Σ(estimate − exact)² / Σ exact²) over the pairs; NaN where these are too
            few to tell it.
        spearman: rank correlation of estimate and exact over the pairs; 1 if they are equal, else 0
            if one of them has the same value for all pairs; NaN where they are too few.
        pairs: the number of (training example, test example) pairs that were computed exactly.
    """

    relative_rms: float
    spearman: float
    pairs: int

    @classmethod
    def of_entry(cls, entry: Sequence[Any]) -> ProjectionError:
        """From what a record holds of it, :attr:`entry`."""
        relative_rms, spearman, pairs = entry
        if spearman is None:
            return cls(math.nan, math.nan, pairs)
        return cls(math.inf if relative_rms is None else relative_rms, spearman, pairs)

    @property
    def entry(self) -> list[Any]:
        """For a record in JSON, which has neither infinity nor NaN.

        >>> ProjectionError.of_entry(ProjectionError(math.inf, 0.0, 4).entry).relative_rms
        inf
        """
        if not self.is_measured:
            return [None, None, self.pairs]
        is_finite = math.isfinite(self.relative_rms)
        return [self.relative_rms if is_finite else None, self.spearman, self.pairs]

    @property
    def is_measured(self) -> bool:
        """Whether the pairs are enough to tell the error."""
        return not math.isnan(self.relative_rms)

    @classmethod
    def between(cls, estimate: Tensor, exact: Tensor) -> ProjectionError:
        """The error of ``estimate`` against ``exact``, of any equal shapes."""
        estimated = estimate.double().flatten()
        true = exact.double().flatten()
        distance = float((estimated - true).norm())
        if distance == 0:
            return cls(relative_rms=0.0, spearman=1.0, pairs=len(true))
        size = float(true.norm())
        spearman = 1.0
        if len(true) > 1:
            correlations = rank_correlations(estimated.unsqueeze(1), true.unsqueeze(1))
            spearman = float(correlations.nan_to_num(0.0))
        return cls(
            relative_rms=distance / size if size > 0 else math.inf,
            spearman=spearman,
            pairs=len(true),
        )


def quantity_of(normalize: Normalize) -> str:
    """The name of the values: "influence", "normalized_influence" or "cosine".

    Raises:
        InputError: ``normalize`` is neither True, False nor "cosine".
    """
    if not isinstance(normalize, bool) and normalize != "cosine":
        raise InputError(f'normalize must be True, False or "cosine", got {normalize!r}')
    if normalize == "cosine":
        return "cosine"
    return "normalized_influence" if normalize else "influence"


def rooted(squares: Any) -> Tensor:
    """The square roots of the squares gᵀΣg, by which influence is divided; 1 in place of a 0."""
    roots = squares.clamp_min(0).sqrt()
    return torch.where(roots > 0, roots, 1)


@dataclass(frozen=True)
class Pairs:
    """The training and test examples of an influence, and how the influence was computed.

    Attributes:
        subject: the posterior and its training data
            (:class:`~blr_analysis.sensitivity.subjects.Subject`).
        test: the test examples, as the model takes them.
        measure: "loss", or the name of the user's function.
        quantity: "influence", "normalized_influence" or "cosine".
        checkpoints: the number of posteriors over which influence is averaged.
        unlike: one line on how the test data differ from the training data; "" if they do not.
    """

    subject: Any = field(repr=False)
    test: Any = field(repr=False)
    measure: str = "loss"
    quantity: str = "influence"
    checkpoints: int = 1
    unlike: str = ""

    @property
    def note(self) -> str:
        """One line on why the influence cannot be trusted; "" if it can."""
        return "; ".join(filter(None, [self.unlike, self.subject.note]))

    def __str__(self) -> str:
        """In words, how it differs from the plain influence of one posterior; "" if it does not."""
        facts = []
        if self.quantity != "influence":
            facts.append(self.quantity)
        if self.checkpoints > 1:
            facts.append(f"mean of {self.checkpoints} checkpoints")
        if self.note:
            facts.append(self.note)
        return ", ".join(facts)

    def described(self, indices: Tensor, *, test: bool = False) -> dict[str, Tensor]:
        """Target and prediction of these training (or test) examples, by forward passes.

        Empty for a subject whose examples have no outputs.
        """
        return self.subject.described(indices, self.test if test else None)


class BetweenTasks:
    """A result between the training examples and the test examples of ``pairs``."""

    pairs: Pairs
    __dir__ = Listed.__dir__  # shorter than a tensor's, which has 600 names

    def plot(self, test: int = 0, ax: Any = None, **options: Any) -> Any:
        """The most helpful and most harmful training examples of one test example.

        See :func:`blr_analysis.plots.plot_influence` for the options.
        """
        return make_plot(self, ax, test=test, **options)


class Influence(BetweenTasks, Tensor, Tabular):
    """Influence ``[N_train, N_test]``: a tensor on the CPU, with methods.

    ``influence[i, j]`` is the rise of test loss j, in nats, when training example i is left out:
    positive where i helps j, negative where it harms. Operations of torch work on it and give plain
    tensors. It also has :meth:`top`, :meth:`group`, :attr:`table` and :meth:`plot`. ``torch.save``
    and pickle write the plain matrix.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def of(cls, matrix: Tensor, pairs: Pairs) -> Influence:
        """This matrix as the influence between these pairs of examples."""
        influence = torch.Tensor._make_subclass(cls, matrix.detach(), False)
        influence.pairs = pairs
        return influence

    @property
    def note(self) -> str:
        """One line on why the influence cannot be trusted; "" if it can."""
        return self.pairs.note

    @property
    def matrix(self) -> Tensor:
        """The same numbers as a plain tensor, which shares this one's memory."""
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
            InputError: the selection is empty, there is no such column, both arguments are given,
                or influence is normalized, so that sums have no meaning.
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
        """The repr for a notebook; a table would take forward passes."""
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
        helpful_values: their influence ``[M, k]`` in nats (or normalized), from the largest down.
        harmful: indices ``[M, k]``: leaving them out lowers the question's loss most.
        harmful_values: their influence ``[M, k]``, from the most negative up. Both ``harmful`` and
            ``harmful_values`` are ``[M, 0]`` if only helpful ones were asked for. If fewer than k
            training examples have one sign, the end of a list has the other sign; table and plot
            leave it out.
        metadata: columns of the training examples, by name.
        quantity: "influence", "normalized_influence" or "cosine".
        note: one line on why the values cannot be trusted; "" where they can.
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
    def has_right_sign(self) -> tuple[Tensor, Tensor]:
        """Whether each of ``helpful`` really helps, and each of ``harmful`` harms.

        Two masks ``[M, k]``. The influence of an example that helps is positive.
        """
        return self.helpful_values > 0, self.harmful_values < 0

    def sides(self, question: int) -> tuple[Side, Side]:
        """The examples that help a question, and the examples that harm it."""
        really_helps, really_harms = self.has_right_sign
        helps = really_helps[question]
        harms = really_harms[question]
        helpful = (self.helpful[question][helps], self.helpful_values[question][helps])
        harmful = (self.harmful[question][harms], self.harmful_values[question][harms])
        return helpful, harmful

    def described(self, indices: Tensor, *, test: bool = False) -> dict[str, Tensor]:
        """Further columns of these training (or test) examples; none in this class."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.helpful.shape[0]:,} questions, k={self.k}; see .table)"


@dataclass(frozen=True, repr=False)
class TopInfluence(BetweenTasks, Matches):
    """:class:`Matches` whose questions are the examples of a test task.

    Attributes:
        pairs: the training and test examples.
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
        groups: the value that the examples of each group share, or "selection".
        sizes: the number of examples in each group, ``[G]``.
        values: the rise of each test loss without the group, in nats ``[G, N_test]``.
    """

    groups: tuple[Any, ...]
    sizes: Tensor
    values: Tensor

    def __repr__(self) -> str:
        groups, tests = self.values.shape
        return f"GroupInfluence({groups:,} groups × {tests:,} test examples; see .table, .mean)"

    @property
    def mean(self) -> Tensor:
        """The rise of the mean test loss without each group, in nats ``[G]``."""
        return self.values.double().mean(1).to(self.values.dtype)


class Extremes(NamedTuple):
    """The largest (or smallest) values of each column, and the rows that they stand in.

    Both are ``[k, M]``, with the most extreme value first.
    """

    values: Tensor
    rows: Tensor

    def strongest(self, k: int, *, largest: bool) -> Extremes:
        """The k largest of each column, or the k smallest."""
        count = min(k, len(self.values))
        values, places = self.values.topk(count, dim=0, largest=largest)
        return Extremes(values, self.rows.gather(0, places))

    def followed_by(self, other: Extremes) -> Extremes:
        """The values and rows of both, one below the other."""
        return Extremes(
            torch.cat([self.values, other.values]),
            torch.cat([self.rows, other.rows]),
        )

    def of_all_ranks(self, k: int, n_data: int, *, largest: bool) -> Extremes:
        """The k largest (or smallest) of all processes, which share ``n_data`` rows."""
        n_ranks = ranks.count()
        rank = ranks.rank()
        most_rows_of_a_rank = math.ceil(n_data / n_ranks)
        n_sent = min(k, most_rows_of_a_rank)
        n_columns = self.values.shape[1]
        # Each rank writes into its own place of zeros, so that a sum gathers all of them.
        values = self.values.new_zeros(n_ranks, n_sent, n_columns)
        rows = self.rows.new_zeros(n_ranks, n_sent, n_columns)
        values[rank] = -torch.inf if largest else torch.inf  # for a rank with fewer rows
        values[rank, : len(self.values)] = self.values
        rows[rank, : len(self.rows)] = self.rows
        ranks.total([values, rows])
        gathered = Extremes(values.flatten(0, 1), rows.flatten(0, 1))
        return gathered.strongest(k, largest=largest)


class Best:
    """The k largest and k smallest values in each column of a matrix.

    The matrix comes in chunks of rows.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._largest: Extremes | None = None
        self._smallest: Extremes | None = None

    def add(self, rows: Tensor, values: Tensor) -> None:
        """Take rows ``[B]`` with values ``[B, M]`` into account."""
        on_cpu = values.cpu()
        chunk = Extremes(on_cpu, rows.cpu()[:, None].expand(on_cpu.shape))
        self._largest = self._merged(self._largest, chunk, largest=True)
        self._smallest = self._merged(self._smallest, chunk, largest=False)

    def _merged(self, before: Extremes | None, chunk: Extremes, *, largest: bool) -> Extremes:
        """The k largest (or smallest) of the chunks before and of this one."""
        best_of_chunk = chunk.strongest(self.k, largest=largest)
        if before is None:
            return best_of_chunk
        return before.followed_by(best_of_chunk).strongest(self.k, largest=largest)

    def sides(self) -> tuple[Extremes, Extremes]:
        """The k largest, then the k smallest, after at least one chunk."""
        assert self._largest is not None
        assert self._smallest is not None
        return self._largest, self._smallest

    def gather_from_ranks(self, n_data: int) -> None:
        """Replace the best of this rank's rows by the best of the ``n_data`` rows of all ranks."""
        if ranks.count() == 1:
            return
        largest, smallest = self.sides()
        self._largest = largest.of_all_ranks(self.k, n_data, largest=True)
        self._smallest = smallest.of_all_ranks(self.k, n_data, largest=False)


def joined(blocks: Sequence[Best], pairs: Pairs) -> TopInfluence:
    """One result for all test examples, from the best of consecutive blocks of them."""
    largest, smallest = zip(*(block.sides() for block in blocks), strict=True)
    return TopInfluence(
        helpful=_one_row_per_question([block.rows for block in largest]),
        helpful_values=_one_row_per_question([block.values for block in largest]),
        harmful=_one_row_per_question([block.rows for block in smallest]),
        harmful_values=_one_row_per_question([block.values for block in smallest]),
        metadata=pairs.subject.metadata,
        pairs=pairs,
        quantity=pairs.quantity,
        note=pairs.note,
    )


def _one_row_per_question(blocks: Sequence[Tensor]) -> Tensor:
    """``[M, k]`` from the ``[k, M_b]`` of every block b."""
    return torch.cat(list(blocks), dim=1).mT.contiguous()


def check_k(k: Any, n: int) -> int:
    """k, if one can choose the k strongest of n training examples.

    Raises:
        InputError: k is no positive integer, or larger than n.
    """
    if positive_int("k", k) > n:
        raise InputError(f"k={k} is more than the {n} training examples; choose k up to {n}")
    return k


def index_of_test(test: Any, n: int) -> int:
    """``test`` as an integer, which is the index of one of n test examples.

    Raises:
        InputError: it is no integer, or not from 0 to n − 1.
    """
    if isinstance(test, (bool, np.bool_)) or np.ndim(test) != 0:
        raise InputError(f"test must be the index of one test example, got {test!r}")
    return chosen_indices([test], n, "test")[0]

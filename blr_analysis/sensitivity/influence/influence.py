"""How much each training example matters to each test prediction.

The memory-perturbation equation to first order (Nickl et al., NeurIPS 2023), which is the
influence function of Koh & Liang (ICML 2017) with the learned covariance as inverse curvature:

    influence[i, j] = ∇ℓ_jᵀ Σ ∇ℓ_i ≈ ℓ_j(without i) − ℓ_j

Positive: leaving i out hurts j, i helps. Σ includes the prior and example i itself. Divided by the
root of the self-influence ∇ℓ_iᵀ Σ ∇ℓ_i it is the change of j for a given change of the model
(ℓ-RelatIF: Barshan, Brunet & Dziugaite, AISTATS 2020): examples that are wrong or unlike the others
move the model most, and with it every test loss; normalized, they no longer lead every list.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunk, Chunking, chunks
from blr_analysis.backprop.record import shared
from blr_analysis.checks import instance, one_of, path_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import expected_errors
from blr_analysis.posterior.structures import Tree
from blr_analysis.sensitivity.corrections import check_finite, self_influence
from blr_analysis.sensitivity.curvature import Precision, cg
from blr_analysis.sensitivity.influence.averaged import AVERAGED, training_errors
from blr_analysis.sensitivity.influence.blocks import (
    DEFAULT_MEMORY,
    Budget,
    Cotangent,
    Piece,
    chunk_size,
    loss_gradient,
    loss_terms,
    matrix_of,
    pieces,
    preconditioned,
)
from blr_analysis.sensitivity.influence.projection import Projection, projection_for
from blr_analysis.sensitivity.influence.results import (
    SHOWN,
    Best,
    Influence,
    Normalize,
    Pairs,
    ProjectionError,
    TopInfluence,
    check_k,
    joined,
    quantity_of,
    rooted,
)
from blr_analysis.sensitivity.influence.whole import whole
from blr_analysis.sensitivity.scores import all_fitted, check_test
from blr_analysis.sensitivity.sites import site_influence, sum_of_sites
from blr_analysis.task import Task

Measure = str | Callable[[Tensor, Tensor], Tensor]
WIDE = 4096  # test examples whose projected influence is computed at once
SAMPLE = 64  # training examples that tell how large gradients are in each direction
SOLVERS = ("auto", "posterior", "cg")
TOLERANCE, ITERATIONS = 1e-3, 100  # of conjugate gradients
PROBE = (256, 16)  # training and test examples whose exact influence measures a projection


@torch.inference_mode(False)  # also where the caller switched it on
def influence(
    task: Task,
    posterior: Posterior | Sequence[Posterior] = None,  # type: ignore[assignment]
    test_task: Task = None,  # type: ignore[assignment]
    *,
    measure: Measure = "loss",
    normalize: Normalize = False,
    expected: bool | None = None,
    solver: str = "auto",
    projection: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Influence:
    """Rise of every test loss when each training example is left out, to first order.

    influence[i, j] = ∇q_jᵀ Σ ∇ℓ_i with q_j = ℓ_j, in nats: positive where i helps j. The diagonal
    of ``influence(task, posterior, task)`` is ``sensitivity(task, posterior).self_influence``.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data; or a list of those of several checkpoints or seeds of one
            training run, the last one last: the mean of what each says at its own weights, for as
            many times the cost. It agrees better with retraining than any one of them. A fitted
            probabilistic model stands alone, ``influence(fitted, None, data)``: ``.matrix`` is by
            subtraction of sites, ``.error`` how much a further step of the rule changes it.
        test_task: the examples whose loss is asked about, under the same model and likelihood.
        measure: "loss", or a function of outputs ``[B, C]`` and targets giving one number per
            test example, whose rise is computed instead (``lambda f, y: f.softmax(-1)[:, 3]``).
        normalize: True divides by √(∇ℓ_iᵀ Σ ∇ℓ_i) of the training example, for finding what a
            prediction rests on (which source, which fact); the sign stays, the unit is √nats, and
            sums over groups no longer mean anything. "cosine" divides by the test example's root
            as well, so that numbers compare across test examples, between -1 and 1.
        expected: whether ∇ℓ_i of a training example is J_iᵀ E_q[e_i] instead of J_iᵀ e_i, for one
            forward and C backward passes more: an example learned by heart has e_i ≈ 0 although
            it shaped the model. None: as ``solver`` says, or else as the posterior was fitted,
            ``fit_laplace(..., expected=first)``.
        solver: "posterior": Σ ∇q_j as the posterior has it. "auto": the same, but where
            one posterior of :func:`blr_analysis.fit_laplace` found δ. Off the minimum the errors
            of classes, or of tokens, are averaged over the training's time:
            :mod:`blr_analysis.sensitivity.influence.averaged`, and a small model (up to 4,096
            parameters) has its whole curvature, damped as far as training came (of classes, and
            where no ``memory_budget`` is given, the mean of what 4 to 16 networks of other draws of
            the data say); at the minimum a small one has its exact Hessian, or else the whole
            curvature: :mod:`blr_analysis.sensitivity.influence.whole`. That agrees better with
            retraining; ``note`` says that it was done. "cg": S⁻¹ ∇q_j with the exact
            Gauss–Newton matrix of the data and the posterior's prior, by conjugate gradients that
            the posterior (kron is best) preconditions: for a few test examples, some tens of passes
            over the training data for all of them, five of whose gradients are held for each.
        projection: None: exact. K: from K random projections of each gradient, for models whose
            gradients do not fit in memory test example by test example, or for more test
            examples than multiplications allow. Unbiased; the error falls as 1/√K, is measured
            on random pairs computed exactly, and comes back as ``.error``: look at it. It is
            smallest for diagonal posteriors, larger for Kronecker, and largest for low-rank and
            full ones, whose correlations between layers no product of vectors can follow. It
            costs about K/N_train of the exact matrix, and holds K numbers per test example and
            per row and column of every weight beside the budget.
        generator: of the projection and its probe; None: the same ones on every call.
        memory_budget: bytes of working memory beside the answer (default 256 MiB, and enough for
            several examples); of test gradients at least one is held, P numbers. All are put in a
            file where half of it does not hold them, so that the training data are visited once;
            there, single precision is kept as half (each number off by 1 part in 2,000).
        folder: where that file is put, P numbers per test example, until the answer is there;
            None: where the system keeps its temporary files.
        progress: None shows a bar on a terminal when the work is long.

    Returns:
        A tensor ``[N_train, N_test]`` on the CPU with :meth:`~Influence.top`,
        :meth:`~Influence.group`, ``.table`` and :meth:`~Influence.plot`.

    Raises:
        PosteriorError: a posterior of another model or number of examples, or a test task of
            another model (other classes, other layers).
        InputError: a test task of another likelihood, a projection below 1 or of several
            posteriors, a measure that does not give one number per example, an answer larger than
            the machine's memory.
        DataError: NaN or inf inputs, targets out of range.
        ModelError: NaN or inf outputs, an influence that overflows.
        StorageError: the folder's disk does not hold the test gradients.

    Source: Nickl et al., NeurIPS 2023; Koh & Liang, ICML 2017, Eq. 2; normalized: Barshan, Brunet &
    Dziugaite, "RelatIF", AISTATS 2020, ℓ-RelatIF.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(30, 2), torch.randint(3, (30,))
        >>> model = torch.nn.Linear(2, 3)
        >>> task, test = blr.Task(model, (X, y)), blr.Task(model, (X[:4] + 0.1, y[:4]))
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> matrix = influence(task, q, test, progress=False)
        >>> matrix.shape, matrix.top(2).helpful.shape, matrix.group(by="target").values.shape
        (torch.Size([30, 4]), torch.Size([4, 2]), torch.Size([3, 4]))
    """
    if (sites := sum_of_sites(task, posterior)) is not None:
        asked = dict(normalize=normalize or None, expected=expected, projection=projection)
        asked |= dict(solver=None if solver in ("auto", "posterior") else solver)
        return site_influence(sites, test_task, asked)  # type: ignore[return-value]
    question = _Question(
        measure, normalize, expected, solver, projection, generator, memory_budget, folder
    )
    works = question.works(task, posterior, test_task, progress)
    n_test = works[-1].test_task.n_data
    _check_room(task.n_data, n_test, next(iter(works[-1].q.mean.values())).element_size())
    matrix: Tensor | None = None
    for piece in _mean(works, progress):
        if matrix is None:
            matrix = piece.values.new_zeros((task.n_data, n_test), device="cpu")
        columns = slice(int(piece.test[0]), int(piece.test[-1]) + 1)
        matrix[ranks.rows(piece.train), columns] = piece.values
    assert matrix is not None
    ranks.total([matrix])
    return Influence.of(matrix, works[-1].about(len({id(work.given) for work in works})))


@torch.inference_mode(False)
def top_influence(
    task: Task,
    posterior: Posterior | Sequence[Posterior] = None,  # type: ignore[assignment]
    test_task: Task = None,  # type: ignore[assignment]
    *,
    k: int = SHOWN,
    measure: Measure = "loss",
    normalize: Normalize = False,
    expected: bool | None = None,
    solver: str = "auto",
    projection: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> TopInfluence:
    """The k most helpful and k most harmful training examples of every test example.

    As ``influence(...).top(k)``, without ever holding the ``[N_train, N_test]`` matrix: beside
    ``memory_budget``, 4·k numbers per test example.

    Args:
        k: how many of either sign.

    The other arguments and the errors are those of :func:`influence`; k above the number of
    training examples is an :class:`InputError`.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(30, 2), torch.randint(3, (30,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> top = top_influence(task, q, task, k=2, progress=False)
        >>> top.helpful.shape, top.table.shape[0]
        (torch.Size([30, 2]), 120)
    """
    question = _Question(
        measure, normalize, expected, solver, projection, generator, memory_budget, folder
    )
    works = question.works(task, posterior, test_task, progress)
    check_k(k, task.n_data)
    blocks: dict[int, Best] = {}
    for piece in _mean(works, progress):
        blocks.setdefault(int(piece.test[0]), Best(k)).add(piece.train, piece.values)
    for best in blocks.values():
        best.shared(task.n_data)
    return joined(list(blocks.values()), works[-1].about(len({id(work.given) for work in works})))


@dataclass(frozen=True)
class _Question:
    """What :func:`influence` and :func:`top_influence` are asked for beside the tasks."""

    measure: Measure
    normalize: Normalize
    expected: bool | None
    solver: str
    projection: int | None
    generator: torch.Generator | None
    memory_budget: int | None
    folder: str | os.PathLike[str] | None

    def works(
        self, task: Task, posterior: Any, test_task: Any, progress: bool | None
    ) -> list[_Work]:
        """One for each posterior, which share the memory; arguments checked."""
        qs = all_fitted(task, posterior)
        where = check_test(test_task, task, "test_task")
        memory_budget = self.memory_budget
        quantity_of(self.normalize)
        one_of("solver", self.solver, SOLVERS)
        if self.solver == "cg" and (self.normalize or self.projection is not None):
            raise InputError('solver="cg" takes neither normalize= nor projection=')
        if self.expected is not None:
            instance("expected", self.expected, bool, "True, False or None")
        if self.projection is not None:
            positive_int("projection", self.projection)
            if len(qs) > 1:
                raise InputError("projection= takes one posterior; add up the parts")
        if memory_budget is not None:
            positive_int("memory_budget", memory_budget)
        if len(qs) > 1:
            memory_budget = max(1, (memory_budget or DEFAULT_MEMORY) // len(qs))
        generator = torch.Generator().manual_seed(0) if self.generator is None else self.generator
        instance("generator", generator, torch.Generator, "a torch.Generator")
        cotangent = cotangent_of(self.measure)
        folder = None if self.folder is None else Path(path_of(self.folder)).expanduser()
        question = replace(self, memory_budget=memory_budget, folder=folder)
        works, note = [], ""
        for given in qs:
            taken, own = [given], None
            if self.solver == "auto" and len(qs) == 1:
                free = self.expected is None
                own = training_errors(task, given, progress=progress) if free else None
                # Of classes, and where time and memory were not bound.
                drawn = own is not None and self.projection is None and memory_budget is None
                chunking = Chunking(memory_budget=memory_budget, progress=progress)
                taken, note = whole(task, given, chunking, own, drawn=drawn)
                note = "; ".join(filter(None, (note, AVERAGED if own else "")))
            if len(taken) > 1:
                question = replace(question, memory_budget=DEFAULT_MEMORY // len(taken))
            for q in taken:
                errors = own or question.errors(task, q)
                works.append(
                    _Work(task, given, q, where, cotangent, errors, question, generator, note)
                )
        return works

    def errors(self, task: Task, q: Posterior) -> Cotangent:
        """Of the training examples, where nothing averages them over training."""
        averaged = q.record.get("expected", False) if self.expected is None else self.expected
        return _expected(task, q, self.memory_budget) if averaged else loss_gradient


def _expected(task: Task, q: Posterior, memory_budget: int | None) -> Cotangent:
    """The cotangent E_q[e_i]."""
    errors = expected_errors(task, q, Chunking(memory_budget=memory_budget, progress=False))
    return lambda task, chunk: errors[chunk.indices.to(errors.device)].to(chunk.outputs)


def _mean(works: list[_Work], progress: bool | None) -> Iterator[Piece]:
    """Piece by piece the mean over the posteriors: all cut the matrix at the same places."""
    shown = [progress, *[False] * (len(works) - 1)]
    each = [work.scaled(show) for work, show in zip(works, shown, strict=True)]
    for first, *others in zip(*each, strict=True):
        for other in others:
            first.values.add_(other.values)
        if others:
            first.values.div_(len(works))
        yield first


@dataclass
class _Work:
    """Checked arguments; hands out pieces of the matrix, exact or projected."""

    task: Task
    given: Posterior
    q: Posterior  # that is taken
    test_task: Task
    cotangent: Cotangent
    own: Cotangent  # of the training examples
    question: _Question
    generator: torch.Generator
    note: str = ""
    error: ProjectionError | None = None

    def about(self, checkpoints: int) -> Pairs:
        measure, kind = self.question.measure, quantity_of(self.question.normalize)
        words = measure if isinstance(measure, str) else getattr(measure, "__name__", "measure")
        about = (self.task, self.given, self.test_task, self.error, words, kind, checkpoints)
        return Pairs(*about, note=self.note)

    def scaled(self, progress: bool | None) -> Iterator[Piece]:
        """The pieces, normalized where that is asked for."""
        if not self.question.normalize:
            yield from self.pieces(progress)
            return
        projected = self.question.projection is not None
        cosine = self.question.normalize == "cosine"
        roots = self._roots(self.task, self.own) if projected else None
        others = self._roots(self.test_task, self.cotangent) if cosine else None
        for piece in self.pieces(progress):
            own = rooted(piece.squares) if roots is None else roots[piece.train]
            piece.values.div_(own.unsqueeze(1).to(piece.values))
            if others is not None:
                piece.values.div_(others[piece.test].to(piece.values))
            yield piece

    def _roots(self, task: Task, cotangent: Cotangent) -> Tensor:
        """√(gᵀ Σ g) of every example, on the CPU; where there is no gradient, 1."""
        chunking = Chunking(memory_budget=self.question.memory_budget, progress=False)
        own = torch.arange(task.n_data) if task is self.test_task else shared(task, self.q.mean)
        swept = chunks(task, self.q.mean, chunking, columns=1, indices=own)
        squares = torch.cat([self_influence(self.q, c, cotangent(task, c)).cpu() for c in swept])
        if len(own) < task.n_data:
            squares = ranks.gathered(squares, own, task.n_data)
        return rooted(squares)

    def exact(self, progress: bool | None, **where: Any) -> Iterator[Piece]:
        folder = self.question.folder
        return pieces(
            self.task,
            self.q,
            self.test_task,
            cotangent=self.cotangent,
            train_cotangent=self.own,
            memory_budget=self.question.memory_budget,
            folder=None if folder is None else Path(folder),
            solve=self._solved if self.question.solver == "cg" else None,
            progress=progress,
            **where,
        )

    def _solved(self, gradients: Tree) -> Tree:
        """S⁻¹ g, S = Σ_i J_iᵀ Λ_i J_i + δ."""
        q, budget = self.q, self.question.memory_budget
        exact = Precision(self.task, q.mean, q.prior, memory_budget=budget)
        solution = cg(
            exact.times,
            gradients,
            preconditioner=q.form,
            batch_dims=1,
            tolerance=TOLERANCE,
            max_iterations=ITERATIONS,
        )
        if not bool(solution.converged.all()):
            said = f"{solution}: some influences are rough; take structure='kron'"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return solution.x

    def pieces(self, progress: bool | None) -> Iterator[Piece]:
        if self.question.projection is None:
            own = shared(self.task, self.q.mean)
            yield from self.exact(progress, squares=bool(self.question.normalize), indices=own)
            return
        budget = Budget.of(self.question.memory_budget, self.q, self.test_task.n_data)
        sketch = self._sketch(self.question.projection, budget)
        parts = []
        order = torch.arange(self.test_task.n_data)
        for block in order.split(budget.vectors):
            held = preconditioned(self.test_task, self.q, block, self.cotangent, budget)
            parts.append(sketch.test(held))
            del held
        seen = torch.cat(parts)
        self.error = self._measured(sketch, seen, budget)
        own = shared(self.task, self.q.mean)
        for indices, numbers in self._train(sketch, budget, own, progress):
            for columns in order.split(WIDE):
                values = numbers @ seen[columns[0] : int(columns[-1]) + 1].mT
                check_finite(values, "influence")
                yield Piece(indices, columns, values)

    def _sketch(self, size: int, budget: Budget) -> Projection:
        some = _some(self.task.n_data, SAMPLE, self.generator)
        held = Chunking(memory_budget=budget.chunk, progress=False)
        passes = chunks(self.task, self.q.mean, held, columns=1, indices=some)
        first = next(passes)
        terms = loss_terms(self.task, first, self.own)
        return projection_for(self.q.form, terms, size, self.generator, budget.room)

    def _train(
        self, sketch: Projection, budget: Budget, indices: Tensor, progress: bool | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        numbers = max(sketch.size, min(WIDE, self.test_task.n_data))
        size = chunk_size(self.task, self.q, budget, len(indices), numbers)
        chunking = Chunking(size, progress=progress)
        for chunk in chunks(self.task, self.q.mean, chunking, indices=indices, label="influence"):
            yield chunk.indices, sketch.train(loss_terms(self.task, chunk, self.own))

    def _measured(self, sketch: Projection, seen: Tensor, budget: Budget) -> ProjectionError:
        """The projection against exact influence, on random pairs."""
        rows, columns = (
            _some(n, most, self.generator)
            for n, most in zip((self.task.n_data, self.test_task.n_data), PROBE, strict=True)
        )
        numbers = [part for _, part in self._train(sketch, budget, rows, False)]
        estimate = torch.cat(numbers) @ seen[columns.to(seen.device)].mT
        exact = self.exact(False, indices=rows, test_indices=columns)
        return ProjectionError.between(estimate.cpu(), matrix_of(exact))


def _check_room(n_train: int, n_test: int, itemsize: int) -> None:
    """Raise unless this machine's memory could hold the answer."""
    size, memory = n_train * n_test * itemsize, physical_memory()
    if size > memory:
        raise InputError(
            f"influence [{n_train:,}, {n_test:,}] takes {size / 2**30:,.0f} of "
            f"{memory / 2**30:,.0f} GiB; use top_influence(...)"
        )


def physical_memory() -> int:
    """Bytes of memory that this machine has; without a bound where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on every system
        return sys.maxsize


def _some(n: int, most: int, generator: torch.Generator) -> Tensor:
    """Up to ``most`` of n indices, in order."""
    drawn = torch.randperm(n, generator=generator, device=generator.device)[:most]
    return drawn.cpu().sort().values


def cotangent_of(measure: Measure) -> Cotangent:
    """∂(measure)/∂f of every example of a chunk.

    Raises:
        InputError: an unknown word, or a function that does not give one number per example, or
            none that has a gradient.
    """
    if isinstance(measure, str) and measure == "loss":
        return loss_gradient
    if not callable(measure):
        raise InputError(f'measure must be "loss" or (outputs, targets) -> [B], got {measure!r}')

    def gradient(task: Task, chunk: Chunk) -> Tensor:
        with torch.enable_grad():
            outputs = chunk.outputs.detach().clone().requires_grad_()
            values: Any = measure(outputs, chunk.targets)
            if not isinstance(values, Tensor) or values.shape != outputs.shape[:1]:
                got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise InputError(f"measure must give one number per example; got {got}")
            if not values.requires_grad:
                raise InputError(
                    "measure has no gradient in the outputs (a count, or detached): use a smooth "
                    "one, as the loss or a probability"
                )
            (slope,) = torch.autograd.grad(values.sum(), outputs)
        return slope.detach()

    return gradient

"""How much each training example matters to each test prediction.

The memory-perturbation equation to first order (Nickl et al., NeurIPS 2023), which is the
influence function of Koh & Liang (ICML 2017) with the learned covariance as inverse curvature:

    influence[i, j] = τ · mean_t ∇ℓ_j(t)ᵀ Σ(t) ∇ℓ_i(t) ≈ ℓ_j(without i) − ℓ_j

over the checkpoints t of the posterior's run, τ its temperature.
Positive: leaving i out hurts j, i helps. Σ includes the prior and example i itself. Divided by the
root of the self-influence ∇ℓ_iᵀ Σ ∇ℓ_i it is the change of j for a given change of the model
(ℓ-RelatIF: Barshan, Brunet & Dziugaite, AISTATS 2020): examples that are wrong or unlike the others
move the model most, and with it every test loss; normalized, they no longer lead every list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunk, chunks
from blr_analysis.backprop.record import shared
from blr_analysis.errors import InputError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.sensitivity.corrections import self_influence
from blr_analysis.sensitivity.influence.blocks import (
    Cotangent,
    Piece,
    loss_gradient,
    physical_memory,
    pieces,
)
from blr_analysis.sensitivity.influence.results import (
    Best,
    Influence,
    Normalize,
    Pairs,
    TopInfluence,
    check_k,
    joined,
    quantity_of,
    rooted,
)
from blr_analysis.sensitivity.other_units import unlike_training
from blr_analysis.sensitivity.run import mean_errors
from blr_analysis.sensitivity.scores import all_fitted, check_test
from blr_analysis.sensitivity.sites import site_influence, sum_of_sites
from blr_analysis.task import Task

Measure = str | Callable[[Tensor, Tensor], Tensor]


@torch.inference_mode(False)  # also where the caller switched it on
def influence(
    task: Task,
    posterior: Posterior | Sequence[Posterior] = None,  # type: ignore[assignment]
    test_task: Task = None,  # type: ignore[assignment]
    *,
    measure: Measure = "loss",
    normalize: Normalize = False,
    k: int | None = None,
) -> Influence | TopInfluence:
    """Rise of every test loss when each training example is left out, to first order.

    influence[i, j] = τ mean_t ∇q_jᵀ Σ ∇ℓ_i with q_j = ℓ_j, in nats: positive where i helps j. At a
    minimum the diagonal of ``influence(task, posterior, task)`` is
    ``sensitivity(task, posterior).self_influence``. Off it, where the end of a training alone is
    known, errors of classes in the training data are taken at .7 of the logits.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data; or a list of those of several runs
            (:func:`blr_analysis.rerun`), over which the answer is a mean. A fitted probabilistic
            model stands alone, ``influence(fitted, None, data)``: ``.matrix`` is by subtraction of
            sites, ``.error`` how much a further step of the rule changes it.
        test_task: the examples whose loss is asked about, under the same model and likelihood.
        measure: "loss", or a function of outputs ``[B, C]`` and targets giving one number per
            test example, whose rise is computed instead (``lambda f, y: f.softmax(-1)[:, 3]``).
        normalize: True divides by √(∇ℓ_iᵀ Σ ∇ℓ_i) of the training example, for finding what a
            prediction rests on (which source, which fact); the sign stays, the unit is √nats, and
            sums over groups no longer mean anything. "cosine" divides by the test example's root
            as well, so that numbers compare across test examples, between -1 and 1.
        k: None: the whole matrix. A number: the k most helpful and k most harmful of every test
            example, without ever holding the matrix.

    Returns:
        A tensor ``[N_train, N_test]`` on the CPU, an :class:`~blr_analysis.sensitivity.Influence`
        with ``.top(k)``, ``.group()``, ``.table`` and ``.plot()``; with ``k`` what its ``top(k)``
        is.

    Raises:
        PosteriorError: a posterior of another model or number of examples, or a test task of
            another model (other classes, other layers).
        InputError: a test task of another likelihood, a measure that does not give one number per
            example, an answer larger than the machine's memory, k above the number of examples.
        DataError: NaN or inf inputs, targets out of range.
        ModelError: NaN or inf outputs, an influence that overflows.

    Source: Nickl et al., NeurIPS 2023; Koh & Liang, ICML 2017, Eq. 2; averaged over a training:
    Pruthi et al., "TracIn", NeurIPS 2020; normalized: Barshan, Brunet & Dziugaite, "RelatIF",
    AISTATS 2020, ℓ-RelatIF.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(30, 2), torch.randint(3, (30,))
        >>> model = torch.nn.Linear(2, 3)
        >>> task, test = blr.Task(model, (X, y)), blr.Task(model, (X[:4] + 0.1, y[:4]))
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> matrix = influence(task, q, test)
        >>> matrix.shape, matrix.top(2).helpful.shape, matrix.group(by="target").values.shape
        (torch.Size([30, 4]), torch.Size([4, 2]), torch.Size([3, 4]))
        >>> influence(task, q, test, k=2).helpful.shape
        torch.Size([4, 2])
    """
    if (sites := sum_of_sites(task, posterior)) is not None:
        return site_influence(sites, test_task, {"normalize": normalize or None, "k": k})  # type: ignore[return-value]
    quantity, cotangent = quantity_of(normalize), cotangent_of(measure)
    several = all_fitted(task, posterior)
    count = sum(len(q.run) for _, q in several)
    works, where = [], test_task
    for _, q in several:
        for p in q.run:
            at = task.holding(p.buffers)
            at, where = at.quiet if works else at, check_test(test_task, at, "test_task")
            own = loss_gradient if q.earlier else mean_errors(at, p)
            share = (1.0 if normalize else q.temperature) / (len(q.run) * len(several))
            works.append(_share(at, p, where, cotangent, own, normalize, count, share))
    q, words = several[-1][1], measure if isinstance(measure, str) else measure.__name__
    unlike = unlike_training(task.holding(q.buffers), where, q.mean)
    about = Pairs(task, q, where, words, quantity, count, unlike)
    if k is not None:
        check_k(k, task.n_data)
        blocks: dict[int, Best] = {}
        for piece in _summed(works):
            blocks.setdefault(int(piece.test[0]), Best(k)).add(piece.train, piece.values)
        for best in blocks.values():
            best.shared(task.n_data)
        return joined(list(blocks.values()), about)
    n_test = where.n_data
    _check_room(task.n_data, n_test, next(iter(q.mean.values())).element_size())
    matrix: Tensor | None = None
    for piece in _summed(works):
        if matrix is None:
            matrix = piece.values.new_zeros((task.n_data, n_test), device="cpu")
        columns = slice(int(piece.test[0]), int(piece.test[-1]) + 1)
        matrix[ranks.rows(piece.train), columns] = piece.values.cpu()
    assert matrix is not None
    ranks.total([matrix])
    return Influence.of(matrix, about)


def _summed(works: Sequence[Iterator[Piece]]) -> Iterator[Piece]:
    """Piece by piece the sum over the posteriors: all cut the matrix at the same places."""
    for first, *others in zip(*works, strict=True):
        for other in others:
            first.values.add_(other.values)
        yield first


def _share(
    task: Task,
    q: Posterior,
    test_task: Task,
    cotangent: Cotangent,
    own: Cotangent,
    normalize: Normalize,
    sharers: int,
    share: float,
) -> Iterator[Piece]:
    """The share of one posterior in the answer, piece by piece; ``own``: the training examples'
    cotangents."""
    others: Tensor | None = None
    if normalize == "cosine":
        swept = chunks(test_task.quiet, q.mean, columns=1)
        squares = [self_influence(q, c, cotangent(test_task, c)).cpu() for c in swept]
        others = rooted(torch.cat(squares))
    how: dict[str, Any] = {"cotangent": cotangent, "train_cotangent": own, "sharers": sharers}
    how |= {"squares": bool(normalize), "indices": shared(task, q.mean)}
    for piece in pieces(task, q, test_task, **how):
        piece.values.mul_(share)
        if normalize:
            piece.values.div_(rooted(piece.squares).unsqueeze(1).to(piece.values))
        if others is not None:
            piece.values.div_(others[piece.test].to(piece.values))
        yield piece


def _check_room(n_train: int, n_test: int, itemsize: int) -> None:
    """Raise unless this machine's memory could hold the answer."""
    size, memory = n_train * n_test * itemsize, physical_memory()
    if size > memory:
        raise InputError(
            f"influence [{n_train:,}, {n_test:,}] takes {size / 2**30:,.0f} of "
            f"{memory / 2**30:,.0f} GiB; use k="
        )


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

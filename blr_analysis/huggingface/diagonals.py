"""Sums of squared gradients over the examples of a task: the diagonals that models are merged with.

With g_i the gradient of example i's loss (of a sequence: summed over its tokens), J_i its
Jacobian, Λ_i the Hessian of its loss in the outputs, and ŷ drawn from the model's own
predictions:

    fisher_mc            Σ_i (1/K) Σ_k g_i(ŷ_ik)²          the Fisher, by K samples per example
    fisher_emp           Σ_i g_i(y_i)²                     the empirical Fisher: observed labels
    ggn                  Σ_i diag(J_iᵀ Λ_i J_i)            what fisher_mc tends to as K grows
    squared_minibatch    (N/M) Σ_b (mean of g_i in batch b)²,  M batches of B examples

The last is what published merging scripts compute. It is NOT the Fisher: the gradients of a batch
are added before they are squared, so that at a minimum, where they cancel, it is about B times
smaller than the empirical Fisher, and it grows where they do not. With B = 1 they agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunk, Chunking, chunks, default_memory, n_outputs
from blr_analysis.backprop.loss import batch_gradient
from blr_analysis.backprop.plan import plan_for
from blr_analysis.backprop.record import shared
from blr_analysis.checks import at_least, instance, one_of, positive_int
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Unfinished
from blr_analysis.posterior import check_finite, curvature_root, drawn_labels
from blr_analysis.progress import bar
from blr_analysis.task import Task

KINDS = ("fisher_mc", "fisher_emp", "ggn", "squared_minibatch")
MEMORY = 2**28  # bytes of working memory where the user names no bound
AT_ONCE = 4  # examples per pass at most: with more, their gradients leave the cache
COLUMNS = 4  # gradients of one example that are held at once
ALIKE = 0.75  # lengths above this part of the longest one are padded to it


@torch.inference_mode(False)
def fisher_diagonal(
    task: Task,
    *,
    kind: str = "fisher_mc",
    samples: int = 1,
    seed: int = 0,
    batch_size: int | None = None,
    memory_budget: int | None = None,
    lengths: Sequence[int] | None = None,
    kept: Unfinished | None = None,
    progress: bool | None = None,
) -> dict[str, Tensor]:
    """The diagonal of the module's equation ``kind``, by parameter name, on the CPU.

    A SUM over the task's examples: no prior, no mean. Parameters with ``requires_grad=False`` have
    no entry; tied ones have one, under their first name.

    Args:
        task: model, data and likelihood; the model is left as it is.
        kind: "fisher_mc", "fisher_emp", "ggn" (not for sequences) or "squared_minibatch".
        samples: K, labels drawn per example for "fisher_mc".
        seed: of those labels, by example, and of the batches of "squared_minibatch". The labels do
            not depend on how the examples are divided into passes.
        batch_size: B of "squared_minibatch", which needs it and no other kind takes it.
        memory_budget: bytes of working memory; at least one example's need. Default: 256 MiB, or
            8 examples' need, up to 1 GiB or four times what the parameters take.
        lengths: of sequences sorted by length, their lengths: neighbours then share a pass.
        kept: where the sums are kept meanwhile, and taken up from; not of "squared_minibatch".

    Returns:
        Tensors in the shape and dtype of the parameters; float32 where these are of half precision.

    Raises:
        InputError: an unknown kind; "ggn" for sequences; a batch size that is missing or unused.
        ModelError: nothing to train, gradients that are not finite.

    Source: Daheim et al. (2024), *Model Merging by Uncertainty-Based Gradient Matching*, eq. 12,
    and Kunstner et al. (2019), *Limitations of the Empirical Fisher Approximation*.

    Example:
        >>> import torch
        >>> X, y = torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 0.0])
        >>> task = Task(torch.nn.Linear(1, 1, bias=False), (X, y), likelihood="gaussian")
        >>> fisher_diagonal(task, kind="ggn")  # Σ x²
        {'weight': tensor([[5.]])}
    """
    instance("task", task, Task, "a blr_analysis.Task")
    one_of("kind", kind, KINDS)
    positive_int("samples", samples)
    at_least(0, "seed", seed)
    check_kind(kind, task.likelihood.is_sequence, batch_size)
    params = task.parameters()
    if not params:
        raise ModelError("the model has no trainable parameters; set requires_grad on some")
    task.check_parameters(params)
    check_finite(params)
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    if kind == "squared_minibatch":
        assert batch_size is not None
        _add_batches(total, task, params, batch_size, seed, progress)
    else:
        if memory_budget is not None:
            positive_int("memory_budget", memory_budget)
        how = kind, samples, seed, memory_budget, lengths
        _add_examples(total, task, params, *how, kept, progress)
    for name, sums in total.items():
        if not bool(torch.isfinite(sums).all()):
            raise ModelError(
                f"the squared gradients of {name!r} are not finite: check weights and losses"
            )
    return {name: sums.cpu() for name, sums in total.items()}


def check_kind(kind: str, sequences: bool, batch_size: int | None) -> None:
    """Raise :class:`InputError` where a kind cannot be had, or ``batch_size`` does not belong."""
    if kind == "ggn" and sequences:
        raise InputError(
            "kind='ggn' needs tokens × vocabulary backward passes per sequence: use kind='mc'"
        )
    if kind == "squared_minibatch":
        if batch_size is None:
            raise InputError("kind='squared_minibatch' needs batch_size: its numbers depend on it")
        positive_int("batch_size", batch_size)
    elif batch_size is not None:
        raise InputError(f"batch_size belongs to kind='squared_minibatch', not to {kind!r}")


def _add_examples(
    total: dict[str, Tensor],
    task: Task,
    params: Mapping[str, Tensor],
    kind: str,
    samples: int,
    seed: int,
    budget: int | None,
    lengths: Sequence[int] | None,
    kept: Unfinished | None,
    progress: bool | None,
) -> None:
    source = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**31, (task.n_data,), generator=source)  # one for every example
    wanted = {"fisher_mc": samples, "fisher_emp": 1}.get(kind, n_outputs(task, params))
    columns = min(wanted, COLUMNS)
    if budget is None:
        one = next(iter(params.values())).element_size() * plan_for(task, params).floats(columns)
        budget = default_memory(params, MEMORY, one)
    passes = _passes(task, params, columns, budget, lengths)
    if kept is not None:
        kept.take_up(total)
    done = 0 if kept is None else kept.done
    with bar(task.n_data, kind, progress, unit=" examples") as shown:
        shown.update(ranks.count() * sum(map(len, passes[:done])))
        for number, indices in enumerate(passes[done:], done + 1):
            size = None if lengths is None else len(indices)
            whole = Chunking(size, budget, progress=False)
            for chunk in chunks(task, params, whole, columns=columns, indices=indices):
                for cotangents, last in _columns(chunk, kind, samples, seeds):
                    for term in chunk.terms(cotangents, last=last):
                        term.add_square_sum(total)
                shown.update(ranks.count() * len(chunk.indices))
            if kept is not None:
                kept.keep(number, total)
    ranks.total(total.values())


def _columns(chunk: Chunk, kind: str, samples: int, seeds: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Cotangents ``[B, K, C]``, a few at a time, whose squared gradients are the chunk's share; and
    whether they are the last."""
    if kind == "ggn":
        pieces = curvature_root(chunk).split(COLUMNS, dim=1)
        yield from ((piece, k == len(pieces)) for k, piece in enumerate(pieces, 1))
        return
    if kind == "fisher_emp":
        yield chunk.likelihood.error(chunk.outputs, chunk.targets).unsqueeze(1), True
        return
    drawn = drawn_labels(chunk, samples, seeds[chunk.indices])
    for start in range(0, samples, COLUMNS):
        errors = [
            chunk.likelihood.drawn_error(chunk.outputs, chunk.targets, y)
            for y in drawn[start : start + COLUMNS]
        ]
        yield torch.stack(errors, dim=1) / samples**0.5, start + COLUMNS >= samples


def _passes(
    task: Task,
    params: Mapping[str, Tensor],
    columns: int,
    budget: int,
    lengths: Sequence[int] | None,
) -> list[Tensor]:
    """These examples in passes; where lengths are known, as large as each length allows."""
    own, plan = shared(task, params), plan_for(task, params)
    itemsize = next(iter(params.values())).element_size()
    if lengths is None:
        return list(own.split(plan.chunk_size(columns, budget, itemsize, len(own))))
    lengths = [lengths[i] for i in own.tolist()]
    passes: list[Tensor] = []
    for bucket in buckets(lengths):
        shorter = max(lengths) / lengths[int(bucket[-1])]
        fits = plan.chunk_size(columns, int(budget * shorter), itemsize, len(bucket))
        passes += own[bucket].split(min(fits, AT_ONCE))
    return passes


def buckets(lengths: Sequence[int]) -> list[Tensor]:
    """Runs of neighbours of much the same length, from lengths in ascending order.

    >>> [b.tolist() for b in buckets([2, 7, 8, 9, 10])]
    [[0], [1], [2, 3, 4]]
    """
    runs, stop = [], len(lengths)
    while stop:
        start = stop
        while start and lengths[start - 1] >= ALIKE * lengths[stop - 1]:
            start -= 1
        runs.append(torch.arange(start, stop))
        stop = start
    return runs[::-1]


def _add_batches(
    total: dict[str, Tensor],
    task: Task,
    params: Mapping[str, Tensor],
    batch_size: int,
    seed: int,
    progress: bool | None,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(task.n_data, generator=generator)
    batches = order.split(batch_size)
    own = ranks.share(torch.arange(len(batches))).tolist()
    scale = task.n_data / len(batches)
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    with (
        task.evaluation(),
        bar(task.n_data, "squared_minibatch", progress, unit=" examples") as shown,
    ):
        for indices in (batches[i] for i in own):
            grads = batch_gradient(task, leaves, indices)[2]
            for sums, grad in zip(total.values(), grads or (), strict=grads is not None):
                mean = grad.to_dense() / len(indices)
                sums.addcmul_(mean, mean, value=scale)
            shown.update(len(indices))
    ranks.total(total.values())

"""A posterior fitted after training, for models that were trained without one.

Laplace's method at the trained weights m (Khan & Rue, section 4.4; MacKay, 1992):

    S = diag(δ) + Σ_i J_iᵀ Λ_i J_i            curvature="ggn", exact over the C outputs
    S = diag(δ) + Σ_i g_i g_iᵀ,  g_i = J_iᵀ e_i    curvature="empirical_fisher"
    S = diag(δ) + Σ_i E_{ŷ~p(y|f_i)} ĝ_i ĝ_iᵀ      curvature="mc_fisher"

kept dense ("full"), projected on its diagonal ("diag"), on the eigenbasis of each layer's
Kronecker factors ("kron": eigenvalue-corrected K-FAC, George et al., 2018), or on its leading
directions, with what is left of its diagonal beside them ("lowrank").
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk, Chunking, chunks, n_outputs
from blr_analysis.backprop.matrices import Basis, Joint
from blr_analysis.backprop.terms import Term
from blr_analysis.checks import instance, one_of, positive_int
from blr_analysis.errors import InputError, ModelError
from blr_analysis.posterior.capture import tied_names
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures import (
    Diagonal,
    Full,
    Kronecker,
    LowRank,
    Structure,
)
from blr_analysis.posterior.structures.sketch import Sketch, sketch
from blr_analysis.task import Task

STRUCTURES = ("diag", "kron", "lowrank", "full")
CURVATURES = ("ggn", "empirical_fisher", "mc_fisher")
KINDS = {"ggn": "ggn", "empirical_fisher": "fisher_emp", "mc_fisher": "fisher_mc"}  # in records
FULL_LIMIT = 20_000  # parameters: 3 GB of float64
RANK_LIMIT = 4_000  # for a rank that is grown: its r × r problems take a minute
BASIS_LIMIT = 2**30  # numbers in the basis of a rank that is grown: 4 GB of float32
TOLERANCE = 0.05  # of tr(ΛV); V itself is nearer, by the diagonal that is kept beside
Columns = Callable[[Chunk], Tensor]
Passes = Callable[[str], Iterator[list[Term]]]


@torch.inference_mode(False)  # also where the caller switched it on
def fit_laplace(
    task: Task,
    *,
    structure: str = "kron",
    prior_precision: Given | Prior,
    curvature: str = "ggn",
    samples: int = 1,
    rank: int | None = None,
    tolerance: float | None = None,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Posterior:
    """The Gaussian posterior at the model's present weights, S as in the module's equations.

    The objective is the SUM of losses, so with a loss averaged over N examples and an L2 penalty
    ``weight_decay``, δ = N · weight_decay.

    Args:
        task: model, training data, likelihood. The model is left as it is.
        structure: "diag", "kron", "lowrank" (r·P numbers), or "full" (P up to 20,000).
        prior_precision: δ > 0, a number, or one per parameter name (number or tensor).
        curvature: "ggn" (exact; not for sequences), "empirical_fisher", "mc_fisher".
        samples: labels drawn per example for "mc_fisher".
        rank: r of "lowrank"; None: grown until ``tolerance`` is met, up to 4,000 directions.
        tolerance: the part of Σ_i tr(Λ_i V_i) = Σ_k λ_k / (λ_k + δ) that "lowrank" may leave
            unexplained (default 0.05). The record holds ``rank``, ``tolerance`` and ``explained``,
            the share that is explained at least.
        generator: the source of those labels.
        chunk_size, memory_budget: examples per pass, or bytes of working memory.

    Raises:
        InputError: unknown structure or curvature, δ ≤ 0, a model too large for "full", "ggn" for
            sequences.
        ModelError: nothing to train, NaN, BatchNorm in training mode.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(20, 3), torch.randn(20)
        >>> task = blr.Task(torch.nn.Linear(3, 1), (X, y), likelihood="gaussian")
        >>> q = fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> Z = torch.cat([X, torch.ones(20, 1)], 1)
        >>> torch.allclose(q.form.matrix, Z.T @ Z + torch.eye(4), atol=1e-4)
        True
    """
    instance("task", task, Task, "a blr_analysis.Task")
    params = task.parameters()
    prior = _checked(task, params, structure, prior_precision, curvature, samples)
    _check_rank(params, structure, rank, tolerance)
    if generator is not None:
        instance("generator", generator, torch.Generator, "a torch.Generator")
    columns, count = _columns(task, curvature, samples, generator)
    chunking = Chunking(chunk_size, memory_budget, progress)

    def passes(label: str) -> Iterator[list[Term]]:
        swept = chunks(task, params, chunking, columns=count, label=label)
        return (chunk.terms(columns(chunk)) for chunk in swept)

    form, found = _basis(task, params, structure, passes, prior, rank, tolerance, count)
    for terms in passes(f"{structure} {curvature}"):
        form = form.add(terms)
    if found is not None:
        assert isinstance(form, LowRank)
        form = form.with_rest(found.diagonal)
    record = {
        "kind": KINDS[curvature],
        "source": "laplace",
        "definition": "S = diag(prior_precision) + "
        + {
            "ggn": "sum_i J_i^T Lambda_i J_i",
            "empirical_fisher": "sum_i g_i g_i^T",
            "mc_fisher": f"sum_i mean over {samples} sampled labels of g_i g_i^T",
        }[curvature],
        "likelihood": repr(task.likelihood)
        if hasattr(task.likelihood, "variance")
        else task.likelihood.name,
        "fixed": [n for n, _ in task.model.named_parameters() if n not in params],
        "frozen": [n for n, p in task.model.named_parameters() if not p.requires_grad],
        "tied": tied_names(task.model),
    }
    if isinstance(form, LowRank) and found is not None:
        record |= {"rank": form.rank, "tolerance": None if rank else tolerance or TOLERANCE}
        record["explained"] = found.share
    return Posterior(
        {n: p.clone() for n, p in params.items()},
        form.plus_prior(prior),
        prior_precision=prior,
        n_data=task.n_data,
        record=record,
    )


def curvature_root(task: Task, chunk: Chunk) -> Tensor:
    """Columns c_ik with Σ_k c_ik c_ikᵀ = Λ_i, ``[B, K, C]``.

    For sequences, where Λ_i has T·C columns, the empirical Fisher's one instead: e_i.
    """
    if task.likelihood.is_sequence:
        return task.likelihood.error(chunk.outputs, chunk.targets).unsqueeze(1)
    return task.likelihood.hessian_root(chunk.outputs).mT


def _columns(
    task: Task, curvature: str, samples: int, generator: torch.Generator | None
) -> tuple[Columns, int | None]:
    likelihood = task.likelihood
    if curvature == "ggn":
        return lambda chunk: curvature_root(task, chunk), None
    if curvature == "empirical_fisher":
        return lambda chunk: likelihood.error(chunk.outputs, chunk.targets).unsqueeze(1), 1

    source = torch.Generator() if generator is None else generator
    drawn: dict[int, list[Tensor]] = {}

    def sampled(chunk: Chunk) -> Tensor:
        # Labels are kept by example, so that a second pass sees those of the first.
        first = int(chunk.indices[0])
        if first not in drawn:
            outputs, targets = chunk.outputs.cpu(), chunk.targets.cpu()
            drawn[first] = [likelihood.resample(outputs, targets, source) for _ in range(samples)]
        errors = [likelihood.error(chunk.outputs, y.to(chunk.outputs.device)) for y in drawn[first]]
        return torch.stack(errors, dim=1) / samples**0.5

    return sampled, samples


def _basis(
    task: Task,
    params: Mapping[str, Tensor],
    structure: str,
    passes: Passes,
    prior: Prior,
    rank: int | None,
    tolerance: float | None,
    count: int | None,
) -> tuple[Structure, Sketch | None]:
    """The zero matrix of this structure; "kron" and "lowrank" find their basis in the data."""
    if structure == "diag":
        return Diagonal({n: torch.zeros_like(p) for n, p in params.items()}), None
    if structure == "full":
        like = next(iter(params.values()))
        size = sum(p.numel() for p in params.values())
        shapes = {n: tuple(p.shape) for n, p in params.items()}
        return Full(like.new_zeros(size, size), shapes), None
    if structure == "kron":
        return _factors(params, passes, padded=task.likelihood.is_sequence), None
    columns = n_outputs(task, params) if count is None else count
    return _directions(params, passes, prior, rank, tolerance or TOLERANCE, task.n_data * columns)


def _directions(
    params: Mapping[str, Tensor],
    passes: Passes,
    prior: Prior,
    rank: int | None,
    tolerance: float,
    gradients: int,
) -> tuple[LowRank, Sketch]:
    size = sum(p.numel() for p in params.values())
    most = max(1, min(RANK_LIMIT, BASIS_LIMIT // size))
    found = sketch(
        passes,
        params,
        prior,
        rank=rank,
        tolerance=tolerance,
        most=most,
        size=min(size, gradients),
    )
    kept = len(next(iter(found.basis.values())))
    if rank is None and kept == most and found.share < 1 - tolerance:
        warnings.warn(
            f"{most:,} directions explain {found.share:.1%} of tr(ΛV), not the {1 - tolerance:.1%} "
            "asked for, and no more are taken by themselves: give rank=..., a larger tolerance or "
            "a larger prior_precision",
            stacklevel=4,
        )
    like = next(iter(params.values()))
    base = {n: torch.zeros_like(p) for n, p in params.items()}
    return LowRank(base, found.basis, like.new_zeros(kept, kept)), found


def _factors(params: Mapping[str, Tensor], passes: Passes, *, padded: bool) -> Kronecker:
    moments: dict[str, tuple[Joint, Tensor, Tensor]] = {}
    for terms in passes("Kronecker factors"):
        for term in terms:
            factors = term.factors(padded=padded)
            if factors is None:
                continue
            joint, right, left = factors[0], factors[1].double(), factors[2].double()
            if joint.key in moments:
                _, r, d = moments[joint.key]
                right, left = r + right, d + left
            moments[joint.key] = (joint, right, left)
    blocks = []
    for joint, right, left in moments.values():
        u_right, u_left = (torch.linalg.eigh(m)[1].to(params[joint.key]) for m in (right, left))
        blocks.append(Basis(joint.weight, joint.bias, joint.layout, u_right, u_left))
    joined = {n for block in blocks for n in block.names}
    plain = {n: tuple(p.shape) for n, p in params.items() if n not in joined}
    values = {n: torch.zeros_like(params[n]) for n in plain}
    for b in blocks:
        values[b.key] = b.left.new_zeros(b.shape)
    return Kronecker(tuple(blocks), values, plain, tuple(params))


def _checked(
    task: Task,
    params: Mapping[str, Tensor],
    structure: str,
    prior: Given | Prior,
    curvature: str,
    samples: int,
) -> Prior:
    one_of("structure", structure, STRUCTURES)
    one_of("curvature", curvature, CURVATURES)
    positive_int("samples", samples)
    if task.likelihood.is_sequence and curvature == "ggn":
        raise InputError(
            f'curvature="ggn" needs one column for each of the T·C outputs of a sequence, too many '
            f'under the {task.likelihood.name} likelihood; use curvature="empirical_fisher" or '
            '"mc_fisher", one gradient per sequence'
        )
    if not params:
        raise ModelError(
            "the model has no trainable parameters; set requires_grad on those to be analysed"
        )
    task.check_parameters(params)
    for name, p in params.items():
        if not bool(torch.isfinite(p).all()):
            raise ModelError(f"the weights of {name!r} hold NaN or inf; was training stable?")
    shapes = {n: tuple(p.shape) for n, p in params.items()}
    checked = Prior.read(prior, shapes, positive=True).placed(params)
    size = sum(p.numel() for p in params.values())
    if structure == "full" and size > FULL_LIMIT:
        raise InputError(
            f"structure='full' holds a {size:,} × {size:,} matrix; use 'lowrank', 'kron' or 'diag' "
            f"above {FULL_LIMIT:,} parameters"
        )
    return checked


def _check_rank(
    params: Mapping[str, Tensor], structure: str, rank: int | None, tolerance: float | None
) -> None:
    given = {"rank": rank, "tolerance": tolerance}
    named = [name for name, value in given.items() if value is not None]
    if structure != "lowrank":
        if named:
            raise InputError(
                f"{named[0]} belongs to structure='lowrank', got structure={structure!r}"
            )
        return
    if len(named) == 2:
        raise InputError("give rank or tolerance, not both: the rank is grown to the tolerance")
    size = sum(p.numel() for p in params.values())
    if rank is not None and positive_int("rank", rank) >= size:
        raise InputError(
            f"rank must be below the number of parameters, {size:,}, got {rank:,}; use "
            "structure='full' for all directions"
        )
    if tolerance is not None and not (
        isinstance(tolerance, (int, float))
        and not isinstance(tolerance, bool)
        and 0 < tolerance < 1
    ):
        raise InputError(f"tolerance must be a number above 0 and below 1, got {tolerance!r}")

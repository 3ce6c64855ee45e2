"""How much each training example matters to each test prediction.

The memory-perturbation equation to first order (Nickl et al., NeurIPS 2023), which is the
influence function of Koh & Liang (ICML 2017) with the learned covariance as inverse curvature:

    influence[i, j] = τ · mean_t ∇ℓ_j(t)ᵀ Σ(t) ∇ℓ_i(t) ≈ ℓ_j(without i) − ℓ_j

The mean is over the checkpoints t of the posterior's run; τ is its temperature. A positive
influence says that i helps j: leaving i out raises ℓ_j. Σ includes the prior and example i itself.

Normalized influence is divided by the root of the self-influence ∇ℓ_iᵀ Σ ∇ℓ_i. It is the change of
ℓ_j for a change of the model of a given size (ℓ-RelatIF: Barshan, Brunet & Dziugaite, AISTATS
2020). Examples that are wrong or unlike the others move the model most, and so they move every test
loss; normalized, they no longer lead every list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.influence.between import Measure
from blr_analysis.sensitivity.influence.results import Influence, Normalize, TopInfluence
from blr_analysis.sensitivity.subjects import subject_of
from blr_analysis.task import Task


@torch.inference_mode(False)  # also where the caller switched it on
def influence(
    task: Task,
    posterior: Posterior | Sequence[Posterior] | None = None,
    test_task: Task | None = None,
    *,
    measure: Measure = "loss",
    normalize: Normalize = False,
    k: int | None = None,
) -> Influence | TopInfluence:
    """Rise of every test loss when each training example is left out, to first order.

    influence[i, j] = τ mean_t ∇q_jᵀ Σ ∇ℓ_i with q_j = ℓ_j, in nats: positive where i helps j. At a
    minimum the diagonal of ``influence(task, posterior, task)`` is
    ``sensitivity(task, posterior).self_influence``. Off a minimum, the errors of training examples
    should be averaged over the training; for a classifier whose posterior has no earlier
    checkpoints, errors at 0.7 times the final logits take the place of that mean.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data; or a list of the posteriors of several runs
            (:func:`blr_analysis.rerun`), over which influence is averaged. A fitted probabilistic
            model has no separate posterior, ``influence(fitted, None, data)``: each site is
            subtracted. That is exact for conjugate models; for other models ``what_if`` is more
            exact, because it also takes steps of the rule.
        test_task: the examples whose loss is predicted, with the same model and likelihood.
        measure: "loss", or a function of outputs ``[B, C]`` and targets that gives one number per
            test example, such as ``lambda f, y: f.softmax(-1)[:, 3]``. The influence is then the
            rise of this number.
        normalize: True divides by √(∇ℓ_iᵀ Σ ∇ℓ_i) of the training example. It is for finding what a
            prediction rests on (which source, which fact): the sign stays, the unit is √nats, and
            sums over groups have no meaning. "cosine" divides by the root of the test example as
            well; numbers lie between -1 and 1 and can be compared across test examples.
        k: None gives the whole matrix. A number gives the k most helpful and k most harmful
            training examples of every test example; the matrix is never in memory.

    Returns:
        A tensor ``[N_train, N_test]`` on the CPU, an :class:`~blr_analysis.sensitivity.Influence`
        with ``.top(k)``, ``.group()``, ``.table`` and ``.plot()``. With ``k``: the
        :class:`~blr_analysis.sensitivity.TopInfluence` that ``.top(k)`` gives.

    Raises:
        PosteriorError: the posterior is of another model or number of examples, or the test task is
            of another model (other classes, other layers).
        InputError: the test task has another likelihood, the measure does not give one number per
            example, the matrix is larger than the machine's memory, or k is above the number of
            examples.
        DataError: inputs are NaN or inf, or targets are out of range.
        ModelError: outputs are NaN or inf, or an influence overflows.

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
    subject = subject_of(task, posterior)
    return subject.influence_on(test_task, measure, normalize, k)

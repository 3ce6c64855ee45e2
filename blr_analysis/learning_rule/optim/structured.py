"""Posteriors with structure, learned while training: noisy K-FAC, SLANG, OGGN and VOGGN.

    S ← (1 − ρ₂) S + ρ₂ (N/B Σ_i g_i g_iᵀ),     m ← m − lr (S + δ + Nγ)⁻¹ N (u + δ m / N)

at weights drawn from q(θ) = N(m, (S + δ)⁻¹). g_i is the gradient of one example's loss, u the mean
gradient with momentum, and γ a damping. S has a structure: Kronecker factors by layer
(:class:`NoisyKFAC`; Zhang et al., ICML 2018) or low rank plus diagonal (:class:`SLANG`; Mishkin et
al., NeurIPS 2018); with a diagonal this is VOGN. :class:`VOGGN` has the generalised Gauss–Newton
J_iᵀ Λ_i J_i in the place of g_i g_iᵀ, and :class:`OGGN` takes it at the mean. The posterior needs
no further fit: :meth:`StructuredOptimizer.posterior`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blr_analysis.backprop.tape import Pass, leaves_with_gradient
from blr_analysis.backprop.terms import Term, Tree
from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.families.drawing import normal
from blr_analysis.learning_rule.optim.draws import Draw, Group
from blr_analysis.learning_rule.optim.per_example import Listener
from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer
from blr_analysis.learning_rule.table import ROWS
from blr_analysis.likelihoods import Categorical, Likelihood, resolve
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.posterior.structures import Diagonal, LowRank
from blr_analysis.posterior.structures.contract import Structure


class StructuredOptimizer(RowOptimizer):
    """An optimizer that draws weights from N(m, (S + δ)⁻¹) and steps by the same precision.

    Args:
        model: the module whose trainable parameters are trained.
        lr: step size of the mean.
        ess: N, the number of training examples; the loss is a mean over a minibatch's.
        weight_decay: δ/N for prior precision δ.
        beta1: decay of the momentum.
        beta2: 1 − ρ₂.
        hess_init: the precision before the first step is N (hess_init + weight_decay).
        damping: γ, added to the precision in steps, not in draws.
        generator: draws the noise; None: torch's global one.

    Raises:
        InputError: a setting out of range.
        ModelError: parameters of a layer without a rule.
        OptimizerError: no draw before ``step``, or two draws; nested contexts; a gradient that is
            not finite; a state that does not fit; a ``GradScaler``.
    """

    _row: ClassVar[str]
    _state_names: Any = ("momentum",)
    _takes_scaler = False
    recorder: Any  # averages S: it has recorded, structure, state_dict and load_state_dict

    def __init__(self, model: nn.Module, lr: float, ess: float, **settings: Any) -> None:
        self.model = model
        self._form: Structure | None = None
        self.names = {n: p for n, p in model.named_parameters() if p.requires_grad}
        defaults = {"weight_decay": 1e-4, "beta2": 0.99, "hess_init": 1.0, "damping": 1e-3}
        all_settings: dict[str, Any] = defaults | settings | {"hess_approx": "none"}
        self._set_up(ROWS[self._row], [*self.names.values()], lr=lr, ess=ess, **all_settings)
        self._listen(self.param_groups[0])

    def _listen(self, group: Group) -> None:
        """Set :attr:`recorder`."""
        raise NotImplementedError

    @property
    def form(self) -> Structure:
        """S + δ after the last step."""
        if self._form is None:
            (group,) = self.param_groups
            data = self._form_of_data(group)
            self._form = data.plus_prior(group["ess"] * group["weight_decay"])
        return self._form

    def _form_of_data(self, group: Group) -> Structure:
        """S without δ; before the first step it is ess · hess_init · I."""
        if self.recorder.recorded:
            return self.recorder.structure(self.model, round(group["ess"]))
        start = group["ess"] * group["hess_init"]
        return Diagonal({n: torch.full_like(p, start) for n, p in self.names.items()})

    def posterior(self) -> Posterior:
        """q(θ), for :func:`blr_analysis.sensitivity` and all other analyses.

        Raises:
            OptimizerError: before the first step, or inside ``sampled_params``.
        """
        if self._open is not None or not self.state:
            raise OptimizerError("take the posterior after a step, outside of sampled_params()")
        (group,) = self.param_groups
        return Posterior(
            {n: p.detach().clone() for n, p in self.names.items()},
            self.form,
            prior_precision=group["ess"] * group["weight_decay"],
            n_data=round(group["ess"]),
            record={"kind": type(self).__name__.lower(), "source": "optimizer"},
        )

    def _draw(self, train: bool, adoptable: bool = False) -> Draw:
        if train and self._gathered.count:
            raise OptimizerError("one draw a step: call step() first")
        return super()._draw(train, adoptable)

    def _draw_noise(self, draw: Draw) -> None:
        noise = {n: normal(p.detach(), self.generator) for n, p in self.names.items()}
        noises = self.form.root_solve(noise)
        draw.noises = {self.names[name]: noises[name] for name in noises}

    def _update(self, inverse_scale: float) -> None:
        (group,) = self.param_groups
        self._form = None
        direction = {name: self._direction(p, group) for name, p in self.names.items()}
        damping = group["ess"] * group["damping"]
        damped = self.form.plus_prior(damping) if damping else self.form
        for name, move in damped.solve(direction).items():
            self.names[name].add_(move, alpha=-float(group["lr"]))

    def _direction(self, param: Tensor, group: Group) -> Tensor:
        """N u + δ m of a parameter, with its debiased momentum u."""
        state = self._next_state(param, group)
        momentum = state["momentum"]
        grad = self._gathered.grads.get(param, torch.zeros_like(param))
        momentum.lerp_(grad.detach().to(momentum), 1 - group["beta1"])
        mean_gradient = momentum / (1 - group["beta1"] ** state["step"])
        return (group["ess"] * (mean_gradient + group["weight_decay"] * param)).to(param)

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`RowOptimizer.state_dict`, with the precision that was learned."""
        return {**super().state_dict(), "curvature": self.recorder.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As :meth:`RowOptimizer.load_state_dict`, with the precision."""
        super().load_state_dict(state_dict)
        self.recorder.load_state_dict(state_dict["curvature"])
        self._form = None

    def __getstate__(self) -> dict[str, Any]:
        raise OptimizerError("it cannot be copied with its hooks: load its state in another")


class NoisyKFAC(StructuredOptimizer):
    """Noisy K-FAC: S = N · A ⊗ G / T of every layer, from the factors that
    :class:`blr_analysis.posterior.recorder.KroneckerRecorder` averages over the training's passes.

    Args as :class:`StructuredOptimizer`.

        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> x, y = torch.randn(30, 3), torch.randn(30, 1)
        >>> optimizer = NoisyKFAC(model, lr=0.1, ess=30)
        >>> for _ in range(5):
        ...     with optimizer.sampled_params(train=True):
        ...         optimizer.zero_grad()
        ...         nn.functional.mse_loss(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.posterior().structure
        'kron'

    Source: Zhang et al., "Noisy Natural Gradient as Variational Inference", ICML 2018.
    """

    _row = "noisy K-FAC"

    def _reader(self, model: Any, reduction: str) -> None:
        """None: the recorder has hooks of its own."""

    def _listen(self, group: Group) -> None:
        self.recorder = KroneckerRecorder(self.model, every=1, beta2=group["beta2"])
        self.recorder.accumulates = True  # several passes may come before a step

    def _check_draws(self) -> None:
        super()._check_draws()
        if not self.recorder.recorded:
            raise OptimizerError("nothing was recorded: train with the model in training mode")


class SLANG(StructuredOptimizer):
    """SLANG: S = U Uᵀ + D, of low rank plus a diagonal.

    U has the leading directions of the running average of g_i g_iᵀ. D has the diagonal of the other
    directions, so that S and the average have the same diagonal.

    Args as :class:`StructuredOptimizer`, and ``rank``, the number of columns of U. A step solves an
    eigenproblem of rank + B rows.

        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> x, y = torch.randn(30, 3), torch.randn(30, 1)
        >>> optimizer = SLANG(model, lr=0.1, ess=30, rank=3)
        >>> for _ in range(5):
        ...     with optimizer.sampled_params(train=True):
        ...         optimizer.zero_grad()
        ...         nn.functional.mse_loss(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.posterior().structure
        'lowrank'

    Source: Mishkin et al., "SLANG: Fast Structured Covariance Approximations for Bayesian Deep
    Learning with Natural Gradient", NeurIPS 2018.
    """

    _row = "SLANG"

    def __init__(
        self, model: nn.Module, lr: float, ess: float, *, rank: int = 10, **settings: Any
    ) -> None:
        self.rank = positive_int("rank", rank)
        super().__init__(model, lr, ess, **settings)

    def _reader(self, model: Any, reduction: str) -> Any:
        return GradientRows(self.model, self.algorithm)

    def _listen(self, group: Group) -> None:
        self.recorder = self.examples
        self.recorder.begin(self.names, self.rank, group["ess"] * group["hess_init"])

    def _update(self, inverse_scale: float) -> None:
        (group,) = self.param_groups
        self.recorder.average(group["ess"], 1 - group["beta2"])
        super()._update(inverse_scale)


class VOGGN(SLANG):
    """Variational online generalised Gauss–Newton: :class:`SLANG` with the rows of J_iᵀ Λ_i J_i.

    J_i is the Jacobian of the C outputs of example i. Λ_i is the Hessian of its loss with respect
    to these outputs, by the ``likelihood``: "categorical", "bernoulli", "poisson", or "gaussian"
    (½ (y − f)²). It does not contain the labels, so that S does not vanish where they are learned
    by heart. A step takes C more backward passes, through the graph of the first forward pass in
    the context.

        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> x, y = torch.randn(30, 3), torch.randint(2, (30,))
        >>> optimizer = VOGGN(model, lr=0.1, ess=30, rank=5)
        >>> for _ in range(5):
        ...     with optimizer.sampled_params(train=True):
        ...         optimizer.zero_grad()
        ...         nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.posterior().structure
        'lowrank'

    Source: Khan et al., "Approximate Inference Turns Deep Networks into Gaussian Processes",
    NeurIPS 2019; Khan & Rue, section 4.4.
    """

    _row = "VOGGN"

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        ess: float,
        *,
        likelihood: str = "categorical",
        **settings: Any,
    ) -> None:
        choices = ("categorical", "bernoulli", "poisson", "gaussian")
        self.likelihood = resolve(one_of("likelihood", likelihood, choices))
        super().__init__(model, lr, ess, **settings)

    def _reader(self, model: Any, reduction: str) -> Any:
        return JacobianRows(self.model, self.algorithm, self.likelihood)


class OGGN(VOGGN):
    """Online generalised Gauss–Newton: :class:`VOGGN` with gradients at the mean, an online Laplace
    approximation. ``sampled_params()`` without ``train`` draws from the posterior."""

    _row = "OGGN"


class GradientRows(Listener):
    """The running average of N/B Σ_i g_i g_iᵀ, as U Uᵀ + D.

    Attributes:
        rows: g_i of every example of the last draw, ``[n, P]``.
        n: the number of examples of the last draw.
        columns: Uᵀ, ``[rank, P]``, smallest direction first; without rows before the first step.
        rest: D, ``[P]``.
    """

    rows: Tensor
    n: int

    def begin(self, names: Tree, rank: int, start: float) -> None:
        """Begin at U Uᵀ + D = start · I, for parameters by name."""
        self.shapes = {n: p.shape for n, p in names.items()}
        self.rank = rank
        flat = torch.cat([p.detach().reshape(-1) for p in names.values()])
        if rank >= len(flat):
            raise InputError(f"rank must be below the number of parameters, {len(flat):,}")
        self.columns = flat.new_zeros(0, len(flat))
        self.rest = torch.full_like(flat, start)

    @property
    def recorded(self) -> int:
        """How many directions U has; 0 before the first step."""
        return len(self.columns)

    def average(self, ess: float, rho: float) -> None:
        """Average in the rows of the last draw, with the weight rho.

        The largest directions stay in U; the squares of the others are added to D.
        """
        new_columns = self.rows * (rho * ess / self.n) ** 0.5
        columns = torch.cat([self.columns * (1 - rho) ** 0.5, new_columns.to(self.columns)])
        _, eigenvectors = torch.linalg.eigh((columns @ columns.mT).double())
        directions = eigenvectors.mT.to(columns) @ columns  # orthogonal, smallest first
        self.columns = directions[-self.rank :]
        dropped = directions[: -self.rank].square().sum(0)
        self.rest = (1 - rho) * self.rest + dropped

    def structure(self, model: nn.Module, n_data: int) -> LowRank:
        """U Uᵀ + D, without a prior."""
        sizes = self.columns.square().sum(1)
        is_nonzero = sizes > sizes.max() * torch.finfo(sizes.dtype).eps
        sizes = sizes[is_nonzero]
        directions = self.columns[is_nonzero] / sizes.sqrt().unsqueeze(1)
        return LowRank(self._split(self.rest), self._split(directions), sizes.diag())

    def _split(self, flat: Tensor) -> Tree:
        """Vectors ``[..., P]`` over all parameters, by name and in their shapes."""
        pieces = flat.split([shape.numel() for shape in self.shapes.values()], -1)
        shapes = zip(self.shapes.items(), pieces, strict=True)
        return {n: piece.reshape(*flat.shape[:-1], *shape) for (n, shape), piece in shapes}

    def state_dict(self) -> dict[str, Tensor]:
        """U and D."""
        return {"columns": self.columns.clone(), "rest": self.rest.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue with U and D of ``state``."""
        self.columns = state["columns"].to(self.rest)
        self.rest = state["rest"].to(self.rest)

    def _estimates(self, forward: Pass, params: dict[str, Tensor]) -> dict[Tensor, Tensor]:
        terms, self.n = self._read(forward, params)
        self.rows = self._flat(terms) * self.n
        return {}

    def _flat(self, terms: Sequence[Term]) -> Tensor:
        """The gradients of the terms, summed over columns, ``[n, P]``."""
        gradients: Tree = {}
        for term in terms:
            for name, columns in term.jacobian().items():
                gradients[name] = gradients.get(name, 0) + columns.sum(1).flatten(1)
        return torch.cat([gradients[name] for name in self._params], 1)


class JacobianRows(GradientRows):
    """:class:`GradientRows` with the columns of J_iᵀ L_i, Λ_i = L_i L_iᵀ, in the place of g_i.

    The columns come from the graph of a forward pass.
    """

    def __init__(self, model: nn.Module, algorithm: str, likelihood: Likelihood) -> None:
        super().__init__(model, algorithm)
        self.likelihood = likelihood

    def finished(self, forward: Pass, output: Any) -> None:
        super().finished(forward, output)
        outputs = leaves_with_gradient(output)
        if not outputs:
            return
        f = outputs[0].reshape(forward.batch, -1)
        labels = torch.zeros_like(f)  # Λ does not depend on them
        if isinstance(self.likelihood, Categorical):
            labels = f.new_zeros(len(f), dtype=torch.long)
        blocks = []
        for column in self.likelihood.hessian_root(f.detach(), labels).unbind(-1):
            gradients, _ = forward.gradients(f, column)
            with torch.no_grad():
                blocks.append(self._flat(self._terms(forward, gradients)))
        self.rows = torch.cat(blocks)
        self.n = forward.batch

    def _estimates(self, forward: Pass, params: dict[str, Tensor]) -> dict[Tensor, Tensor]:
        self._read(forward, params)
        return {}

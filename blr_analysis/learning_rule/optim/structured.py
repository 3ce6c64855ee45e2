"""Posteriors with structure, learned while training: noisy K-FAC, SLANG, OGGN and VOGGN.

    S ← (1 − ρ₂) S + ρ₂ (N/B Σ_i g_i g_iᵀ),     m ← m − lr (S + δ + Nγ)⁻¹ N (u + δ m / N)

at weights drawn from q(θ) = N(m, (S + δ)⁻¹), with the Gauss–Newton of the labels as they are, g_i
the gradient of one example's loss, and S kept in a structure: Kronecker factors by layer
(:class:`NoisyKFAC`; Zhang et al., ICML 2018) or low rank plus diagonal (:class:`SLANG`; Mishkin et
al., NeurIPS 2018). VOGN is this with a diagonal. :class:`VOGGN` has the generalised Gauss–Newton
J_iᵀ Λ_i J_i for g_i g_iᵀ, and :class:`OGGN` takes it at the mean. The posterior needs no further
fit: :meth:`StructuredOptimizer.posterior`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.backprop.record import Unit
from blr_analysis.backprop.terms import Term, Tree
from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.families.drawing import normal
from blr_analysis.learning_rule.optim.checkpoint import HINT
from blr_analysis.learning_rule.optim.settings import check_closure, check_group
from blr_analysis.likelihoods import Categorical, Likelihood, resolve
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.posterior.structures import Diagonal, LowRank
from blr_analysis.posterior.structures.contract import Structure

OWN = ("lr", "ess", "weight_decay", "beta1", "beta2", "hess_init", "damping")


class StructuredOptimizer(torch.optim.Optimizer):
    """What all of them share: draws, steps, checkpoints.

    Args:
        model: what is trained, all that is trainable in it; its layers must have rules, as for
            :class:`blr_analysis.KroneckerRecorder`.
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
        OptimizerError: no draw before ``step``, or two; nested contexts; a gradient that is not
            finite; a state that does not fit.
    """

    _at_mean = False  # whether gradients are taken at the mean

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        ess: float,
        *,
        weight_decay: float = 1e-4,
        beta1: float = 0.9,
        beta2: float = 0.99,
        hess_init: float = 1.0,
        damping: float = 1e-3,
        generator: torch.Generator | None = None,
    ) -> None:
        given = {k: v for k, v in locals().items() if k in OWN}
        check_group(given, type(self).__name__, {}, samples=True)
        self.model, self.generator = model, generator
        self.recorder = self._recorder(model, beta2)
        self.recorder.accumulates = True  # several draws may come before a step
        self.names = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._drawn, self._inside, self._form = 0, False, None
        super().__init__([*self.names.values()], {**given, "algorithm": type(self).__name__})

    def _recorder(self, model: nn.Module, beta2: float) -> KroneckerRecorder:
        return KroneckerRecorder(model, every=1, beta2=beta2)

    @abstractmethod
    def _learned(self) -> Structure | None:
        """The data's part of S; None before anything was recorded."""

    @property
    def form(self) -> Structure:
        """S + δ, as the last step left it."""
        if self._form is None:
            (group,) = self.param_groups
            start = group["ess"] * group["hess_init"]
            data = self._learned() or Diagonal(
                {n: torch.full_like(p, start).detach() for n, p in self.names.items()}
            )
            self._form = data.plus_prior(self._delta)
        return self._form

    @property
    def _delta(self) -> float:
        (group,) = self.param_groups
        return group["ess"] * group["weight_decay"]

    def posterior(self) -> Posterior:
        """q(θ), for every analysis.

        Raises:
            OptimizerError: before the first step, or inside ``sampled_params``.
        """
        if self._inside or self._learned() is None:
            raise OptimizerError("take the posterior after a step, outside of sampled_params()")
        mean = {n: p.detach().clone() for n, p in self.names.items()}
        n_data = round(self.param_groups[0]["ess"])
        record = {"kind": type(self).__name__.lower(), "source": "optimizer"}
        return Posterior(mean, self.form, prior_precision=self._delta, n_data=n_data, record=record)

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """The model with weights drawn from q, and with their mean, bit for bit, after it."""
        if self._inside:
            raise OptimizerError("sampled_params() inside sampled_params()")
        if train and self._drawn:
            raise OptimizerError("one draw a step: call step() first")
        with torch.no_grad():
            means = {n: p.detach().clone() for n, p in self.names.items()}
            noise = {n: normal(m, self.generator) for n, m in means.items()}
            gaps = {} if train and self._at_mean else self.form.root_solve(noise)
            for n, gap in gaps.items():
                self.names[n].add_(gap)
        self._inside, mode = True, self.model.training
        self.model.train(mode and train)  # evaluation is nothing to record
        try:
            yield
            self._drawn += train
        finally:
            self._inside = False
            self.model.train(mode)
            with torch.no_grad():
                for n, m in means.items():
                    self.names[n].copy_(m)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move precision and mean by the draw since the last step, or that of ``closure``."""
        check_closure(closure)
        loss = None
        if closure is not None:
            with self.sampled_params(train=True), torch.enable_grad():
                loss = closure()
        before = self.recorder.recorded
        if not self._drawn or self._inside or not before:
            raise OptimizerError(
                "step() without a draw: use sampled_params(train=True), the model in training mode"
            )
        self._drawn = 0
        (group,) = self.param_groups
        grads = {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.names.items()
        }
        if not all(bool(g.isfinite().all()) for g in grads.values()):
            raise OptimizerError("a gradient holds NaN or inf: lower lr, or clip")
        n = group["ess"]
        with torch.no_grad():
            self._record()
            self._form = None
            direction: Tree = {}
            for name, p in self.names.items():
                state = self.state[p]
                if not state:
                    state.update(step=0, momentum=torch.zeros_like(p))
                state["step"] += 1
                state["momentum"].lerp_(grads[name], 1 - group["beta1"])
                u = state["momentum"] / (1 - group["beta1"] ** state["step"])
                direction[name] = n * (u + group["weight_decay"] * p)
            damped = self.form.plus_prior(n * group["damping"]) if group["damping"] else self.form
            for name, move in damped.solve(direction).items():
                self.names[name].add_(move, alpha=-float(group["lr"]))
        return loss

    def _record(self) -> None:
        """Take in what the last pass showed."""

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with what was learned of the precision, and the state of ``generator``.

        Raises:
            OptimizerError: inside ``sampled_params``.
        """
        if self._inside or self._drawn:
            raise OptimizerError("save the state after step(), outside of sampled_params()")
        drawn = {} if self.generator is None else {"generator": self.generator.get_state()}
        return {**super().state_dict(), "curvature": self._kept(), "sampling": drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``; a generator's state in it is used if there is one here.

        Raises:
            OptimizerError: another optimizer's.
        """
        groups = state_dict.get("param_groups", [{}])
        if groups[0].get("algorithm") != type(self).__name__ or "curvature" not in state_dict:
            raise OptimizerError(f"this is no state of {type(self).__name__}; {HINT}")
        added = ("curvature", "sampling")
        super().load_state_dict({k: v for k, v in state_dict.items() if k not in added})
        self._take(state_dict["curvature"])
        self._form = None
        drawn = state_dict.get("sampling", {})
        if self.generator is not None and "generator" in drawn:
            self.generator.set_state(drawn["generator"].cpu())

    def __getstate__(self) -> dict[str, Any]:
        raise OptimizerError(
            f"{type(self).__name__} cannot be copied with its hooks: load its state in another"
        )

    def _kept(self) -> dict[str, Any]:
        return self.recorder.state_dict()

    def _take(self, kept: Mapping[str, Any]) -> None:
        self.recorder.load_state_dict(kept)


class NoisyKFAC(StructuredOptimizer):
    """Noisy K-FAC: S = N · A ⊗ G / T of every layer, from the factors that
    :class:`blr_analysis.KroneckerRecorder` averages over the training's own passes.

    Args as :class:`StructuredOptimizer`; eigenvectors are computed anew every ``refresh`` steps.

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

    def __init__(
        self, model: nn.Module, lr: float, ess: float, *, refresh: int = 1, **settings: Any
    ) -> None:
        self.refresh = positive_int("refresh", refresh)
        self._data: Structure | None = None
        super().__init__(model, lr, ess, **settings)

    def _learned(self) -> Structure | None:
        return self._data

    def _record(self) -> None:
        if self._data is None or self.recorder.recorded % self.refresh == 0:
            n_data = round(self.param_groups[0]["ess"])
            self._data = self.recorder.structure(self.model, n_data)

    def _take(self, kept: Mapping[str, Any]) -> None:
        super()._take(kept)
        self._data = None
        if self.recorder.recorded:
            self._data = self.recorder.structure(self.model, round(self.param_groups[0]["ess"]))


class SLANG(StructuredOptimizer):
    """SLANG: S = U Uᵀ + D, the leading directions of the running average, and the diagonal of the
    rest in D, so that S has the average's own diagonal.

    Args as :class:`StructuredOptimizer`; ``rank`` columns of U. A step costs an eigenproblem of
    rank + B rows.

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

    def __init__(
        self, model: nn.Module, lr: float, ess: float, *, rank: int = 10, **settings: Any
    ) -> None:
        self.rank = positive_int("rank", rank)
        self._columns = torch.empty(0, 0)  # Uᵀ, [rank, P]
        self._rest = torch.empty(0)  # D, [P]
        super().__init__(model, lr, ess, **settings)
        (group,) = self.param_groups
        like = torch.cat([p.detach().reshape(-1) for p in self.names.values()])
        if self.rank >= len(like):
            raise InputError(f"rank must be below the number of parameters, {len(like):,}")
        self._columns = like.new_zeros(0, len(like))
        self._rest = torch.full_like(like, group["ess"] * group["hess_init"])

    def _recorder(self, model: nn.Module, beta2: float) -> KroneckerRecorder:
        return GradientRows(model, every=1)

    def _record(self) -> None:
        assert isinstance(self.recorder, GradientRows)
        (group,) = self.param_groups
        rows, rho = self.recorder.rows(list(self.names)), 1 - group["beta2"]
        new = rows * (rho * group["ess"] / self.recorder.examples) ** 0.5
        columns = torch.cat([self._columns * (1 - rho) ** 0.5, new.to(self._columns)])
        _, turn = torch.linalg.eigh((columns @ columns.mT).double())
        turned = turn.mT.to(columns) @ columns
        self._columns = turned[-self.rank :]
        dropped = turned[: -self.rank].square().sum(0)
        self._rest = (1 - rho) * self._rest + dropped

    def _learned(self) -> Structure | None:
        if not len(self._columns):
            return None
        sizes = self._columns.square().sum(1)
        held = sizes > sizes.max() * torch.finfo(sizes.dtype).eps
        directions = self._columns[held] / sizes[held].sqrt().unsqueeze(1)
        return LowRank(self._split(self._rest), self._split(directions), sizes[held].diag())

    def _split(self, flat: Tensor) -> Tree:
        sizes = [p.numel() for p in self.names.values()]
        pieces = zip(self.names.items(), flat.split(sizes, -1), strict=True)
        return {n: piece.reshape(*flat.shape[:-1], *p.shape) for (n, p), piece in pieces}

    def _kept(self) -> dict[str, Any]:
        return {"columns": self._columns.clone(), "rest": self._rest.clone()}

    def _take(self, kept: Mapping[str, Any]) -> None:
        self._columns = kept["columns"].to(self._columns)
        self._rest = kept["rest"].to(self._rest)


class VOGGN(SLANG):
    """Variational online generalised Gauss–Newton: :class:`SLANG` with the rows of J_iᵀ Λ_i J_i.

    J_i is the Jacobian of the C outputs of example i, and Λ_i the Hessian of its loss by them, that
    of the ``likelihood``: "categorical", "bernoulli", "poisson", or "gaussian" (½ (y − f)²). The
    labels are not in it, so S does not vanish where they are learned by heart. C more backward
    passes a step, through the graph of the first forward pass in the context.

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

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        ess: float,
        *,
        likelihood: str = "categorical",
        rank: int = 10,
        **settings: Any,
    ) -> None:
        named = ("categorical", "bernoulli", "poisson", "gaussian")
        self.likelihood = resolve(one_of("likelihood", likelihood, named))
        super().__init__(model, lr, ess, rank=rank, **settings)

    def _recorder(self, model: nn.Module, beta2: float) -> KroneckerRecorder:
        return JacobianRows(model, self.likelihood)


class OGGN(VOGGN):
    """Online generalised Gauss–Newton: :class:`VOGGN` with gradients at the mean, an online Laplace
    approximation. ``sampled_params()`` without ``train`` draws from the posterior."""

    _at_mean = True


class GradientRows(KroneckerRecorder):
    """The gradient of every example of the last pass, by the recorder's hooks."""

    examples = 0

    def _settle(self) -> None:
        if self._seen:
            self._over([self._terms()])

    def _over(self, columns: list[list[Term]]) -> None:
        self._seen, self.columns, self.examples = [], columns, columns[0][0].n_examples
        self._recorded += 1

    def rows(self, names: list[str]) -> Tensor:
        """g_i ``[B, P]``, or a block of that for each column."""
        blocks = []
        for column in self.columns:
            gradients: Tree = {}
            for term in column:
                for name, each in term.jacobian().items():
                    gradients[name] = gradients.get(name, 0) + each.sum(1).flatten(1)
            blocks.append(torch.cat([gradients[n] for n in names], 1))
        return torch.cat(blocks)


class JacobianRows(GradientRows):
    """J_iᵀ L_i, a column for each of Λ_i = L_i L_iᵀ, from the graph of a forward pass."""

    def __init__(self, model: nn.Module, likelihood: Likelihood) -> None:
        super().__init__(model, every=1, reduction="sum")
        self.likelihood, self._reading = likelihood, False
        self._handles.append(model.register_forward_hook(self._read))

    def _settle(self) -> None:
        """Nothing is left to be taken in when a pass is over."""

    def _take(self, unit: Unit, x: Tensor, grad: Tensor, batch: int) -> None:
        if self._reading:
            super()._take(unit, x, grad, batch)

    def _read(self, model: nn.Module, args: Any, output: Tensor) -> None:
        if not self._batch or not output.requires_grad:
            return
        f = output.reshape(self._batch, -1)
        labels = f.new_zeros(len(f), dtype=torch.long)  # Λ is that of any
        y = labels if isinstance(self.likelihood, Categorical) else torch.zeros_like(f)
        params, columns = list(self._parameters.values()), []
        self._reading = True
        try:
            for column in self.likelihood.hessian_root(f.detach(), y).unbind(-1):
                torch.autograd.grad(f, params, column, retain_graph=True, allow_unused=True)
                columns.append(self._terms())
        finally:
            self._reading, self._seen = False, []
        self._over(columns)

"""The posterior: what was learned, as a Gaussian over named parameters."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import instance, one_of, path_of, positive_int, whole
from blr_analysis.errors import InitialPrecisionWarning, InputError, PosteriorError
from blr_analysis.files import storage
from blr_analysis.files.storage import FIELDS
from blr_analysis.half import narrow, placed
from blr_analysis.posterior import capture, stored
from blr_analysis.posterior.minimum import Stationarity
from blr_analysis.posterior.predictive import Predictions, averaged
from blr_analysis.posterior.prior import Given, Prior, differences, n_data_of, real_tensors
from blr_analysis.posterior.prior_choice import chosen_prior, in_words
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.posterior.structures import Diagonal, Structure, Tree
from blr_analysis.posterior.structures.contract import renamed
from blr_analysis.posterior.structures.lowrank import ENOUGH, LowRank
from blr_analysis.snapshots import buffers_of
from blr_analysis.task import Task, bare_name, find_device, unwrapped

STILL_INITIAL = (
    "more than half of the optimizer's hess is still hess_init, not the data's (record"
    "['initial_share']): train longer, with a smaller beta2 or hess_init, or with IVON(..., steps=)"
)


EARLIER = "earlier."  # before the names of an earlier posterior's tensors
GUESSED = 0.15  # τ of Kronecker fits of classifiers: python -m benchmarks.field --only loo


class Posterior:
    """q(θ) = N(m, S⁻¹) over a model's trainable parameters, by their own names.

    S includes the prior: S = diag(δ) + Σ_i (the examples' shares), for the objective
    Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀), a SUM over the n_data training examples.

    Args:
        mean: m, one tensor per parameter name (tied tensors once); of a model in half precision
            each is made in float32 when it is asked for, so that writing into it changes nothing.
        precision: the diagonal of S by name, or a structure of
            :mod:`blr_analysis.posterior.structures`.
        prior_precision: δ: one number, or a number or tensor per name.
        n_data: N, the number of examples behind S.
        record: where it came from; kept in saved files.
        initial: θ₀, the prior's mean: a state dict of the first weights, or of the base model of a
            fine-tune; None: 0.
        buffers: the model's persistent buffers at these weights (BatchNorm's statistics and their
            like) by name.
        earlier: posteriors at checkpoints of the same training, oldest first.

    Attributes:
        run: the earlier ones and itself.

    Raises:
        PosteriorError: NaN, inf or non-positive precision, NaN weights, shapes that disagree,
            a missing or impossible ``n_data`` or ``prior_precision``.

    Example:
        >>> import torch
        >>> q = Posterior({"w": torch.zeros(2)}, {"w": torch.tensor([4.0, 1.0])},
        ...               prior_precision=1.0, n_data=10)
        >>> q.structure, q.variance("w")
        ('diag', tensor([0.2500, 1.0000]))
    """

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        precision: Mapping[str, Tensor] | Structure,
        *,
        prior_precision: Given | Prior,
        n_data: int,
        record: Mapping[str, Any] | None = None,
        initial: Mapping[str, Tensor] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        earlier: Sequence[Posterior] = (),
    ) -> None:
        self.mean: Tree = real_tensors("mean", mean)
        if isinstance(precision, Structure):
            self.form: Structure = precision
        else:
            self.form = Diagonal(real_tensors("precision", precision))
        self.prior = Prior.of_any(prior_precision).around(initial, self.mean)
        self.n_data = n_data_of(n_data, least=0)
        if record is not None:
            instance("record", record, Mapping, "a dict")
        self.record: dict[str, Any] = dict(record or {})
        self.buffers = {n: b.detach().clone() for n, b in (buffers or {}).items()}
        self.earlier = tuple(earlier)
        shapes = {n: tuple(t.shape) for n, t in self.mean.items()}
        if not shapes:
            raise PosteriorError("a posterior needs at least one parameter, got none")
        if shapes != self.form.shapes:
            said = differences(shapes, self.form.shapes, ("mean", "precision"))
            raise PosteriorError(f"mean and precision disagree: {said}")
        for name, tensor in self.mean.items():
            if not bool(torch.isfinite(tensor).all()):
                raise PosteriorError(f"the mean of {name!r} holds NaN or inf; was training stable?")
        Prior.read(self.prior, shapes)
        self.form.check()

    def __repr__(self) -> str:
        size = sum(t.numel() for t in self.mean.values())
        kind, share = self.record.get("kind", "given"), self.record.get("initial_share")
        start = "" if share is None else f", initial_share={share:.2g}"
        choice = self.record.get("prior_choice")
        notes = f", prior_precision={in_words(choice)}" if choice else ""
        notes += f", {len(self.earlier)} earlier" if self.earlier else ""
        explained = self.record.get("explained", 1.0)
        if explained < ENOUGH:
            notes += f", rank explains {explained:.0%}: too low for influence"
        notes += f"; {self.note}" if self.note else ""
        return (
            f"Posterior({self.structure!r}, {len(self.mean)} tensors, {size:,} parameters, "
            f"n_data={self.n_data}, kind={kind!r}{start}{notes})"
        )

    @property
    def run(self) -> tuple[Posterior, ...]:
        """The posteriors along the training: the earlier ones, and itself."""
        return (*self.earlier, self)

    @property
    def at_minimum(self) -> bool | None:
        """Whether the mean minimises the task's loss; None where nobody measured it."""
        return None if self.stationarity is None else self.stationarity.near

    @property
    def temperature(self) -> float:
        """τ, which multiplies V in sensitivity, leave-one-out and influence: measured by
        :func:`blr_analysis.calibrate`; else .15, a guess, for Kronecker fits of classifiers off
        their minimum, and 1."""
        measured = self.record.get("calibration")
        if measured is not None:
            return float(measured["temperature"])
        return GUESSED if self._guessed else 1.0

    @property
    def temperature_error(self) -> float | None:
        """The standard error of log τ; None where it was not measured."""
        measured = self.record.get("calibration")
        return None if measured is None else measured["error"]

    @property
    def _guessed(self) -> bool:
        """Whether only a guess of τ is known: a Kronecker fit of a classifier off its minimum."""
        fitted = self.structure == "kron" and self.record.get("source") == "laplace"
        return fitted and self.at_minimum is False and bool(self.record.get("classifier"))

    @property
    def note(self) -> str:
        """How far its scale is to be trusted, in one line; "" where it is."""
        if self.at_minimum:
            return self.stationarity.caveat if self.stationarity else ""
        if "calibration" in self.record:
            return ""
        if self._guessed:
            return f"off the minimum: temperature {GUESSED} is a guess, calibrate measures it"
        if self.at_minimum is False:
            return "off the minimum, uncalibrated: a ranking, no scale"
        return ""

    @property
    def structure(self) -> str:
        """ "diag", "kron", "lowrank" or "full"."""
        return self.form.kind

    @property
    def prior_precision(self) -> Any:
        """δ: one number, or a dict with a number or tensor by name."""
        return self.prior.given

    @property
    def initial(self) -> Mapping[str, Tensor] | None:
        """θ₀, the prior's mean; None: 0."""
        return self.prior.mean

    @property
    def stationarity(self) -> Stationarity | None:
        """How far the mean is from the minimum of its loss; None where nothing measured it yet.

        ``fit_laplace`` does that finds δ, and so do the analyses that need it: ``calibrate``,
        ``what_if``, the audit.
        """
        kept = self.record.get("stationarity")
        return None if kept is None else Stationarity(**kept)

    @classmethod
    def from_optimizer(
        cls,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        n_data: int | None = None,
        prior_precision: float | Mapping[str, float] | None = None,
        initial: Mapping[str, Tensor] | None = None,
        scaling: str = "sqrt",
        batch_size: int | None = None,
        tokens: int | None = None,
    ) -> Posterior:
        """The diagonal posterior that an optimizer learned while it trained.

        See :func:`blr_analysis.posterior.capture.from_optimizer` for the optimizers, the
        formulas, the arguments and the errors.
        """
        return cls._captured(
            capture.from_optimizer,
            optimizer,
            model,
            n_data=n_data,
            prior_precision=prior_precision,
            initial=initial,
            scaling=scaling,
            batch_size=batch_size,
            tokens=tokens,
        )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        n_data: int | None = None,
        prior_precision: float | Mapping[str, float] | None = None,
        initial: Mapping[str, Tensor] | None = None,
        scaling: str = "sqrt",
        batch_size: int | None = None,
        tokens: int | None = None,
        names: Sequence[str] | None = None,
    ) -> Posterior:
        """The same from a saved training state: Hugging Face Trainer, Lightning, torch.

        See :func:`blr_analysis.posterior.capture.from_checkpoint`.
        """
        return cls._captured(
            capture.from_checkpoint,
            path_of(path),
            model,
            n_data=n_data,
            prior_precision=prior_precision,
            initial=initial,
            scaling=scaling,
            batch_size=batch_size,
            tokens=tokens,
            names=names,
        )

    @classmethod
    @torch.inference_mode(False)  # also where the caller switched it on
    def from_recorder(
        cls,
        recorder: KroneckerRecorder,
        model: nn.Module,
        *,
        n_data: int,
        structure: str = "kron",
        prior_precision: Given | None = None,
        initial: Mapping[str, Tensor] | None = None,
    ) -> Posterior:
        """The Kronecker posterior whose factors were collected while the model trained.

        S = N · A ⊗ G / T + δ, see :mod:`blr_analysis.posterior.recorder`; the mean is the model's
        weights as they are now.

        Args:
            recorder: made before training.
            model: what it was made for.
            n_data: N, the number of training examples.
            structure: "kron", or for merging "gram", the inputs' moments S = N · A ⊗ 1 + δ alone,
                which needs a ``prior_precision`` (1e-6 will do).
            prior_precision: δ; None: by the evidence of the weights and the factors, which is a
                guess (``record["prior_choice"]``).
            initial: θ₀, the prior's mean; None: 0.

        Raises:
            ModelError: the model changed since the recorder was made.
            PosteriorError: nothing was recorded, NaN, an ``initial`` of another model.

        Example: see :class:`blr_analysis.KroneckerRecorder`.
        """
        instance("recorder", recorder, KroneckerRecorder, "a blr_analysis.KroneckerRecorder")
        instance("model", model, nn.Module, "the torch.nn.Module that was trained")
        model = unwrapped(model)
        n = n_data_of(n_data)
        one_of("structure", structure, ("kron", "gram"))
        if structure == "gram" and prior_precision is None:
            raise InputError('structure="gram" says nothing of δ: give prior_precision=1e-6')
        form = recorder.structure(model, n, structure)
        mean = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        choice: dict[str, Any] = {}
        if prior_precision is None:
            gap = Prior({}).around(initial, mean).gap(mean)
            prior_precision, about = chosen_prior(form, gap, None)
            choice = {"prior_choice": {"delta": prior_precision, **about, "unsure": capture.UNSURE}}
        shapes = {n: tuple(m.shape) for n, m in mean.items()}
        prior = Prior.read(prior_precision, shapes, positive=True).placed(mean)
        return cls(
            mean,
            form.plus_prior(prior),
            prior_precision=prior,
            n_data=n,
            record={
                "kind": f"{structure}_recorded",
                "source": "recorder",
                "definition": "S = N * mean of a a^T x "
                + ("mean of d d^T" if structure == "kron" else "1")
                + " + diag(prior_precision)",
                "labels": "of the loss as trained",
                "recorded": recorder.recorded,
                "passes": recorder.passes,
                "beta2": recorder.beta2,
                "fixed": [n for n, _ in model.named_parameters() if n not in mean],
                "tied": capture.tied_names(model),
                **choice,
            },
            initial=initial,
            buffers=buffers_of(model),
        )

    @classmethod
    @torch.inference_mode(False)  # also where the caller switched it on
    def _captured(
        cls, read: Any, source: Any, model: nn.Module, *, initial: Any, **told: Any
    ) -> Posterior:
        instance("model", model, nn.Module, "the torch.nn.Module that was trained")
        model = unwrapped(model)
        captured = read(source, model, initial=initial, **told)
        fixed = [n for n, _ in model.named_parameters() if n not in captured.mean]
        if (captured.record.get("initial_share") or 0.0) > 0.5:
            warnings.warn(
                STILL_INITIAL, InitialPrecisionWarning, stacklevel=4
            )  # of from_…, by a decorator
        return cls(
            captured.mean,
            captured.precision,
            prior_precision=captured.prior_precision,
            n_data=captured.n_data,
            record={**captured.record, "fixed": fixed},
            initial=initial,
            buffers=buffers_of(model),
        )

    def variance(self, name: str) -> Tensor:
        """diag(Σ) of one parameter, shaped as the parameter."""
        return self._entry(self.form.diagonal(inverse=True), name)

    def precision(self, name: str) -> Tensor:
        """diag(S) of one parameter, shaped as the parameter."""
        return self._entry(self.form.diagonal(), name)

    def _entry(self, tree: Tree, name: str) -> Tensor:
        if not isinstance(name, str) or name not in tree:
            raise InputError(
                f"the posterior has no parameter {name!r}; it covers {sorted(tree)[:12]}"
            )
        return tree[name]

    def sample(self, *, generator: torch.Generator | None = None, n: int | None = None) -> Tree:
        """A draw θ = m + R⁻ᵀ ε from q; with ``n``, n draws along a new leading dimension.

        >>> q = Posterior({"w": torch.zeros(3)}, {"w": torch.ones(3)},
        ...               prior_precision=1.0, n_data=1)
        >>> q.sample(generator=torch.Generator().manual_seed(0), n=2)["w"].shape
        torch.Size([2, 3])
        """
        if generator is not None:
            instance("generator", generator, torch.Generator, "a torch.Generator")
        lead = () if n is None else (positive_int("n", n),)
        noise = {}
        for name, m in self.mean.items():
            source = m.device if generator is None else generator.device
            drawn = torch.empty((*lead, *m.shape), dtype=m.dtype, device=source)
            noise[name] = drawn.normal_(generator=generator).to(m.device)
        draw = self.form.root_solve(noise)
        return {name: m + draw[name] for name, m in self.mean.items()}

    @torch.inference_mode(False)  # also where the caller switched it on
    def predict(
        self,
        task: Task,
        draws: int = 10,
        *,
        generator: torch.Generator | None = None,
        chunk_size: int | None = None,
        progress: bool | None = None,
    ) -> Predictions:
        """What the posterior predicts for a task's examples, of training or test.

            p(y | x) = ∫ p(y | f_θ(x)) q(θ) dθ  ≈  1/K Σ_k p(y | f_θₖ(x)),   θₖ ~ q

        Args:
            task: the model with the examples to predict; any number of them. What a task of
                scikit-learn estimates from its examples is taken as the fit knew it.
            draws: K; 0: the one network at the posterior's mean.
            generator: draws the networks; None: torch's global one.
            chunk_size: examples at a time, instead of the task's ``batch_size``.
            progress: None shows a bar on a terminal when the work is long.

        Returns:
            ``mean`` ``[N, C]``, ``losses``, ``nll``, ``accuracy``, ``calibration_error``. Class
            weights and smoothing are no part of the loss here, constants that ``GaussianNLLLoss``
            and ``PoissonNLLLoss`` leave out are; a loss that is no −log p (``MSELoss``) stays
            itself, and the repr names it. Of sequences there are losses per token alone.

        Raises:
            InputError: ``draws`` or ``chunk_size`` is no count.
            PosteriorError: it belongs to another model.
            ModelError, DataError: as :meth:`Task.run`.

        Example:
            >>> import torch
            >>> model = nn.Linear(2, 3)
            >>> task = Task(model, (torch.eye(2), torch.tensor([0, 2])))
            >>> mean = {n: p.detach() for n, p in model.named_parameters()}
            >>> q = Posterior(mean, {n: torch.ones_like(p) for n, p in mean.items()},
            ...               prior_precision=1.0, n_data=2)
            >>> q.predict(task, draws=4).mean.sum(1)
            tensor([1., 1.])
        """
        return predict(
            task, [self], draws, generator=generator, chunk_size=chunk_size, progress=progress
        )

    def judging(self, task: Task) -> Task:
        """The task, where its likelihood was estimated from its own examples, with the noise or
        the weights of classes of the data that this was fitted to."""
        known = self.record.get("estimated", {})
        if not task.likelihood.estimated or known.keys() != task.likelihood.settings.keys():
            return task
        made = task.under(task.model, task.device)
        made.likelihood = task.likelihood.taking(known)
        return made

    def log_density(self, params: Mapping[str, Tensor]) -> Tensor:
        """log q(θ) = −½ (θ−m)ᵀS(θ−m) + ½ log|S| − (P/2) log 2π, in nats.

        Leading dimensions of the parameters are batch dimensions of the result.
        """
        self._vector(params)
        gap = {n: params[n] - m for n, m in self.mean.items()}
        curved = self.form.times(gap)
        size = sum(m.numel() for m in self.mean.values())
        quadratic = sum(
            (gap[n] * curved[n]).sum(tuple(range(gap[n].ndim - m.ndim, gap[n].ndim)))
            if m.ndim
            else gap[n] * curved[n]
            for n, m in self.mean.items()
        )
        constant = 0.5 * self.form.logdet() - 0.5 * size * math.log(2 * math.pi)
        return constant.to(next(iter(gap.values()))) - 0.5 * quadratic

    def precision_product(self, v: Tree) -> Tree:
        """S v for v by parameter name (leading batch dimensions allowed)."""
        return self.form.times(self._vector(v))

    def covariance_product(self, v: Tree) -> Tree:
        """Σ v."""
        return self.form.solve(self._vector(v))

    def precision_root_product(self, v: Tree) -> Tree:
        """R v with S = R Rᵀ (symmetric for "diag", "kron"; Cholesky for "full"; for "lowrank"
        see :class:`~blr_analysis.posterior.structures.lowrank.LowRank`)."""
        return self.form.root(self._vector(v))

    def covariance_root_product(self, v: Tree) -> Tree:
        """R⁻ᵀ v with Σ = R⁻ᵀ R⁻¹."""
        return self.form.root_solve(self._vector(v))

    def _vector(self, v: Any) -> Tree:
        if not isinstance(v, Mapping) or not all(isinstance(t, Tensor) for t in v.values()):
            raise InputError(f"expected tensors by parameter name, got {type(v).__name__}")
        self.form._take(dict(v))
        return dict(v)

    def at(self, prior_precision: Given | Prior) -> Posterior:
        """The same data's precision under another δ: S − diag(δ) + diag(δ').

        Raises:
            PosteriorError: an impossible δ', or one below what rounding leaves of S − δ.

        Example:
            >>> q = Posterior({"w": torch.zeros(2)}, {"w": torch.tensor([4.0, 1.5])},
            ...               prior_precision=1.0, n_data=10)
            >>> q.at(3.0).precision("w")
            tensor([6.0000, 3.5000])
        """
        shapes = {n: tuple(m.shape) for n, m in self.mean.items()}
        prior = Prior.read(prior_precision, shapes).placed(self.mean)
        change = {n: prior.like(n, m) - self.prior.like(n, m) for n, m in self.mean.items()}
        of_prior = (
            "prior_choice",
            "stationarity",
            "calibration",
        )  # what was found out under the old δ
        record = {k: v for k, v in self.record.items() if k not in of_prior}
        form = self.form.plus_prior(change)
        if isinstance(form, LowRank) and "explained" in record:
            size = sum(m.numel() for m in self.mean.values())
            delta = {n: prior.like(n, m).expand_as(m) for n, m in self.mean.items()}
            record["explained"] = form.explained(delta, record.get("largest_rank", size))
        return Posterior(
            self.mean,
            form,
            prior_precision=Prior(prior.entries, self.prior.mean),
            n_data=self.n_data,
            record=record | {"prior_named": True},
            buffers=self.buffers,
            earlier=self.earlier,
        )

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Posterior:
        """The same posterior on another device (and in another floating dtype).

        Raises:
            DeviceError: this machine does not have it.
            PosteriorError: a precision is too large or too small for the dtype.
        """
        target = find_device(device)
        kind = next(iter(self.mean.values())).dtype if dtype is None else dtype
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            raise InputError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
        mean, held = placed(self.mean, target, kind), narrow(self.mean)
        same = type(mean) is type(self.mean) and all(m is held[n] for n, m in narrow(mean).items())
        tensors = self.form.tensors().values()
        if same and all(t.device == target and t.dtype == kind for t in tensors):
            return self
        moved = object.__new__(Posterior)
        moved.mean = mean
        moved.form = self.form.to(target, kind)
        moved.prior, moved.n_data = self.prior.placed(moved.mean), self.n_data
        moved.record = self.record
        moved.buffers = {n: b.to(target) for n, b in self.buffers.items()}
        moved.earlier = tuple(q.to(target, dtype) for q in self.earlier)
        if torch.finfo(kind).max < torch.finfo(next(iter(self.mean.values())).dtype).max:
            try:
                moved.form.check()
            except PosteriorError as error:
                name = str(kind).removeprefix("torch.")
                said = f"{error}, as {name}: keep the posterior in float32"
                raise PosteriorError(said) from error
        return moved

    def on(self, task: Task, *, same_data: bool = True) -> Posterior:
        """This posterior, checked against a task and moved to its device and dtype.

        Where one of the two models was compiled or wrapped, its parameters have the task's names.

        Raises:
            PosteriorError: it belongs to another model (names and shapes are listed) or, with
                ``same_data``, to another number of examples.
            ModelError: the model's parameters are in half precision or of several dtypes.
        """
        instance("task", task, Task, "a blr_analysis.Task")
        parameters = dict(task.model.named_parameters())
        places = {bare_name(n): n for n in parameters}
        names = {n: places.get(bare_name(n), n) for n in self.mean}
        if any(old != new for old, new in names.items()):
            return self._renamed(names).on(task, same_data=same_data)
        fixed = [places.get(bare_name(n), n) for n in self.record.get("fixed", ())]
        mine = {n: tuple(m.shape) for n, m in self.mean.items()}
        theirs = {
            n: tuple(p.shape)
            for n, p in parameters.items()
            if n in mine or (p.requires_grad and n not in fixed)
        }
        if mine != theirs:
            raise PosteriorError(
                "the posterior belongs to another model: "
                + differences(mine, theirs, ("posterior", "model"))
                + "; pass the model that it was captured from or fitted to"
            )
        if same_data and self.n_data != task.n_data:
            raise PosteriorError(
                f"the posterior was learned from n_data={self.n_data} examples, the task has "
                f"{task.n_data}; use the training data"
                + (", or capture it with n_data= the sequences, tokens= the tokens that count")
                * task.likelihood.is_sequence
            )
        return self.to(task.device, task.check_parameters(mine))

    def _renamed(self, names: Mapping[str, str]) -> Posterior:
        """The same with parameters of other names."""
        initial = self.initial and {names[n]: t for n, t in self.initial.items() if n in names}
        entries = {k if k is None else names.get(k, k): v for k, v in self.prior.entries.items()}
        return Posterior(
            type(self.mean)({names[n]: m for n, m in narrow(self.mean).items()}),
            self.form.renamed(names),
            prior_precision=Prior(entries, initial or None),
            n_data=self.n_data,
            record=renamed(self.record, names),
            buffers=self.buffers,
            earlier=[q._renamed(names) for q in self.earlier],
        )

    def save(
        self, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, mean: bool = True
    ) -> None:
        """Write to ``path``: one file if it ends in .safetensors, else a folder of shards.

        Args:
            dtype: for a diagonal precision: ``torch.bfloat16`` or ``torch.float32`` to store it
                in; None as it is. What is rounded is the data's part, S − δ; δ is kept exactly
                and added by :meth:`load`. Means are never rounded.
            mean: False leaves the means out, for a precision folder beside the model's own
                weights (diagonal only): the tensors have the model's names and shapes.

        Raises:
            StorageError: the place cannot be written; what was there before stays.
            InputError: ``dtype`` or ``mean=False`` for another structure than "diag".

        Example:
            >>> import tempfile
            >>> q = Posterior({"w": torch.zeros(2)}, {"w": torch.tensor([1.5, 3.0])},
            ...               prior_precision=1.0, n_data=10)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     q.save(f"{folder}/precision", dtype=torch.bfloat16, mean=False)
            ...     back = Posterior.load(f"{folder}/precision", model=q.mean)
            >>> back.precision("w"), back.prior_precision
            (tensor([1.5000, 3.0000]), 1.0)
        """
        place = path_of(path)
        tensors, record = self._stored(dtype, mean)
        for k, q in enumerate(self.earlier if mean else ()):
            held, about = q._stored(None, True)
            tensors |= {f"{EARLIER}{k}/{n}": t for n, t in held.items()}
            record.setdefault("earlier", []).append(about)
        storage.write(place, {n: t.cpu() for n, t in tensors.items()}, record)

    def _stored(self, dtype: torch.dtype | None, mean: bool) -> tuple[Tree, dict[str, Any]]:
        """Tensors and record of one posterior, without the earlier ones."""
        tensors, record = stored.encode(self.form, self.prior, dtype)
        stored_means = {f"{n}.mean": m for n, m in self.mean.items()} if mean else {}
        stored_means |= {f"{n}.initial": m for n, m in (self.initial or {}).items()}
        stored_means |= {f"{n}.buffer": b for n, b in self.buffers.items() if mean}
        if not mean and self.initial is not None:
            raise InputError("mean=False would lose the prior's mean: leave mean out")
        if not mean and set(tensors) != set(self.mean):
            what = f"{self.structure!r} and for a prior precision per weight"
            raise InputError(f"mean=False writes one precision per weight: leave it out for {what}")
        clash = sorted(set(stored_means) & set(tensors))
        if clash:
            raise InputError(
                f"parameters are called {clash[:4]}, as means are: save with mean=False"
            )
        return {**tensors, **stored_means}, {
            **({} if mean else dict.fromkeys(FIELDS)),
            **self.record,
            **record,
            "n_data": self.n_data,
            "parameters": list(self.mean),
        }

    @classmethod
    @torch.inference_mode(False)  # also where the caller switched it on
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model: stored.Model | None = None,
        prior_precision: Given | None = None,
    ) -> Posterior:
        """Read what :meth:`save` wrote, or a precision folder that lies beside a model.

        Args:
            model: the mean, where the file holds none: a module, a state dict, or a folder or
                file of safetensors (refused if its sha256 is not the recorded one).
            prior_precision: δ, added where the file holds the data's part alone.

        Raises:
            StorageError: nothing there, a truncated or foreign file, or a pickle.
            PosteriorError: no mean and no ``model``, another model's names or shapes, a prior
                for a precision that has one, or no prior where the data say nothing.
        """
        place = os.fspath(path_of(path))
        tensors, record = storage.read(place)
        earlier = []
        for k, about in enumerate(record.pop("earlier", ())):
            head = f"{EARLIER}{k}/"
            names = [n for n in tensors if n.startswith(head)]
            held = {n.removeprefix(head): tensors.pop(n) for n in names}
            earlier.append(cls._read(held, about, place, None, None))
        return cls._read(tensors, record, place, model, prior_precision, earlier)

    @classmethod
    def _read(
        cls,
        tensors: dict[str, Tensor],
        record: dict[str, Any],
        place: str,
        model: stored.Model | None,
        prior_precision: Given | None,
        earlier: Sequence[Posterior] = (),
    ) -> Posterior:
        buffers = {n: t for n, t in tensors.items() if n.endswith(".buffer")}
        rest = {n: t for n, t in tensors.items() if n not in buffers}
        parts = stored.parts_of(rest, record, place, model, prior_precision)
        mean, form, prior, n_data, about = parts
        return cls(
            mean,
            form,
            prior_precision=prior,
            n_data=n_data,
            record=about,
            buffers={n.removesuffix(".buffer"): t for n, t in buffers.items()},
            earlier=earlier,
        )


def passed_on(posterior: Posterior) -> dict[str, Any]:
    """Its record without what was measured of it and its data, for a posterior made of it."""
    measured = ("fingerprint", "stationarity", "calibration")
    return {name: entry for name, entry in posterior.record.items() if name not in measured}


def made_of(
    q: Posterior,
    mean: Tree | None = None,
    form: Structure | None = None,
    *,
    n_data: int | None = None,
    **record: Any,
) -> Posterior:
    """Another posterior under the same prior, as ``q`` where nothing is given; ``record`` joins
    what is passed on."""
    return Posterior(
        q.mean if mean is None else mean,
        q.form if form is None else form,
        prior_precision=q.prior,
        n_data=q.n_data if n_data is None else n_data,
        record={**passed_on(q), **record},
        buffers=q.buffers,
    )


@torch.inference_mode(False)
def predict(
    task: Task,
    posteriors: Sequence[Posterior],
    draws: int = 10,
    *,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
    progress: bool | None = None,
) -> Predictions:
    """What a mixture of posteriors predicts, each with the same weight: :meth:`Posterior.predict`
    with ``draws`` networks of each.

    With ``draws=0``, one network at each mean, it is a deep ensemble.

    Raises:
        InputError, PosteriorError, ModelError, DataError: as there; no posterior.
    """
    if not posteriors:
        raise InputError("predict needs at least one posterior")
    qs = [q.on(task, same_data=False) for q in posteriors]
    number = 0 if whole(draws) == 0 else positive_int("draws", draws)
    if chunk_size is not None:
        positive_int("chunk_size", chunk_size)
    task = qs[0].judging(task)
    networks = (
        {**(q.sample(generator=generator) if number else q.mean), **q.buffers}
        for q in qs
        for _ in range(number or 1)
    )
    total = number * len(qs) if number or len(qs) == 1 else len(qs)
    return averaged(task, networks, total, chunk_size=chunk_size, progress=progress)

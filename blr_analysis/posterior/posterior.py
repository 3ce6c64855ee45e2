"""The posterior: what was learned, as a Gaussian over named parameters."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import instance, path_of, positive_int, whole
from blr_analysis.errors import InitialPrecisionWarning, InputError, PosteriorError
from blr_analysis.files import storage
from blr_analysis.files.storage import FIELDS
from blr_analysis.half import narrow, placed
from blr_analysis.posterior import capture
from blr_analysis.posterior import precision_files as stored
from blr_analysis.posterior.minimum import Stationarity
from blr_analysis.posterior.predictive import Predictions, averaged
from blr_analysis.posterior.prior import Given, Prior, differences, n_data_of, real_tensors
from blr_analysis.posterior.prior_choice import in_words
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.posterior.structures import Diagonal, Structure, Tree
from blr_analysis.posterior.structures.lowrank import ENOUGH
from blr_analysis.snapshots import buffers_of
from blr_analysis.task import Task, bare_name, find_device, unwrapped

STILL_INITIAL = "more than half of the optimizer's hess is its start: train longer, or with steps="
EARLIER = "earlier."  # before the names of an earlier posterior's tensors
GUESSED = 0.15  # τ of Kronecker fits of classifiers: python -m benchmarks.field
SATURATED = "{:.0%} of predictions are exactly 0 or 1, without curvature: are the logits scaled?"
# of one posterior and its data
MEASURED = ("fingerprint", "frozen_values", "stationarity", "saturated", "calibration", "ending")


class Posterior:
    """q(θ) = N(m, S⁻¹) over a model's trainable parameters, by their own names.

    S includes the prior: S = diag(δ) + Σ_i (the examples' shares), for the objective
    Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀), a SUM over the n_data training examples.

    Args:
        mean: m, one tensor per parameter name (tied tensors once); of a model in half precision
            each is made in float32 when it is asked for, so that writing into it changes nothing.
        precision: the diagonal of S by name, or a structure of
            :mod:`blr_analysis.posterior.structures`.
        prior_precision: δ: one number, or one per name.
        n_data: N, the number of examples behind S.
        record: where it came from; kept in saved files.
        initial: θ₀, the prior's mean: a state dict of the first weights, or of the base model of a
            fine-tune; None: 0.
        buffers: the model's persistent buffers at these weights (BatchNorm's statistics and their
            like) by name.
        earlier: posteriors at checkpoints of the same training, oldest first.

    Attributes:

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
        given = isinstance(precision, Structure)
        form = precision if given else Diagonal(real_tensors("precision", precision))
        self.form: Structure = form
        prior = Prior.of_any(prior_precision).around(initial, self.mean)
        self.n_data = n_data_of(n_data, least=0)
        instance("record", record or {}, Mapping, "a dict")
        self.record: dict[str, Any] = dict(record or {})
        self.buffers = {n: b.detach().clone() for n, b in (buffers or {}).items()}
        self.earlier = tuple(earlier)
        shapes = {n: tuple(t.shape) for n, t in self.mean.items()}
        if not shapes:
            raise PosteriorError("a posterior needs at least one parameter, got none")
        if odd := differences(shapes, form.shapes, ("mean", "precision")):
            raise PosteriorError(f"mean and precision disagree: {odd}")
        if bad := [n for n, m in self.mean.items() if not bool(torch.isfinite(m).all())]:
            raise PosteriorError(f"the mean of {bad[0]!r} holds NaN or inf; was training stable?")
        self.prior = Prior.read(prior, shapes)
        self.form.check()

    def __repr__(self) -> str:
        known, size = self.record, sum(t.numel() for t in self.mean.values())
        choice, share = known.get("prior_choice"), known.get("initial_share")
        delta = f"{self.prior.given:.3g}" if None in self.prior.entries else "by name"
        explained = known.get("explained", 1.0)
        said = {
            f"{self.structure!r}, {len(self.mean)} tensors, {size:,} parameters": True,
            f"n_data={self.n_data}, kind={known.get('kind', 'given')!r}": True,
            f"prior_precision={in_words(choice) if choice else delta}": True,
            f"initial_share={share or 0.0:.2g}": share is not None,
            f"{'at' if self.at_minimum else 'off'} its minimum": self.at_minimum is not None,
            f"temperature={self.temperature:.3g}": True,
            f"{len(self.earlier)} earlier": self.earlier,
            f"rank explains {explained:.0%}: too low for influence": explained < ENOUGH,
        }
        shown = ", ".join(words for words, wanted in said.items() if wanted)
        return f"Posterior({shown}{'; ' * bool(self.note)}{self.note})"

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
        guess = GUESSED if self._guessed else 1.0
        return float(self.record.get("calibration", {}).get("temperature", guess))

    @property
    def temperature_error(self) -> float | None:
        """The standard error of log τ; None where it was not measured."""
        return self.record.get("calibration", {}).get("error")

    @property
    def _guessed(self) -> bool:
        """Whether only a guess of τ is known: a Kronecker fit of a classifier off its minimum."""
        fitted = self.structure == "kron" and self.record.get("source") == "laplace"
        return fitted and self.at_minimum is False and bool(self.record.get("classifier"))

    @property
    def note(self) -> str:
        """How far it is to be trusted, in one line; "" where it is."""
        share = float(self.record.get("saturated") or 0.0)
        saturated = SATURATED.format(share) if share > 0.5 else ""
        notes = (saturated, self.ending, self._scale_note, self._drawn_note)
        return "; ".join(note for note in notes if note)

    @property
    def ending(self) -> str:
        """Whether trainings by the recipe ended elsewhere than the model, as a rerun or a
        calibration found."""
        found = [self.record.get(by, {}).get("ending", "") for by in ("calibration", "rerun")]
        found.append(self.record.get("ending", ""))
        return next(filter(None, found), "")

    @property
    def _drawn_note(self) -> str:
        """Whether labels were drawn in place of exact columns, as outputs are many."""
        drawn = self.record.get("drawn")
        if drawn is None:
            return ""
        by = f"{drawn['labels']} drawn labels of each example"
        return f"the curvature of {drawn['outputs']:,} outputs is by {by}"

    @property
    def _scale_note(self) -> str:
        if self.stationarity is None or "calibration" in self.record:
            return ""
        if self.at_minimum:
            return "" if self.stationarity.at_minimum else f"model {self.stationarity.verdict}"
        unknown = self.record.get("rerun", {}).get("known") is False
        by = "trained by a default recipe; " if unknown else ""
        if self._guessed:
            return f"{by}off the minimum: temperature {GUESSED} is a guess, calibrate measures it"
        return f"{by}off the minimum, uncalibrated: a ranking, no scale"

    @property
    def structure(self) -> str:
        """ "diag", "kron", "lowrank" or "full"."""
        return self.form.kind

    @property
    def prior_precision(self) -> Any:
        """δ: one number, or a dict by name."""
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
        known = [f.name for f in fields(Stationarity)]
        return None if kept is None else Stationarity(**{n: kept[n] for n in known if n in kept})

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
        facts = capture.Facts(n_data, prior_precision, initial, scaling, batch_size, tokens)
        return cls._captured(capture.from_optimizer, optimizer, model, facts)

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
        facts = capture.Facts(n_data, prior_precision, initial, scaling, batch_size, tokens)
        return cls._captured(capture.from_checkpoint, path_of(path), model, facts, names=names)

    @classmethod
    def from_recorder(
        cls,
        recorder: KroneckerRecorder,
        model: nn.Module,
        *,
        n_data: int,
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
            prior_precision: δ; None: by the evidence of the weights and the factors, which is a
                guess (``record["prior_choice"]``).
            initial: θ₀, the prior's mean; None: 0.

        Raises:
            ModelError: the model changed since the recorder was made.
            PosteriorError: nothing was recorded, NaN, an ``initial`` of another model.

        Example: see :class:`~blr_analysis.posterior.recorder.KroneckerRecorder`.
        """
        instance("recorder", recorder, KroneckerRecorder, "a blr_analysis.KroneckerRecorder")
        facts = capture.Facts(n_data, prior_precision, initial)
        return cls._captured(capture.from_recorder, recorder, model, facts)

    @classmethod
    @torch.inference_mode(False)  # also where the caller switched it on
    def _captured(
        cls, read: Any, source: Any, model: nn.Module, facts: capture.Facts, **more: Any
    ) -> Posterior:
        instance("model", model, nn.Module, "the torch.nn.Module that was trained")
        model = unwrapped(model)
        captured = read(source, model, facts=facts, **more)
        fixed = [n for n, _ in model.named_parameters() if n not in captured.mean]
        if (captured.record.get("initial_share") or 0.0) > 0.5:
            said = f"{STILL_INITIAL} (record['initial_share'])"
            warnings.warn(said, InitialPrecisionWarning, stacklevel=4)  # of from_…
        return cls(
            captured.mean,
            captured.precision,
            prior_precision=captured.prior_precision,
            n_data=captured.n_data,
            record={**captured.record, "fixed": fixed},
            initial=facts.initial,
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
            said = f"the posterior has no parameter {name!r}"
            raise InputError(f"{said}; it covers {sorted(tree)[:12]}")
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

    def predict(
        self, task: Task, draws: int = 10, *, generator: torch.Generator | None = None
    ) -> Predictions:
        """What the posterior predicts for a task's examples, of training or test.

            p(y | x) = ∫ p(y | f_θ(x)) q(θ) dθ  ≈  1/K Σ_k p(y | f_θₖ(x)),   θₖ ~ q

        Args:
            task: the model with the examples to predict; any number of them. What a task of
                scikit-learn estimates from its examples is taken as the fit knew it.
            draws: K; 0: the one network at the posterior's mean.
            generator: draws the networks; None: torch's global one.

        Returns:
            ``mean`` ``[N, C]``, ``losses``, ``nll``, ``accuracy``, ``calibration_error``. Class
            weights and smoothing are no part of the loss here, constants that ``GaussianNLLLoss``
            and ``PoissonNLLLoss`` leave out are; a loss that is no −log p (``MSELoss``) stays
            itself, and the repr names it. Of sequences there are losses per token alone.

        Raises:
            InputError: ``draws`` is no count.
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
        return predict(task, [self], draws, generator=generator)

    def judging(self, task: Task) -> Task:
        """The task, where its likelihood was estimated from its own examples, with the noise or
        the weights of classes of the data that this was fitted to."""
        known = self.record.get("estimated", {})
        if not task.likelihood.estimated or known.keys() != task.likelihood.settings.keys():
            return task
        made = task.under(task.model, task.device)
        made.likelihood = task.likelihood.taking(known)
        return made

    def changed(self, **parts: Any) -> Posterior:
        """The same with other parts (``mean``, ``form``, ``prior``, ``record``, ``earlier``, …),
        which are believed."""
        made = copy.copy(self)
        vars(made).update({"record": dict(self.record), **parts})
        return made

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Posterior:
        """The same posterior on another device (and in another floating dtype).

        Raises:
            DeviceError: this machine does not have it.
            PosteriorError: a precision is too large or too small for the dtype.
        """
        target = find_device(device)
        before = next(iter(self.mean.values())).dtype
        kind = before if dtype is None else dtype
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            raise InputError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
        mean, held = placed(self.mean, target, kind), narrow(self.mean)
        same = type(mean) is type(self.mean) and all(m is held[n] for n, m in narrow(mean).items())
        tensors = self.form.tensors().values()
        if same and all(t.device == target and t.dtype == kind for t in tensors):
            return self
        form = self.form.to(target, kind)
        if torch.finfo(kind).max < torch.finfo(before).max:
            form.check()
        return self.changed(
            mean=mean,
            form=form,
            prior=self.prior.placed(mean),
            record=self.record,
            buffers={n: b.to(target) for n, b in self.buffers.items()},
            earlier=tuple(q.to(target, dtype) for q in self.earlier),
        )

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
        places = {bare_name(n): n for n in [*parameters, *dict(task.model.named_buffers())]}
        names = {n: places.get(bare_name(n), n) for n in [*self.mean, *self.buffers]}
        if any(old != new for old, new in names.items()):
            return self._renamed(names).on(task, same_data=same_data)
        fixed = [places.get(bare_name(n), n) for n in self.record.get("fixed", ())]
        mine = self.form.shapes
        learned = {p for p, t in parameters.items() if t.requires_grad and p not in fixed}
        theirs = {n: p for n, p in parameters.items() if n in mine or n in learned}
        if odd := differences(mine, theirs, ("posterior", "model")):
            remedy = "pass the model that it was captured from or fitted to"
            raise PosteriorError(f"the posterior belongs to another model: {odd}; {remedy}")
        if same_data and self.n_data != task.n_data:
            said = f"n_data={self.n_data} examples, the task has {task.n_data}"
            remedy = "use the training data"
            if task.likelihood.is_sequence:
                remedy += ", or capture it with n_data= the sequences, tokens= those that count"
            raise PosteriorError(f"the posterior was learned from {said}; {remedy}")
        return self.to(task.device, task.check_parameters(mine))

    def _renamed(self, names: Mapping[str, str]) -> Posterior:
        """The same with parameters of other names."""
        tensors, record = stored.renamed(*self._stored(), names)
        held = {names[n]: m for n, m in narrow(self.mean).items()}
        earlier = tuple(q._renamed(names) for q in self.earlier)
        return self._read(tensors, record, "").changed(mean=type(self.mean)(held), earlier=earlier)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to ``path``: one file if it ends in .safetensors, else a folder of shards.

        Raises:
            StorageError: the place cannot be written; what was there before stays.

        Example:
            >>> import tempfile
            >>> q = Posterior({"w": torch.zeros(2)}, {"w": torch.tensor([1.5, 3.0])},
            ...               prior_precision=1.0, n_data=10)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     q.save(f"{folder}/q.safetensors")
            ...     back = Posterior.load(f"{folder}/q.safetensors")
            >>> back.precision("w"), back.prior_precision
            (tensor([1.5000, 3.0000]), 1.0)
        """
        place = path_of(path)
        tensors, record = self._stored()
        for k, q in enumerate(self.earlier):
            held, about = q._stored()
            tensors |= {f"{EARLIER}{k}/{n}": t for n, t in held.items()}
            record.setdefault("earlier", []).append(about)
        storage.write(place, {n: t.cpu() for n, t in tensors.items()}, record)

    def _stored(self) -> tuple[Tree, dict[str, Any]]:
        """Tensors and record of one posterior, without the earlier ones."""
        tensors, record = stored.encode(self.form, self.prior)
        beside = {f"{n}.initial": m for n, m in (self.initial or {}).items()}
        beside |= {f"{n}.mean": m for n, m in narrow(self.mean).items()}
        beside |= {f"{n}.buffer": b for n, b in self.buffers.items()}
        if clash := sorted(set(beside) & set(tensors)):
            raise InputError(f"parameters are called {clash[:4]}, as means are: rename them")
        known = {"n_data": self.n_data, "parameters": list(self.mean)}
        return {**tensors, **beside}, {**self.record, **record, **known}

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
            earlier.append(cls._read(held, about, place))
        return cls._read(tensors, record, place, model, prior_precision, earlier=earlier)

    @classmethod
    def _read(
        cls, tensors: Tree, record: dict[str, Any], *given: Any, earlier: Sequence[Posterior] = ()
    ) -> Posterior:
        names = [n for n in tensors if n.endswith(".buffer")]
        buffers = {n.removesuffix(".buffer"): tensors.pop(n) for n in names}
        mean, form, prior, n_data, about = stored.parts_of(tensors, record, *given)
        own = {"prior_precision": prior, "n_data": n_data, "record": about}
        return cls(mean, form, **own, buffers=buffers, earlier=earlier)


def made_of(q: Posterior, mean: Tree, form: Structure, n_data: int, **record: Any) -> Posterior:
    """Another posterior under the same prior; ``record`` joins what ``q``'s says, but for what was
    measured of it and its data."""
    known = {k: v for k, v in q.record.items() if k not in MEASURED}
    about = {"prior_precision": q.prior, "n_data": n_data, "record": known | record}
    return Posterior(mean, form, **about, buffers=q.buffers)


def write_factors(
    path: str | os.PathLike[str],
    posterior: Posterior,
    *,
    names: Mapping[str, str],
    n_data: int,
    scale: float = 1.0,
    model: str | os.PathLike[str] | None = None,
    **record: Any,
) -> None:
    """The precision of a posterior with factors, its eigenvalues times ``scale``, without a mean.

    Args:
        path: as of :func:`write_precision`.
        posterior: of structure "gram" or "kron".
        names: the model's own names by the posterior's.
        n_data: N, the examples that the scaled sum stands for.
        scale: of the whole precision.
        model: the model's folder, whose sha256 is recorded.
        record: what else is known, JSON-able.

    Raises:
        StorageError: the place cannot be written; what was there before stays.
    """
    form = posterior.form.zeros().plus(posterior.form, scale)
    prior = Prior.of_any(scale * posterior.prior_precision)
    tensors, about = stored.renamed(*stored.encode(form, prior), names)
    for block in about["blocks"]:
        block["inputs"] *= scale
    about |= {"n_data": n_data_of(n_data), "parameters": [names[n] for n in posterior.mean]}
    known = {**dict.fromkeys(FIELDS), "kind": posterior.record["kind"]}
    storage.write(path_of(path), tensors, {**known, **record, **stored.hashes(model), **about})


@torch.inference_mode(False)  # also where the caller switched it on
def predict(
    task: Task,
    posteriors: Sequence[Posterior],
    draws: int = 10,
    *,
    generator: torch.Generator | None = None,
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
    networks = (
        {**(q.sample(generator=generator) if number else q.mean), **q.buffers}
        for q in qs
        for _ in range(number or 1)
    )
    total = number * len(qs) if number or len(qs) == 1 else len(qs)
    return averaged(qs[0].judging(task), networks, total)

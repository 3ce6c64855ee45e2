"""The posterior: what was learned, as a Gaussian over named parameters."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import bare_name, instance, path_of, positive_int, whole
from blr_analysis.errors import InitialPrecisionWarning, InputError, PosteriorError
from blr_analysis.files import storage
from blr_analysis.files.storage import FIELDS
from blr_analysis.half import narrow, placed, widened
from blr_analysis.models import find_device, unwrapped
from blr_analysis.posterior import capture
from blr_analysis.posterior import precision_files as stored
from blr_analysis.posterior.capture.learned import LARGE_SHARE
from blr_analysis.posterior.facts import (
    Calibration,
    Facts,
    Numbers,
    Record,
    Rerun,
    facts_of,
    recorded,
    without_facts,
)
from blr_analysis.posterior.input_ranges import other_units, remembered
from blr_analysis.posterior.minimum import PrecisionMatch, Stationarity
from blr_analysis.posterior.predictive import Predictions, averaged
from blr_analysis.posterior.prior import (
    FormPrior,
    Given,
    Prior,
    Shapes,
    differences,
    n_data_of,
    real_tensors,
)
from blr_analysis.posterior.prior_choice import in_words
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.posterior.structures import KINDS, Diagonal, Structure, Tree
from blr_analysis.posterior.structures.lowrank import ENOUGH_EXPLAINED
from blr_analysis.snapshots import buffers_of
from blr_analysis.task import Task

AS_PRIOR = ".as_prior"  # behind the names of the tensors of a prior with a structure
EARLIER = "earlier."  # before the names of an earlier posterior's tensors
GUESSED = 0.15  # τ of Kronecker fits of classifiers: python -m benchmarks.field
WITH_START = (
    "{:.0%} of the precision is its start, as weights were drawn in training: it says little of "
    "single weights"
)
SATURATED = "{:.0%} of predictions are exactly 0 or 1, without curvature: are the logits scaled?"


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
        record: where it came from; kept in saved files. Entries that are attributes below
            ("source", "calibration", …) are read as those. :attr:`record` gives all of it back.
        initial: θ₀, the prior's mean: a state dict of the first weights, or of the base model of a
            fine-tune; None: 0.
        buffers: the model's persistent buffers at these weights (BatchNorm's statistics and their
            like) by name.
        earlier: posteriors at checkpoints of the same training, oldest first.

    Attributes:
        mean: m by parameter name.
        form: S, a structure of :mod:`blr_analysis.posterior.structures`.
        prior: δ and θ₀.
        n_data, buffers, earlier: as given.
        source: what made it: "laplace", "optimizer", "recorder", …; "" where nobody said.
        is_classifier: whether it was fitted to classes.
        stationarity: how far the mean is from the minimum of its loss, as the fit measured it; None
            where it did not. Analyses that need it measure it for themselves.
        saturated: the share of predictions that are exactly 0 or 1.
        calibration: the temperature that :func:`blr_analysis.calibrate` measured; None before.
        rerun: of which training by :func:`blr_analysis.rerun` it is; None: of the task's own model.
        ending: whether trainings by the recipe ended elsewhere than the model, as a rerun or a
            calibration found, in one line; "" if not.
        fingerprint: outputs, targets and losses of a few examples, by which its data are known
            again; None where the fit saw no data.
        frozen_values: numbers of the parameters that were frozen at the fit, by name.
        input_ranges: the least and largest mean and spread of its inputs, by which other units are
            noticed; None where the fit saw no real numbers.
        start: by name, of what an optimizer of the rule learned: β₂ᵗ, the weight that its start
            still had, and the precision S₀ that it started with. Neither is part of S; predictions
            and analyses of a task take the posterior :attr:`as_drawn`, with (1 − β₂ᵗ) S + β₂ᵗ S₀.
            None of other posteriors.
        precision_match: how far S is from the expected Hessian, as
            :func:`blr_analysis.posterior.checked` measured it; None before.

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

    source: str
    is_classifier: bool
    stationarity: Stationarity | None
    saturated: float
    calibration: Calibration | None
    rerun: Rerun | None
    ending: str
    fingerprint: Numbers | None
    frozen_values: Numbers | None
    input_ranges: Numbers | None
    start: Numbers | None
    precision_match: PrecisionMatch | None

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
        self.form = _structure_of(precision)
        prior = Prior.of_any(prior_precision).around(initial, self.mean)
        self.n_data = n_data_of(n_data, least=0)
        entries = record or {}
        instance("record", entries, Mapping, "a dict")
        self._read_record(entries)
        self.buffers = {n: b.detach().clone() for n, b in (buffers or {}).items()}
        self.earlier = tuple(earlier)
        shapes = {n: tuple(t.shape) for n, t in self.mean.items()}
        _check_mean(self.mean, shapes, self.form)
        self.prior = Prior.read(prior, shapes)
        self.form.check()

    def _read_record(self, record: Mapping[str, Any]) -> None:
        self._entries = without_facts(record)  # those that only tell
        facts = facts_of(record)
        self.source = facts.source
        self.is_classifier = facts.is_classifier
        self.stationarity = facts.stationarity
        self.saturated = facts.saturated
        self.calibration = facts.calibration
        self.rerun = facts.rerun
        self.ending = facts.ending
        self.fingerprint = facts.fingerprint
        self.frozen_values = facts.frozen_values
        self.input_ranges = facts.input_ranges
        self.start = facts.start
        self.precision_match = facts.precision_match

    @property
    def _facts(self) -> Facts:
        return Facts(
            source=self.source,
            is_classifier=self.is_classifier,
            stationarity=self.stationarity,
            saturated=self.saturated,
            calibration=self.calibration,
            rerun=self.rerun,
            ending=self.ending,
            fingerprint=self.fingerprint,
            frozen_values=self.frozen_values,
            input_ranges=self.input_ranges,
            start=self.start,
            precision_match=self.precision_match,
        )

    def __repr__(self) -> str:
        n_parameters = sum(t.numel() for t in self.mean.values())
        facts = [
            f"{self.structure!r}, {len(self.mean)} tensors, {n_parameters:,} parameters",
            f"n_data={self.n_data}, kind={self._entries.get('kind', 'given')!r}",
            f"prior_precision={self._prior_in_words()}",
        ]
        initial_share = self._entries.get("initial_share")
        if initial_share is not None:
            facts.append(f"initial_share={initial_share:.2g}")
        if self.at_minimum is not None:
            facts.append("at its minimum" if self.at_minimum else "off its minimum")
        if self.precision_match is not None:
            facts.append(self.precision_match.verdict)
        facts.append(f"temperature={self.temperature:.3g}")
        if self.earlier:
            facts.append(f"{len(self.earlier)} earlier")
        explained = self._entries.get("explained", 1.0)
        if explained < ENOUGH_EXPLAINED:
            facts.append(f"rank explains {explained:.0%}: too low for influence")
        text = f"Posterior({', '.join(facts)}"
        return f"{text}; {self.note})" if self.note else f"{text})"

    def _prior_in_words(self) -> str:
        if isinstance(self.prior, FormPrior):
            return "an earlier posterior" if self.prior.mean is not None else "by weight"
        choice = self._entries.get("prior_choice")
        if choice:
            return in_words(choice)
        is_one_number = None in self.prior.entries
        return f"{self.prior.given:.3g}" if is_one_number else "by name"

    @property
    def record(self) -> Record:
        """Where it came from and what is known of it, as a saved file says it. It is read only."""
        return Record({**self._entries, **recorded(self._facts)})

    @property
    def run(self) -> tuple[Posterior, ...]:
        """The posteriors along the training: the earlier ones, and itself."""
        return (*self.earlier, self)

    @property
    def at_minimum(self) -> bool | None:
        """Whether the mean minimises the task's loss; None where the fit did not measure it."""
        return None if self.stationarity is None else self.stationarity.near

    @property
    def precision_matches(self) -> bool | None:
        """Whether S is the expected Hessian (K&R 26); None before
        :func:`blr_analysis.posterior.checked` measured it."""
        return None if self.precision_match is None else self.precision_match.holds

    @property
    def temperature(self) -> float:
        """τ, which multiplies V in sensitivity, leave-one-out and influence: measured by
        :func:`blr_analysis.calibrate`; else .15, a guess, for Kronecker fits of classifiers off
        their minimum, and 1."""
        if self.calibration is not None:
            return self.calibration.temperature
        return GUESSED if self._is_guessed else 1.0

    @property
    def temperature_error(self) -> float | None:
        """The standard error of log τ; None where it was not measured."""
        return None if self.calibration is None else self.calibration.error

    @property
    def _is_guessed(self) -> bool:
        """Whether only a guess of τ is known: a Kronecker fit of a classifier off its minimum."""
        is_kronecker_fit = self.structure == "kron" and self.source == "laplace"
        return is_kronecker_fit and self.is_classifier and self.at_minimum is False

    @property
    def note(self) -> str:
        """How far it is to be trusted, in one line; "" where it is."""
        saturated = SATURATED.format(self.saturated) if self.saturated > 0.5 else ""
        caveat = self._entries.get("caveat") or ""
        notes = (saturated, self.ending, caveat, self._scale_note, self._drawn_note)
        return "; ".join(note for note in notes if note)

    @property
    def _drawn_note(self) -> str:
        """Whether labels were drawn in place of exact columns, as outputs are many."""
        drawn = self._entries.get("drawn")
        if drawn is None:
            return ""
        labels = f"{drawn['labels']} drawn label{'s' if drawn['labels'] > 1 else ''}"
        if "outputs" not in drawn:
            return f"the curvature is by {labels} of each {drawn['of']}"
        return f"the curvature of {drawn['outputs']:,} outputs is by {labels} of each example"

    @property
    def _scale_note(self) -> str:
        """How far single answers may be taken at their word."""
        if self.stationarity is None or self.calibration is not None:
            return ""
        if self.stationarity.at_minimum:
            return ""
        if self.at_minimum:
            return f"model {self.stationarity.verdict}"
        by = self._recipe_note
        if self._is_guessed:
            return f"{by}off the minimum: temperature {GUESSED} is a guess, calibrate measures it"
        return f"{by}off the minimum, uncalibrated: a ranking, no scale"

    @property
    def _recipe_note(self) -> str:
        """How the recipe of a rerun differs from the run's own."""
        if self.rerun is None or self.rerun.known:
            return ""
        if self.rerun.missing:
            return f"trained without {self.rerun.missing}; "
        return "trained by a default recipe; "

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
        cls, read: Any, source: Any, model: nn.Module, facts: capture.Facts, **options: Any
    ) -> Posterior:
        """The posterior that ``read`` finds in an optimizer, a file or a recorder."""
        instance("model", model, nn.Module, "the torch.nn.Module that was trained")
        model = unwrapped(model)
        captured = read(source, model, facts=facts, **options)
        fixed = [n for n, _ in model.named_parameters() if n not in captured.mean]
        if captured.record.get("is_doubtful"):
            caveat = captured.record["caveat"]
            warnings.warn(caveat, InitialPrecisionWarning, stacklevel=4)  # of from_…
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
        return _entry(self.form.diagonal(inverse=True), name)

    def precision(self, name: str) -> Tensor:
        """diag(S) of one parameter, shaped as the parameter."""
        return _entry(self.form.diagonal(), name)

    def sample(self, *, generator: torch.Generator | None = None, n: int | None = None) -> Tree:
        """A draw θ = m + R⁻ᵀ ε from q; with ``n``, n draws along a new leading dimension.

        >>> q = Posterior({"w": torch.zeros(3)}, {"w": torch.ones(3)},
        ...               prior_precision=1.0, n_data=1)
        >>> q.sample(generator=torch.Generator().manual_seed(0), n=2)["w"].shape
        torch.Size([2, 3])
        """
        if generator is not None:
            instance("generator", generator, torch.Generator, "a torch.Generator")
        batch: tuple[int, ...] = ()
        if n is not None:
            batch = (positive_int("n", n),)
        noise = {name: _normal(m, batch, generator) for name, m in self.mean.items()}
        deviation = self.form.root_solve(noise)
        return {name: m + deviation[name] for name, m in self.mean.items()}

    @property
    def as_drawn(self) -> Posterior:
        """As weights were drawn in training: (1 − β₂ᵗ) S + β₂ᵗ S₀, the start still in it.

        Analyses of a task and predictions look at this one, for it is what the network was trained
        to bear; merges and rankings of weights at S. Of posteriors without a start, and of one that
        is as drawn already, it is the same.
        """
        earlier = tuple(q.as_drawn for q in self.earlier)
        if self.start is None:
            return self.changed(earlier=earlier) if earlier else self
        drawn = dict(self.form.diagonal())
        total = 0.0
        of_start = 0.0
        for name, (weight, start) in self.start.items():
            drawn[name] = drawn[name].lerp(torch.full_like(drawn[name], start), weight)
            total += float(drawn[name].double().sum())
            of_start += weight * start * drawn[name].numel()
        share = of_start / total
        caveat = WITH_START.format(share) if share >= LARGE_SHARE else ""
        entries = {**self._entries, "caveat": caveat}
        return self.changed(form=Diagonal(drawn), start=None, earlier=earlier, _entries=entries)

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
            :class:`~blr_analysis.posterior.predictive.Predictions`: ``mean`` ``[N, C]``;
            ``variance``, ``entropy`` and ``information`` of every example, token or pixel;
            ``losses``, ``nll``, ``accuracy``, ``calibration_error``, ``brier``, which are None
            without labels; ``plot()`` draws accuracy against confidence. Class weights and
            smoothing are no part of the loss here, constants that ``GaussianNLLLoss`` and
            ``PoissonNLLLoss`` leave out are; a loss that is no −log p (``MSELoss``) stays itself,
            and the repr names it.

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
        estimated = self._entries.get("estimated", {})
        settings = task.likelihood.settings
        if not task.likelihood.estimated or estimated.keys() != settings.keys():
            return task
        judging = task.under(task.model, task.device)
        judging.likelihood = task.likelihood.taking(estimated)
        return judging

    def changed(self, **parts: Any) -> Posterior:
        """A copy with other parts (``mean``, ``form``, ``record``, ``calibration``, …), which are
        believed."""
        posterior = copy.copy(self)
        record = parts.pop("record", None)
        if record is not None:
            posterior._read_record(record)
        vars(posterior).update(parts)
        return posterior

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Posterior:
        """The same posterior on another device (and in another floating dtype).

        Raises:
            DeviceError: this machine does not have it.
            PosteriorError: a precision is too large or too small for the dtype.
        """
        target = find_device(device)
        dtype_before = next(iter(self.mean.values())).dtype
        target_dtype = dtype_before if dtype is None else dtype
        if not isinstance(target_dtype, torch.dtype) or not target_dtype.is_floating_point:
            raise InputError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
        mean = placed(self.mean, target, target_dtype)
        tensors = self.form.tensors().values()
        form_stays = all(t.device == target and t.dtype == target_dtype for t in tensors)
        if form_stays and _are_the_same(mean, self.mean):
            return self
        form = self.form.to(target, target_dtype)
        if torch.finfo(target_dtype).max < torch.finfo(dtype_before).max:
            form.check()
        return self.changed(
            mean=mean,
            form=form,
            prior=self.prior.placed(mean),
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
        task_names = {bare_name(n): n for n in [*parameters, *dict(task.model.named_buffers())]}
        names = {n: task_names.get(bare_name(n), n) for n in [*self.mean, *self.buffers]}
        if any(name != task_name for name, task_name in names.items()):
            return self._renamed(names).on(task, same_data=same_data)
        fixed = [task_names.get(bare_name(n), n) for n in self._entries.get("fixed", ())]
        shapes = self.form.shapes
        learned = {n for n, p in parameters.items() if p.requires_grad and n not in fixed}
        task_shapes = {n: p for n, p in parameters.items() if n in shapes or n in learned}
        if mismatch := differences(shapes, task_shapes, ("posterior", "model")):
            remedy = "pass the model that it was captured from or fitted to"
            raise PosteriorError(f"the posterior belongs to another model: {mismatch}; {remedy}")
        if same_data and self.n_data != task.n_data:
            raise self._of_other_data(task)
        return self.to(task.device, task.check_parameters(shapes))

    def _of_other_data(self, task: Task) -> PosteriorError:
        sizes = f"n_data={self.n_data} examples, the task has {task.n_data}"
        remedy = "use the training data"
        if task.likelihood.is_sequence:
            remedy += ", or capture it with n_data= the sequences, tokens= those that count"
        return PosteriorError(f"the posterior was learned from {sizes}; {remedy}")

    def _renamed(self, names: Mapping[str, str]) -> Posterior:
        """The same with parameters of other names."""
        tensors, record = stored.renamed(*self._stored(), names)
        mean = {names[n]: m for n, m in narrow(self.mean).items()}
        earlier = tuple(q._renamed(names) for q in self.earlier)
        return self._read(tensors, record, "").changed(mean=type(self.mean)(mean), earlier=earlier)

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
        earlier_records = []
        for k, q in enumerate(self.earlier):
            earlier_tensors, earlier_record = q._stored()
            tensors |= {f"{EARLIER}{k}/{n}": t for n, t in earlier_tensors.items()}
            earlier_records.append(earlier_record)
        if earlier_records:
            record["earlier"] = earlier_records
        storage.write(place, {n: t.cpu() for n, t in tensors.items()}, record)

    def _stored(self) -> tuple[Tree, dict[str, Any]]:
        """Tensors and record of one posterior, without the earlier ones."""
        tensors, encoded = stored.encode(self.form, self.prior)
        beside = {f"{n}.initial": m for n, m in (self.initial or {}).items()}
        beside |= {f"{n}.mean": m for n, m in narrow(self.mean).items()}
        beside |= {f"{n}.buffer": b for n, b in self.buffers.items()}
        if isinstance(self.prior, FormPrior):
            own = self.prior.form.tensors()
            beside |= {f"{n}{AS_PRIOR}": tensor for n, tensor in own.items()}
            encoded["prior_form"] = stored.encode(self.prior.form, Prior({None: 0.0}))[1]
        if clash := sorted(set(beside) & set(tensors)):
            raise InputError(f"parameters are called {clash[:4]}, as means are: rename them")
        record = {**self.record, **encoded}
        record["n_data"] = self.n_data
        record["parameters"] = list(self.mean)
        return {**tensors, **beside}, record

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
        for k, earlier_record in enumerate(record.pop("earlier", ())):
            prefix = f"{EARLIER}{k}/"
            names = [n for n in tensors if n.startswith(prefix)]
            earlier_tensors = {n.removeprefix(prefix): tensors.pop(n) for n in names}
            earlier.append(cls._read(earlier_tensors, earlier_record, place))
        last = cls._read(tensors, record, place, model, prior_precision)
        return last.changed(earlier=tuple(earlier))

    @classmethod
    def _read(
        cls,
        tensors: Tree,
        record: dict[str, Any],
        path: str,
        model: stored.Model | None = None,
        prior_precision: Given | None = None,
    ) -> Posterior:
        """One posterior, without earlier ones; the tensors of its buffers are taken out."""
        own_names = [n for n in tensors if n.endswith(AS_PRIOR)]
        of_prior = {n.removesuffix(AS_PRIOR): tensors.pop(n) for n in own_names}
        record_of_prior = record.pop("prior_form", None)
        names = [n for n in tensors if n.endswith(".buffer")]
        buffers = {n.removesuffix(".buffer"): tensors.pop(n) for n in names}
        parts = stored.parts_of(tensors, record, path, model, prior_precision)
        prior = parts.prior
        if record_of_prior is not None:
            kind = KINDS[record_of_prior["structure"]]
            of_prior_form = kind.read(of_prior, record_of_prior, list(parts.mean))
            prior = FormPrior(prior.entries, prior.mean, of_prior_form)
        return cls(
            widened(parts.mean),
            parts.form,
            prior_precision=prior,
            n_data=parts.n_data,
            record=parts.record,
            buffers=buffers,
        )


def _structure_of(precision: Mapping[str, Tensor] | Structure) -> Structure:
    if isinstance(precision, Structure):
        return precision
    return Diagonal(real_tensors("precision", precision))


def _check_mean(mean: Tree, shapes: Shapes, form: Structure) -> None:
    if not shapes:
        raise PosteriorError("a posterior needs at least one parameter, got none")
    if mismatch := differences(shapes, form.shapes, ("mean", "precision")):
        raise PosteriorError(f"mean and precision disagree: {mismatch}")
    for name, m in mean.items():
        if not bool(torch.isfinite(m).all()):
            raise PosteriorError(f"the mean of {name!r} holds NaN or inf; was training stable?")


def _entry(tree: Tree, name: str) -> Tensor:
    if not isinstance(name, str) or name not in tree:
        names = sorted(tree)[:12]
        raise InputError(f"the posterior has no parameter {name!r}; it covers {names}")
    return tree[name]


def _normal(m: Tensor, batch: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers for a parameter, on its device; drawn on the generator's."""
    device = m.device if generator is None else generator.device
    noise = torch.empty((*batch, *m.shape), dtype=m.dtype, device=device)
    return noise.normal_(generator=generator).to(m.device)


def _are_the_same(moved: Tree, tensors: Tree) -> bool:
    """Whether moving changed no tensor, nor how it is read."""
    before = narrow(tensors)
    return type(moved) is type(tensors) and all(t is before[n] for n, t in narrow(moved).items())


def made_of(q: Posterior, mean: Tree, form: Structure, n_data: int, kind: str) -> Posterior:
    """Another posterior under the same prior, of another ``kind``; what was measured of ``q`` and
    its data does not hold for it, and is left out."""
    lasting = Facts(source=q.source, is_classifier=q.is_classifier, rerun=q.rerun, start=q.start)
    return Posterior(
        mean,
        form,
        prior_precision=q.prior,
        n_data=n_data,
        record={**without_facts(q.record), **recorded(lasting), "kind": kind},
        buffers=q.buffers,
    )


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
    tensors, encoded = stored.renamed(*stored.encode(form, prior), names)
    for block in encoded["blocks"]:
        block["inputs"] *= scale
    encoded["n_data"] = n_data_of(n_data)
    encoded["parameters"] = [names[n] for n in posterior.mean]
    fields = {**dict.fromkeys(FIELDS), "kind": posterior.record["kind"]}
    storage.write(path_of(path), tensors, {**fields, **record, **stored.hashes(model), **encoded})


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
    placed_posteriors = [q.on(task, same_data=False) for q in posteriors]
    n_draws = 0 if whole(draws) == 0 else positive_int("draws", draws)
    networks = _networks(placed_posteriors, n_draws, generator)
    n_networks = max(n_draws, 1) * len(posteriors)
    is_one_at_its_mean = n_draws == 0 and len(posteriors) == 1
    judging = placed_posteriors[0].judging(task)
    ranges = [q.input_ranges or remembered(q) for q in posteriors]
    notes = [other_units(of_inputs, task) for of_inputs in ranges]
    note = next(filter(None, notes), "")
    return averaged(judging, networks, 0 if is_one_at_its_mean else n_networks, note)


def _networks(
    posteriors: Sequence[Posterior], n_draws: int, generator: torch.Generator | None
) -> Iterator[Tree]:
    """Weights and buffers of the networks of a mixture, one after the other; without draws those at
    the means."""
    for q in posteriors:
        for _ in range(n_draws):
            yield {**q.as_drawn.sample(generator=generator), **q.buffers}
        if n_draws == 0:
            yield {**q.mean, **q.buffers}

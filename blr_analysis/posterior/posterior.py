"""The posterior: what was learned, as a Gaussian over named parameters."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import bare_name, instance, path_of, positive_int, whole
from blr_analysis.errors import InitialPrecisionWarning, InputError, PosteriorError, warn_user
from blr_analysis.files import storage
from blr_analysis.half import narrow, placed, widened
from blr_analysis.models import find_device, n_parameters, unwrapped
from blr_analysis.posterior import capture
from blr_analysis.posterior.averaging import averaged
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
from blr_analysis.posterior.networks import Network, NetworkAt, NetworkAtMean, linearised
from blr_analysis.posterior.notes import (
    GUESSED_TEMPERATURE,
    MOSTLY_START,
    note_of,
    temperature_is_guessed,
)
from blr_analysis.posterior.posterior_files import (
    Model,
    Parts,
    decode_posterior,
    encode_posterior,
    renamed,
)
from blr_analysis.posterior.predictive import Predictions
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
from blr_analysis.posterior.reach import share_in_words
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.posterior.structures import Diagonal, Structure, Tree
from blr_analysis.posterior.structures.lowrank import ENOUGH_EXPLAINED
from blr_analysis.snapshots import buffers_of
from blr_analysis.task import Task

# Sources of a curvature at weights that were not drawn.
CURVATURE_AT_MEAN = ("laplace", "recorder", "fisher")
EARLIER = "earlier."  # before the names of an earlier posterior's tensors
NAMES_LISTED = 12  # in a message


class Posterior:
    """q(θ) = N(m, S⁻¹) over a model's trainable parameters, by their own names.

    S includes the prior: S = diag(δ) + Σ_i (the examples' shares), for the objective
    Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀), a SUM over the n_data training examples.

    Args:
        mean: m, one tensor per parameter name (tied tensors once). For a model in half precision
            each tensor is converted to float32 on access, so that writing into it changes nothing.
        precision: the diagonal of S by name, or a structure of
            :mod:`blr_analysis.posterior.structures`.
        prior_precision: δ: one number, or one per name.
        n_data: N, the number of examples behind S.
        record: where it came from; it is saved, too. Entries named as attributes below ("source",
            "calibration", …) become those attributes. :attr:`record` returns all of it.
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
        source: what made it: "laplace", "optimizer", "recorder", …; "" where it is unknown.
        is_classifier: whether it was fitted to classes.
        stationarity: how far the mean is from the minimum of its loss, as the fit measured it; None
            where it did not. Analyses that need it then measure it themselves.
        saturated: the share of predictions that are exactly 0 or 1.
        calibration: the temperature that :func:`blr_analysis.calibrate` measured; None before.
        rerun: the training by :func:`blr_analysis.rerun` that it is of; None for the task's model.
        ending: one line where trainings by the recipe end elsewhere than the model, as a rerun or a
            calibration found; else "".
        fingerprint: outputs, targets and losses of a few examples, by which its data are
            recognised; None where the fit saw no data.
        frozen_values: numbers of the parameters that were frozen at the fit, by name.
        input_ranges: the ranges of its inputs, by which other units are noticed, see
            :mod:`blr_analysis.posterior.input_ranges`; None where the fit saw no real numbers.
        start: for each name, β₂ᵗ, the weight that the start of an optimizer of the rule still had,
            and the precision S₀ that it started with; None of other posteriors. Neither is part of
            S. Predictions and analyses of a task take the posterior :attr:`as_drawn`, with
            (1 − β₂ᵗ) S + β₂ᵗ S₀.
        precision_match: how far S is from the expected Hessian, as
            :func:`blr_analysis.posterior.checked` measured it; None before.

    Raises:
        PosteriorError: a precision that is NaN, infinite or not positive; NaN weights; shapes that
            disagree; a missing or impossible ``n_data`` or ``prior_precision``.

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
        """Take over the entries of a record: the facts as attributes, the others as they are."""
        self._entries = without_facts(record)
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
        """The attributes that steer analyses, as one value."""
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
        facts = [
            f"{self.structure!r}, {len(self.mean)} tensors, {self.coverage}",
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

    @property
    def coverage(self) -> str:
        """How many parameters the posterior covers, and of how many, in words."""
        covered = sum(mean.numel() for mean in self.mean.values())
        return share_in_words(covered, self._entries.get("model_parameters"))

    def _prior_in_words(self) -> str:
        """δ, and how it was found, for the repr."""
        if isinstance(self.prior, FormPrior):
            return "an earlier posterior" if self.prior.mean is not None else "by weight"
        choice = self._entries.get("prior_choice")
        if choice:
            return in_words(choice)
        is_one_number = None in self.prior.entries
        return f"{self.prior.given:.3g}" if is_one_number else "by name"

    @property
    def record(self) -> Record:
        """Where it came from and what is known of it, as a saved file says it; read-only."""
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
        """τ, which multiplies V in sensitivity, leave-one-out and influence.

        :func:`blr_analysis.calibrate` measures it. Before, it is 0.15, a guess, for Kronecker fits
        of classifiers off their minimum, and 1 for all others.
        """
        if self.calibration is not None:
            return self.calibration.temperature
        is_guessed = temperature_is_guessed(self._facts, self.structure)
        return GUESSED_TEMPERATURE if is_guessed else 1.0

    @property
    def temperature_error(self) -> float | None:
        """The standard error of log τ; None where it was not measured."""
        return None if self.calibration is None else self.calibration.error

    @property
    def note(self) -> str:
        """How far it is to be trusted, in one line; "" where it is."""
        return note_of(self._facts, self._entries, self.structure)

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
        facts = capture.TrainingFacts(n_data, prior_precision, initial, scaling, batch_size, tokens)
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
        """The diagonal posterior in a saved training state: Hugging Face Trainer, Lightning, torch.

        See :func:`blr_analysis.posterior.capture.from_checkpoint`.
        """
        facts = capture.TrainingFacts(n_data, prior_precision, initial, scaling, batch_size, tokens)
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
            PosteriorError: nothing was recorded; NaN; ``initial`` is of another model.

        Example: see :class:`~blr_analysis.posterior.recorder.KroneckerRecorder`.
        """
        instance("recorder", recorder, KroneckerRecorder, "a blr_analysis.KroneckerRecorder")
        facts = capture.TrainingFacts(n_data, prior_precision, initial)
        return cls._captured(capture.from_recorder, recorder, model, facts)

    @classmethod
    @torch.inference_mode(False)  # also where the caller switched it on
    def _captured(
        cls, read: Any, source: Any, model: nn.Module, facts: capture.TrainingFacts, **options: Any
    ) -> Posterior:
        """The posterior that ``read`` finds in an optimizer, a file or a recorder."""
        instance("model", model, nn.Module, "the torch.nn.Module that was trained")
        model = unwrapped(model)
        captured = read(source, model, facts=facts, **options)
        fixed = [n for n, _ in model.named_parameters() if n not in captured.mean]
        if captured.record.get("is_doubtful"):
            warn_user(captured.record["caveat"], InitialPrecisionWarning)
        return cls(
            captured.mean,
            captured.precision,
            prior_precision=captured.prior_precision,
            n_data=captured.n_data,
            record={
                **captured.record,
                "fixed": fixed,
                "model_parameters": n_parameters(model),
            },
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
        """The posterior from which training drew its weights: (1 − β₂ᵗ) S + β₂ᵗ S₀.

        Predictions and analyses of a task take this one, because the network was trained to bear
        its draws. Merges and rankings of weights take S. A posterior without a start, or one that
        is as drawn already, is returned as it is.
        """
        earlier = tuple(q.as_drawn for q in self.earlier)
        if self.start is None:
            return self.changed(earlier=earlier) if earlier else self
        drawn = dict(self.form.diagonal())
        total = 0.0
        total_of_start = 0.0
        for name, (weight, start) in self.start.items():
            drawn[name] = drawn[name].lerp(torch.full_like(drawn[name], start), weight)
            total += float(drawn[name].double().sum())
            total_of_start += weight * start * drawn[name].numel()
        share_of_start = total_of_start / total
        caveat = ""
        if share_of_start >= LARGE_SHARE:
            caveat = MOSTLY_START.format(share_of_start)
        entries = {**self._entries, "caveat": caveat}
        return self.changed(form=Diagonal(drawn), start=None, earlier=earlier, _entries=entries)

    @property
    def is_linearised(self) -> bool:
        """Whether predictions linearise the network at the mean (:meth:`predict`).

        They do for curvatures that were fitted or recorded, and for the second moments of torch's
        own optimizers. A training that drew its weights, and a posterior without a source, do not.
        """
        optimizer = str(self.record.get("optimizer") or "")
        return self.source in CURVATURE_AT_MEAN or optimizer.startswith("torch.optim.")

    def predict(
        self, task: Task, draws: int = 10, *, generator: torch.Generator | None = None
    ) -> Predictions:
        """What the posterior predicts for a task's examples, of training or test.

            p(y | x) = ∫ p(y | f_θ(x)) q(θ) dθ  ≈  1/K Σ_k p(y | f_θₖ(x)),   θₖ ~ q

        In a posterior that was fitted or recorded, f is linearised at the mean m, and τ is the
        temperature: f_m(x) + √τ J(x) (θₖ − m). It is the network itself where the training drew
        its weights, as IVON's does (:mod:`blr_analysis.posterior.networks`).

        Args:
            task: the model with the examples to predict; any number of them. The noise or class
                weights that a task of scikit-learn estimates from its examples are those of the
                fit.
            draws: K; 0: the one network at the posterior's mean.
            generator: of the random draws; None: torch's global one.

        Returns:
            :class:`~blr_analysis.posterior.predictive.Predictions`: ``mean`` ``[N, C]``;
            ``variance``, ``entropy`` and ``information`` of every example, token or pixel;
            ``losses``, ``nll``, ``accuracy``, ``calibration_error`` and ``brier``, which are None
            without labels; ``plot()`` draws accuracy against confidence. The loss is −log p,
            without class weights and label smoothing, and with all constants; a loss that is no
            −log p (``MSELoss``) stays itself, and the repr names it.

        Raises:
            InputError: ``draws`` is not a whole number of at least 0.
            PosteriorError: the posterior belongs to another model.
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
        """The task with the likelihood by which this posterior's predictions are judged.

        It is the task itself, unless its likelihood was estimated from its own examples. Then its
        noise, or its class weights, become those of the data that the posterior was fitted to.
        """
        estimated = self._entries.get("estimated", {})
        settings = task.likelihood.settings
        if not task.likelihood.estimated or estimated.keys() != settings.keys():
            return task
        judging_task = task.under(task.model, task.device)
        judging_task.likelihood = task.likelihood.taking(estimated)
        return judging_task

    def changed(self, **parts: Any) -> Posterior:
        """A copy with other parts (``mean``, ``form``, ``record``, ``calibration``, …), which are
        not checked."""
        posterior = copy.copy(self)
        record = parts.pop("record", None)
        if record is not None:
            posterior._read_record(record)
        vars(posterior).update(parts)
        return posterior

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Posterior:
        """The same posterior on another device, and in another floating dtype if one is given.

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

        Compiling or wrapping a model changes the names of its parameters. The posterior then gets
        the task's names.

        Args:
            task: the model and data.
            same_data: whether the task must have as many examples as the posterior was learned
                from.

        Raises:
            PosteriorError: it belongs to another model (names and shapes are listed), or to another
                number of examples.
            ModelError: the model's parameters are in half precision or of several dtypes.
        """
        instance("task", task, Task, "a blr_analysis.Task")
        parameters = dict(task.model.named_parameters())
        buffers = dict(task.model.named_buffers())
        name_in_task = {bare_name(n): n for n in [*parameters, *buffers]}
        new_names = {n: name_in_task.get(bare_name(n), n) for n in [*self.mean, *self.buffers]}
        if any(name != new_name for name, new_name in new_names.items()):
            return self._renamed(new_names).on(task, same_data=same_data)
        fixed = {name_in_task.get(bare_name(n), n) for n in self._entries.get("fixed", ())}
        shapes = self.form.shapes
        learnable = {n for n, p in parameters.items() if p.requires_grad and n not in fixed}
        compared = {n: p for n, p in parameters.items() if n in shapes or n in learnable}
        if mismatch := differences(shapes, compared, ("posterior", "model")):
            remedy = "pass the model that it was captured from or fitted to"
            raise PosteriorError(f"the posterior belongs to another model: {mismatch}; {remedy}")
        if same_data and self.n_data != task.n_data:
            raise self._of_other_data(task)
        return self.to(task.device, task.check_parameters(shapes))

    def _of_other_data(self, task: Task) -> PosteriorError:
        """The error that says that the task has another number of examples."""
        sizes = f"n_data={self.n_data} examples, the task has {task.n_data}"
        remedy = "use the training data"
        if task.likelihood.is_sequence:
            remedy += ", or capture it with n_data= the sequences, tokens= those that count"
        return PosteriorError(f"the posterior was learned from {sizes}; {remedy}")

    def _renamed(self, names: Mapping[str, str]) -> Posterior:
        """The same posterior with other names for parameters and buffers, by the old ones."""
        tensors, record = renamed(*self._encoded(), names)
        mean = {names[n]: m for n, m in narrow(self.mean).items()}
        earlier = tuple(q._renamed(names) for q in self.earlier)
        posterior = self._of_parts(decode_posterior(tensors, record, ""))
        return posterior.changed(mean=type(self.mean)(mean), earlier=earlier)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to ``path``: one file if it ends in .safetensors, else a folder of shards.

        Raises:
            StorageError: the file cannot be written; an older file stays as it was.

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
        tensors, record = self._encoded()
        earlier_records = []
        for number, q in enumerate(self.earlier):
            earlier_tensors, earlier_record = q._encoded()
            tensors |= {f"{EARLIER}{number}/{n}": t for n, t in earlier_tensors.items()}
            earlier_records.append(earlier_record)
        if earlier_records:
            record["earlier"] = earlier_records
        storage.write(place, {n: t.cpu() for n, t in tensors.items()}, record)

    def _encoded(self) -> tuple[Tree, dict[str, Any]]:
        """The tensors and the record of this posterior, without the earlier ones."""
        parts = Parts(
            mean=self.mean,
            form=self.form,
            prior=self.prior,
            n_data=self.n_data,
            record=self.record,
            buffers=self.buffers,
        )
        return encode_posterior(parts)

    @classmethod
    @torch.inference_mode(False)  # also where the caller switched it on
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model: Model | None = None,
        prior_precision: Given | None = None,
    ) -> Posterior:
        """Read what :meth:`save` wrote, or a precision folder that lies beside a model.

        Args:
            model: has the mean, where the file has none: a module, a state dict, or a folder or
                file of safetensors (refused if its sha256 is not the recorded one).
            prior_precision: δ, to be added where the file holds the data's part alone.

        Raises:
            StorageError: there is no file; it is truncated, of another format, or a pickle.
            PosteriorError: neither the file nor ``model`` has a mean; the model has other names or
                shapes; the file has a prior already; or the precision is 0 somewhere without one.
        """
        place = os.fspath(path_of(path))
        tensors, record = storage.read(place)
        earlier = []
        for number, earlier_record in enumerate(record.pop("earlier", ())):
            prefix = f"{EARLIER}{number}/"
            names = [n for n in tensors if n.startswith(prefix)]
            earlier_tensors = {n.removeprefix(prefix): tensors.pop(n) for n in names}
            parts = decode_posterior(earlier_tensors, earlier_record, place)
            earlier.append(cls._of_parts(parts))
        last = cls._of_parts(decode_posterior(tensors, record, place, model, prior_precision))
        return last.changed(earlier=tuple(earlier))

    @classmethod
    def _of_parts(cls, parts: Parts) -> Posterior:
        return cls(
            widened(parts.mean),
            parts.form,
            prior_precision=parts.prior,
            n_data=parts.n_data,
            record=parts.record,
            buffers=parts.buffers,
        )


def _structure_of(precision: Mapping[str, Tensor] | Structure) -> Structure:
    """The structure itself; a diagonal where tensors are given by name."""
    if isinstance(precision, Structure):
        return precision
    return Diagonal(real_tensors("precision", precision))


def _check_mean(mean: Tree, shapes: Shapes, form: Structure) -> None:
    """Raise :class:`PosteriorError` unless the mean is finite, and shaped as the precision is."""
    if not shapes:
        raise PosteriorError("a posterior needs at least one parameter, got none")
    if mismatch := differences(shapes, form.shapes, ("mean", "precision")):
        raise PosteriorError(f"mean and precision disagree: {mismatch}")
    for name, m in mean.items():
        if not bool(torch.isfinite(m).all()):
            raise PosteriorError(f"the mean of {name!r} holds NaN or inf; was training stable?")


def _entry(tree: Tree, name: str) -> Tensor:
    """The tensor of this parameter, or :class:`InputError`."""
    if not isinstance(name, str) or name not in tree:
        names = sorted(tree)[:NAMES_LISTED]
        raise InputError(f"the posterior has no parameter {name!r}; it covers {names}")
    return tree[name]


def _normal(m: Tensor, batch: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers ``[*batch, *m.shape]``, drawn on the generator's device and moved to
    the parameter's."""
    device = m.device if generator is None else generator.device
    noise = torch.empty((*batch, *m.shape), dtype=m.dtype, device=device)
    return noise.normal_(generator=generator).to(m.device)


def _are_the_same(moved: Tree, tensors: Tree) -> bool:
    """Whether moving left every tensor in its place."""
    before = narrow(tensors)
    after = narrow(moved)
    same_class = type(moved) is type(tensors)
    return same_class and all(tensor is before[name] for name, tensor in after.items())


def made_of(q: Posterior, mean: Tree, form: Structure, n_data: int, kind: str) -> Posterior:
    """A posterior that was derived from ``q``, under the same prior.

    It has the facts of ``q`` that do not depend on its data or its weights. Measurements, such as
    the calibration, are left out.

    Args:
        kind: of its precision, as its record names it.
    """
    lasting = Facts(source=q.source, is_classifier=q.is_classifier, rerun=q.rerun, start=q.start)
    return Posterior(
        mean,
        form,
        prior_precision=q.prior,
        n_data=n_data,
        record={**without_facts(q.record), **recorded(lasting), "kind": kind},
        buffers=q.buffers,
    )


@torch.inference_mode(False)  # also where the caller switched it on
def predict(
    task: Task,
    posteriors: Sequence[Posterior],
    draws: int = 10,
    *,
    generator: torch.Generator | None = None,
) -> Predictions:
    """What a mixture of posteriors predicts, each with the same weight.

    See :meth:`Posterior.predict`. With ``draws=0``, one network at each mean, it is a deep
    ensemble.

    Args:
        task: the model with the examples to predict.
        posteriors: of the mixture.
        draws: networks of each posterior; 0: the one at its mean.
        generator: of the random draws; None: torch's global one.

    Raises:
        InputError: there is no posterior, or ``draws`` is not a whole number of at least 0.
        PosteriorError, ModelError, DataError: as :meth:`Posterior.predict`.
    """
    if not posteriors:
        raise InputError("predict needs at least one posterior")
    on_task = [q.on(task, same_data=False) for q in posteriors]
    n_draws = 0 if whole(draws) == 0 else positive_int("draws", draws)
    n_networks = max(n_draws, 1) * len(posteriors)
    is_one_mean = n_draws == 0 and len(posteriors) == 1
    notes = [other_units(q.input_ranges or remembered(q), task) for q in posteriors]
    return averaged(
        on_task[0].judging(task),
        _networks(on_task, n_draws, generator),
        draws=0 if is_one_mean else n_networks,
        note=next(filter(None, notes), ""),
    )


def _networks(
    posteriors: Sequence[Posterior], n_draws: int, generator: torch.Generator | None
) -> Iterator[Network]:
    """The networks, one after another: the draws of each posterior, or the one at its mean."""
    for q in posteriors:
        at_mean = NetworkAtMean({**q.mean, **q.buffers})
        if n_draws == 0:
            yield at_mean
        for _ in range(n_draws):
            draw = q.as_drawn.sample(generator=generator)
            if q.is_linearised:
                yield linearised(at_mean, q.mean, draw, q.temperature)
            else:
                yield NetworkAt({**draw, **q.buffers})

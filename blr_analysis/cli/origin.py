"""Where the model and the data of an index are: ``index`` records it, ``query`` reads it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr_analysis.cli.inputs import Source, TextColumns, load_tasks
from blr_analysis.cli.options import LoadingOptions
from blr_analysis.cli.query_options import Places
from blr_analysis.errors import InputError

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.sensitivity import Index
    from blr_analysis.task import Task

SOURCE = "source.json"  # the record of model and data, in the folder of an index
NUMBERS_PER_TENSOR = 8  # by which a model's weights are recognised


def origin_of(source: Source, task: Task, built: Index) -> dict[str, Any]:
    """Where model and data are, and how the texts were read: what ``query`` needs to know."""
    from blr_analysis.huggingface.data import absolute_address
    from blr_analysis.huggingface.questions import ids_known_by

    has_model = source.data is not None
    origin: dict[str, Any] = {
        "data": absolute_address(source.data or source.task),
        "base": None if source.base is None else absolute_address(source.base),
        "model": absolute_address(source.task) if has_model else None,
        "columns": asdict(source.columns),
        "loading": asdict(source.loading),
    }
    if has_model:
        origin["mark"] = getattr(task.dataset, "mark", None)  # pairs of answers have none
        origin["tokenizer"] = ids_known_by(task.dataset.tokenizer, built.examples["text"])
        origin["frozen"] = fingerprint_of_frozen(task.model)
        origin["weights"] = sample_of_weights(task.model)
    return origin


def read_origin(index: Path, places: Places) -> dict[str, Any]:
    """The record of an index; an option replaces the place that was recorded."""
    from blr_analysis.files.headers import read_record

    record = index / SOURCE
    origin: dict[str, Any] = {}
    if record.is_file():
        origin = read_record(record)
    moved = {"model": places.model, "data": places.data, "base": places.base}
    origin |= {name: str(path) for name, path in moved.items() if path is not None}
    return origin


@dataclass
class ScriptTasks:
    """The training task of an index and the task of the questions, from a user's scripts.

    Attributes:
        opened: the index.
        origin: the record of its model and data.
    """

    opened: Index
    origin: dict[str, Any]
    _training: Task | None = field(default=None, init=False)

    def questions(self, address: str) -> Task:
        """The questions, as a task of the training task's model.

        Raises:
            InputError: the training task is not known.
        """
        if ".py:" not in self.origin.get("data", ""):
            raise InputError("name the training task with --data SCRIPT.py:TASK")
        self._training, _ = load_tasks(self.origin["data"])
        questions, _ = load_tasks(address)
        self.opened.posterior.on(questions, same_data=False)
        return questions.with_model(self._training)

    def training(self) -> Task:
        """The training task; it was loaded with the questions."""
        assert self._training is not None
        return self._training


@dataclass
class IndexedModel:
    """The language model of an index, and the texts that it reads.

    Attributes:
        opened: the index.
        origin: the record of its model and data.
        columns: how the questions are read.
        device: where the model is put.
        say: prints what is cut, and what is not checked.
        loaded: the model with its tokenizer, once questions were read.
    """

    opened: Index
    origin: dict[str, Any]
    columns: TextColumns
    device: str | None
    say: Callable[[str], None]
    loaded: Any = None

    def questions(self, address: str) -> Task:
        """The questions, as a task of the model that the index was built of.

        Raises:
            InputError: no model is named, or it is another one.
        """
        if not self.origin.get("model"):
            raise InputError(
                f"{str(self.opened.path)!r} does not say where its language model is: name it "
                "with --model; or ask SCRIPT.py:TASK"
            )
        loading = LoadingOptions(**self.origin.get("loading", {}))
        base = self.origin.get("base")
        self.loaded = loading.language_model(self.origin["model"], base, self.device)
        self._check_tokenizer()
        self._check_base()
        questions = self.columns.task_of(self.loaded, address, self.say)
        self._check_weights(questions)
        return questions

    def training(self) -> Task:
        """The training texts, read as they were for the index.

        Raises:
            InputError: their place is not known.
        """
        if not self.origin.get("data"):
            raise InputError("name the training data with --data")
        recorded = self.origin.get("columns")
        columns = self.columns if recorded is None else TextColumns(**recorded)
        mark = self.origin.get("mark")
        return columns.task_of(self.loaded, self.origin["data"], self.say, mark)

    def _check_weights(self, questions: Task) -> None:
        """Raise where the model has been trained since the index was built.

        The posterior's mean is no measure of that: it may be a checkpoint of the training.
        """
        from blr_analysis.posterior.recognition import check_weights

        recorded = self.origin.get("weights")
        if recorded is None:  # an index of an earlier version
            check_weights(questions, self.opened.posterior)
        elif not are_same_weights(sample_of_weights(self.loaded.model), recorded):
            raise InputError(
                f"the weights of {self.origin['model']!r} are not those that the index was built "
                "with: name the model with --model, or build the index anew"
            )

    def _check_tokenizer(self) -> None:
        """Raise where the tokenizer makes other ids of the indexed texts than it made then."""
        from blr_analysis.huggingface.questions import ids_known_by

        recorded = self.origin.get("tokenizer")
        if recorded is None:  # an index that was built in Python
            self.say(
                "the index does not record its tokenizer and base: those of the model are trusted"
            )
            return
        texts = self.opened.examples["text"]
        if ids_known_by(self.loaded.tokenizer, texts, recorded["tokens"]) != recorded:
            raise InputError(
                f"the tokenizer of {self.origin['model']!r} is not the one of the index: it "
                "makes other ids of the same texts; restore the tokenizer of the training, or "
                "name its folder (--model)"
            )

    def _check_base(self) -> None:
        """Raise where the weights that are not trained are not those of the index."""
        recorded = self.origin.get("frozen")
        has_frozen_weights = bool(recorded)
        if has_frozen_weights and fingerprint_of_frozen(self.loaded.model) != recorded:
            place = self.origin.get("base") or self.origin["model"]
            raise InputError(
                f"{place!r} is not the base that the index was built on: name it (--base)"
            )


def fingerprint_of_frozen(model: Any) -> str:
    """A fingerprint of the weights that are not trained, such as an adapter's base.

    It is "" where all weights are trained.
    """
    from blr_analysis.files import Loaded, fingerprint
    from blr_analysis.files.storage import SAMPLE

    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    if not frozen:
        return ""
    return fingerprint(Loaded("the base", frozen), limit=SAMPLE, progress=False)


def sample_of_weights(model: Any) -> dict[str, list[float]]:
    """A few numbers of every trained tensor, spread over it."""
    sample = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            flat = parameter.detach().flatten()
            stride = max(1, len(flat) // NUMBERS_PER_TENSOR)
            sample[name] = flat[::stride][:NUMBERS_PER_TENSOR].tolist()
    return sample


def are_same_weights(sample: dict[str, list[float]], recorded: dict[str, list[float]]) -> bool:
    """Whether two samples differ by no more than rounding in half precision."""
    from blr_analysis.posterior.recognition import ROUNDED, SMALLEST

    def are_close(numbers: list[float], numbers_before: list[float]) -> bool:
        return len(numbers) == len(numbers_before) and all(
            abs(number - before) <= ROUNDED * abs(before) + SMALLEST
            for number, before in zip(numbers, numbers_before, strict=True)
        )

    same_names = sample.keys() == recorded.keys()
    return same_names and all(are_close(sample[name], recorded[name]) for name in sample)

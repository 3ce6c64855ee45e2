"""``blr-analysis index`` and ``query``: an index of a model's training data, and questions to it.

What only these commands need is imported inside of them, so that the others start faster.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.cli.inputs import Source, TextColumns, load_tasks
from blr_analysis.cli.options import (
    Base,
    Length,
    LoadingOptions,
    Out,
    Shared,
    Text,
    show_forecast,
)
from blr_analysis.errors import InputError
from blr_analysis.terminal import Teller, grid, pairs, section, show

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    import pandas as pd

    from blr_analysis.posterior import Forecast
    from blr_analysis.sensitivity import Index
    from blr_analysis.sensitivity.influence.results import ProjectionError
    from blr_analysis.task import Task

SOURCE = "source.json"  # in the folder of an index: where its model and data were
SAMPLED = 8  # numbers of each tensor by which a model's weights are recognised
EXCERPT = 60  # characters of a text that are printed
BEHAVIOUR = "How far the loss of an unwanted output would rise without each, on average."
ROUGH = 0.3  # relative error of the influence from which on other sources come first


def index(
    *,
    source: Source,
    rank: Annotated[
        int,
        typer.Option(
            help="Room per example, in numbers of one byte. Models with no more parameters are "
            "kept whole."
        ),
    ] = 32768,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="INDEX", help="A folder to write.")],
    profile: Annotated[
        bool, typer.Option("--profile", help="Print how long each pass over the data took.")
    ] = False,
    shared: Shared,
) -> None:
    """An index of what a model was trained on, to be asked later without another pass.

      blr-analysis index train.py:make_task --out INDEX

    A language model is named by its folder and its texts (a text per row, a prompt and an answer,
    or messages):

      blr-analysis index ./llm train.jsonl --out INDEX --dry-run

    The index keeps a projection of every example's gradient. How far its influence is from the
    exact one is measured on some pairs, and a rough one is said before all examples are visited.
    The posterior of texts is fitted to a sample of at most 256. A run that was killed goes on where
    it was, in the fit (whose work lies in INDEX.unfinished meanwhile) as in the index; --force
    begins anew.
    """
    from blr_analysis import ranks
    from blr_analysis.files import drafted, held
    from blr_analysis.files.headers import record_text
    from blr_analysis.progress import profiled
    from blr_analysis.sensitivity import Index
    from blr_analysis.sensitivity.index.build import check_place
    from blr_analysis.sensitivity.index.stored import PLAN

    if source.structure in ("lowrank", "full"):
        raise InputError(f"an index takes --fit diag or kron, not {source.structure}")
    out = out.expanduser()
    unfinished = out.with_name(f"{out.name}.unfinished")
    say = Teller()
    writes = ranks.first() and not shared.dry_run
    with held(out) if writes else nullcontext():
        task, _ = source.tasks(shared, say)
        if writes and shared.force:
            shutil.rmtree(unfinished, ignore_errors=True)
            if (out / PLAN).is_file():
                shutil.rmtree(out)
        check_place(out, task, rank, at_model=source.posterior is None)
        if shared.dry_run:
            show_forecast(index_forecast(source, task, rank))
            return
        started = time.perf_counter()
        with profiled() as seconds:
            posterior = source.posterior_of(task, say, unfinished, sampled=True)
            say("indexing")
            built = Index.build(task, posterior, out, rank=rank, heard=partial(say_if_rough, say))
        total = time.perf_counter() - started
        if not ranks.first():
            return
        with drafted(out / SOURCE) as draft:
            draft.write_text(record_text(origin_of(source, task, built)), encoding="utf-8")
        shutil.rmtree(unfinished, ignore_errors=True)
    show_index(built, out, is_of_a_model=source.data is not None)
    if profile:
        show_profile(seconds, total)


def show_profile(seconds: dict[str, float], total: float) -> None:
    """Print the seconds of the passes over the data by their names, and of the rest."""
    rest = total - sum(seconds.values())
    pairs({name: f"{share:.1f} s" for name, share in {**seconds, "the rest": rest}.items()})


def index_forecast(source: Source, task: Task, rank: int) -> Forecast:
    """What an index costs, with the fit of its posterior where none was saved."""
    from blr_analysis.sensitivity.index.build import build_cost

    examples = source.examples(task, sampled=True)
    saved = 0 if source.posterior is None else source.posterior.stat().st_size
    return build_cost(task, examples, rank, structure=source.structure, saved=saved)


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
        origin["tokenizer"] = ids_known_by(task.dataset.tokenizer, built.examples["text"])
        origin["frozen"] = fingerprint_of_frozen(task.model)
        origin["weights"] = sample_of_weights(task.model)
    return origin


def show_index(built: Index, out: Path, *, is_of_a_model: bool) -> None:
    """Print what was written, how far it errs, and the next command."""
    error = built.error
    questions = "QUESTIONS.jsonl" if is_of_a_model else "SCRIPT.py:TASK"
    pairs(
        {
            "sequences" if is_of_a_model else "examples": f"{built.n_data:,}",
            "kept": f"{built.numbers:,} numbers of each",
            "error": f"{error.relative_rms:.3f} of the influence, rank correlation "
            f"{error.spearman:.3f}",
            "written": out,
            "next": f"blr-analysis query {out} {questions}",
        }
    )


def query(
    *,
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="What index wrote.")],
    questions: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT.py:TASK|QUESTIONS",
            help="A function of your script that returns a Task; or, of a language model, rows "
            "with a prompt and an answer, messages, or texts: .jsonl, .csv, ...",
            show_default=False,
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(metavar="K", min=1, help="How many sources of each are shown.")
    ] = 5,
    refine: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Compute the influence of so many anew, exactly, and choose among them: one "
            "gradient of each.",
        ),
    ] = 0,
    normalize: Annotated[
        bool | None,
        typer.Option(
            help="By the length of each source, or in nats. If left out: nats of texts, of other "
            "data by length, where long or odd examples lead every list."
        ),
    ] = None,
    bad: Annotated[
        str | None,
        typer.Option(
            metavar="OUTPUTS", help="In place of QUESTIONS: outputs of one unwanted behaviour."
        ),
    ] = None,
    good: Annotated[
        str | None,
        typer.Option(metavar="OUTPUTS", help="Wanted outputs, whose mean is subtracted."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --bad: the training rows without those shown, as .jsonl."
        ),
    ] = None,
    hybrid: Annotated[
        bool,
        typer.Option("--hybrid", help="Add the ranks of BM25, which knows words ."),
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Write the share of every token, too (needs --out).")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Where the model is now, if it was moved."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="Where the training data (or their SCRIPT.py:TASK) are now."
        ),
    ] = None,
    base: Base = None,
    text: Text = None,
    max_length: Length = None,
    out: Out = None,
    shared: Shared,
) -> None:
    """Which training examples a model's answers rest on.

      blr-analysis query INDEX train.py:make_test --top 20

    Of a language model, rows of questions (a prompt and an answer, or a text):

      blr-analysis query INDEX questions.jsonl --out DIR --refine 50

    It shows the examples without which the loss of a question would rise most. With --out it
    writes the table sources, with their metadata. --refine computes the best ones exactly, and
    --tokens says what each token contributes; both read the training data again.

    Which texts taught a language model a behaviour, and the data without them:

      blr-analysis query INDEX --bad outputs.jsonl --top 20 --write less.jsonl
    """
    from blr_analysis.audit import in_text
    from blr_analysis.audit.sections import sources
    from blr_analysis.cli.behaviour import hybrid_table
    from blr_analysis.sensitivity import Index
    from blr_analysis.sensitivity.influence.results import quantity_of
    from blr_analysis.tables import write_table

    say = Teller()
    if tokens and out is None:
        raise InputError("--tokens writes a table: say where with --out DIR")
    if (questions is None) == (bad is None):
        raise InputError("name QUESTIONS, or outputs of one behaviour with --bad")
    if bad is None and (good is not None or write is not None):
        raise InputError("--good and --write belong to --bad")
    if bad is not None and (refine or tokens or hybrid):
        raise InputError("--refine, --tokens and --hybrid belong to QUESTIONS")
    if hybrid and (refine or tokens):
        raise InputError("--hybrid ranks by two lists: leave --refine and --tokens out")
    if bad is not None:
        write = shared.free(write)
        origin = read_origin(index, model=model, data=data, base=base)
        columns = TextColumns(text, max_length)
        speaker = Speaker(Index.open(index), origin, columns, shared.device, say)
        with shared.folder(out) as folder:
            show_behaviour(
                index,
                speaker,
                bad,
                good,
                top,
                shared,
                folder,
                normalize=bool(normalize),
                write=write,
            )
        return
    assert questions is not None
    asks_a_script = ".py:" in questions
    of_a_model = (model, base, text, max_length)
    if asks_a_script and (tokens or hybrid or any(value is not None for value in of_a_model)):
        raise InputError(
            "--tokens, --hybrid, --model, --base, --text and --max-length belong to a language "
            "model"
        )
    with shared.folder(out) as folder:
        opened = Index.open(index)
        origin = read_origin(index, model=model, data=data, base=base)
        if asks_a_script:
            trained, asked = tasks_of_scripts(opened, origin, questions)
        else:
            columns = TextColumns(text, max_length)
            speaker = Speaker(opened, origin, columns, shared.device, say)
            asked = speaker.questions(index, questions)
            trained = speaker.training_texts() if refine or tokens or hybrid else None
        asked = shared.of(asked)
        if shared.dry_run:
            pairs({"questions": f"{asked.n_data:,}", "writes": out or "nothing"})
            return
        opened = Index.open(index, task=trained)
        if not refine:
            say_if_rough(say, opened.error)
        if normalize is None:
            normalize = not asked.likelihood.is_sequence
        if hybrid and trained is not None:
            table = hybrid_table(opened, trained, asked, top=top, normalize=normalize)
            if out is not None:
                write_table(table, folder, "sources")
            show(in_text(sources(table, "influence", asked.metadata["text"]), max_rows=len(table)))
            return
        matches = matches_of(opened, trained, asked, top=top, refine=refine, normalize=normalize)
        table = table_of_sources(matches)
        if out is not None:
            write_table(table, folder, "sources")
        if tokens and trained is not None:
            shares = table_of_tokens(trained, opened, asked, matches.helpful)
            write_table(shares, folder, "tokens")
    words = asked.metadata.get("text") if asked.likelihood.is_sequence else None
    show(in_text(sources(table, quantity_of(normalize), words), max_rows=len(table)))


def show_behaviour(
    index: Path,
    speaker: Speaker,
    bad: str,
    good: str | None,
    top: int,
    shared: Shared,
    folder: Path,
    *,
    normalize: bool,
    write: Path | None,
) -> None:
    """Print the texts that a behaviour rests on most, and write the data without them."""
    from blr_analysis.cli.behaviour import behaviour_scores, table_of_behaviour, write_without
    from blr_analysis.sensitivity.influence.results import quantity_of
    from blr_analysis.tables import write_table

    unwanted = shared.of(speaker.questions(index, bad))
    wanted = None
    if good is not None:
        wanted = shared.of(speaker.columns.task_of(speaker.loaded, good, speaker.say))
    if shared.dry_run:
        pairs({"outputs": f"{unwanted.n_data:,}", "writes": write or "nothing"})
        return
    opened = speaker.opened
    say_if_rough(speaker.say, opened.error)
    scores = behaviour_scores(opened, unwanted, wanted, normalize=normalize)
    quantity = quantity_of(normalize)
    table = table_of_behaviour(opened, scores, min(top, opened.n_data), quantity)
    if folder != Path():
        write_table(table, folder, "sources")
    columns = {
        "index": table["example"].astype(str).tolist(),
        "text": [str(text)[:EXCERPT] for text in table["text"]],
        quantity.replace("_", " "): [f"{value:.3g}" for value in table[quantity]],
    }
    show(section("Sources of the behaviour", BEHAVIOUR, grid(columns)))
    if write is not None:
        online = bool(speaker.origin.get("loading", {}).get("online"))
        n_left = write_without(
            speaker.origin["data"], table["example"].tolist(), write, online=online
        )
        pairs({"written": f"{write}, {n_left:,} rows without these {len(table):,}"})


def read_origin(
    index: Path, *, model: Path | None, data: str | None, base: Path | None
) -> dict[str, Any]:
    """Where the model and the data of an index were, or are now, where that is given."""
    from blr_analysis.files.headers import read_record

    place = index / SOURCE
    origin = read_record(place) if place.is_file() else {}
    moved = {"model": model, "data": data, "base": base}
    origin |= {name: str(path) for name, path in moved.items() if path is not None}
    return origin


def matches_of(
    opened: Index,
    trained: Task | None,
    asked: Task,
    *,
    top: int,
    refine: int,
    normalize: bool,
) -> Any:
    """The sources of every question; with their labels where the training task is there."""
    from blr_analysis.sensitivity import TopInfluence
    from blr_analysis.sensitivity.influence.results import Pairs, quantity_of
    from blr_analysis.sensitivity.subjects import subject_of

    count = min(top, opened.n_data)
    candidates = min(max(refine, count), opened.n_data) if refine else 0
    matches = opened.top(asked, count, refine=candidates, normalize=normalize, harmful=False)
    if trained is None or asked.likelihood.is_sequence:
        return matches
    subject = subject_of(trained, opened.posterior)
    labelled_pairs = Pairs(subject, asked, quantity=quantity_of(normalize))
    return TopInfluence(**vars(matches), pairs=labelled_pairs)


def table_of_sources(matches: Any) -> pd.DataFrame:
    """A row for each question and helpful training example."""
    table = matches.table.query("effect == 'helpful'").drop(columns="effect")
    return table.rename(columns={"test": "question", "train": "example"})


def tasks_of_scripts(opened: Index, origin: dict[str, Any], questions: str) -> tuple[Task, Task]:
    """The training task and that of the questions, from a user's scripts."""
    if ".py:" not in origin.get("data", ""):
        raise InputError("name the training task with --data SCRIPT.py:TASK")
    trained, _ = load_tasks(origin["data"])
    asked, _ = load_tasks(questions)
    opened.posterior.on(asked, same_data=False)
    return trained, asked.with_model(trained)


@dataclass
class Speaker:
    """The language model of an index, and the texts that it reads.

    Attributes:
        opened: the index.
        origin: where model and data are.
        columns: how the questions are read.
        device: where the model is put.
        say: hears what is cut.
    """

    opened: Index
    origin: dict[str, Any]
    columns: TextColumns
    device: str | None
    say: Callable[[str], None]
    loaded: Any = None

    def questions(self, index: Path, questions: str) -> Task:
        """The questions, as a task of the model that the index was built of.

        Raises:
            InputError: no model is named, or it is another one.
        """
        if not self.origin.get("model"):
            raise InputError(
                f"{str(index)!r} does not say where its language model is: name it with --model; "
                "or ask SCRIPT.py:TASK"
            )
        loading = LoadingOptions(**self.origin.get("loading", {}))
        base = self.origin.get("base")
        self.loaded = loading.language_model(self.origin["model"], base, self.device)
        self._check_tokenizer()
        self._check_base()
        asked = self.columns.task_of(self.loaded, questions, self.say)
        self._check_weights(asked)
        return asked

    def training_texts(self) -> Task:
        """The texts of the training, read as they were for the index.

        Raises:
            InputError: nobody says where they are.
        """
        if not self.origin.get("data"):
            raise InputError("name the training data with --data")
        recorded = self.origin.get("columns")
        columns = self.columns if recorded is None else TextColumns(**recorded)
        return columns.task_of(self.loaded, self.origin["data"], self.say)

    def _check_weights(self, asked: Task) -> None:
        """Raise where the model has been trained since; its weights need not be the posterior's,
        which may stand at a checkpoint of the training."""
        from blr_analysis.posterior.recognition import check_weights

        recorded = self.origin.get("weights")
        if recorded is None:  # an index of an earlier version
            check_weights(asked, self.opened.posterior)
        elif not are_same_weights(sample_of_weights(self.loaded.model), recorded):
            raise InputError(
                f"the weights of {self.origin['model']!r} are not those that the index was built "
                "with: name the model with --model, or build the index anew"
            )

    def _check_tokenizer(self) -> None:
        from blr_analysis.huggingface.questions import ids_known_by

        recorded = self.origin.get("tokenizer")
        if recorded is None:  # an index that was built in Python
            self.say("the index names no tokenizer and base: those of the model are trusted")
            return
        texts = self.opened.examples["text"]
        if ids_known_by(self.loaded.tokenizer, texts, recorded["tokens"]) != recorded:
            raise InputError(
                f"the tokenizer of {self.origin['model']!r} is not the index's: it makes other ids "
                "of the same texts; put the one of the training there, or name its folder (--model)"
            )

    def _check_base(self) -> None:
        recorded = self.origin.get("frozen")
        if recorded and fingerprint_of_frozen(self.loaded.model) != recorded:
            place = self.origin.get("base") or self.origin["model"]
            raise InputError(
                f"{place!r} is not the base that the index was built on: name it (--base)"
            )


def table_of_tokens(trained: Task, opened: Index, asked: Task, helpful: Any) -> pd.DataFrame:
    """How many nats each token of these texts contributes to their influence."""
    import pandas as pd

    from blr_analysis.sensitivity.token_scores import token_influence

    shares = token_influence(trained, opened.posterior, asked, helpful)
    names = trained.dataset.tokenizer.convert_ids_to_tokens(shares["target"].tolist())
    return pd.DataFrame(shares | {"token": names})


def fingerprint_of_frozen(model: Any) -> str:
    """A fingerprint of the weights that are not trained, such as an adapter's base; "" where all
    are trained."""
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
            stride = max(1, len(flat) // SAMPLED)
            sample[name] = flat[::stride][:SAMPLED].tolist()
    return sample


def are_same_weights(sample: dict[str, list[float]], recorded: dict[str, list[float]]) -> bool:
    """Whether two samples differ by no more than rounding in half precision."""
    from blr_analysis.posterior.recognition import ROUNDED, SMALLEST

    if sample.keys() != recorded.keys():
        return False
    return all(
        len(numbers) == len(recorded[name])
        and all(
            abs(number - before) <= ROUNDED * abs(before) + SMALLEST
            for number, before in zip(numbers, recorded[name], strict=True)
        )
        for name, numbers in sample.items()
    )


def say_if_rough(say: Callable[[str], None], error: ProjectionError) -> None:
    """Say where an index errs by much, and what helps."""
    if error.relative_rms > ROUGH:
        say(f"note: rough, {error.relative_rms:.2f} off: a larger --rank, or query --refine N")

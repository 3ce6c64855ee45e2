"""``blr-analysis index`` and ``query``: an index of a model's training data, and questions to it.
What only these commands need is imported inside of them."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.cli.inputs import Source, load_tasks, texts_of
from blr_analysis.cli.options import Base, Length, Out, Shared, Text, show_forecast, takes
from blr_analysis.errors import InputError
from blr_analysis.terminal import Teller, pairs, show

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.sensitivity import Index
    from blr_analysis.task import Task

SOURCE = "source.json"  # where model and data were
ROUGH = 0.3  # of the influence: an index that errs by more puts other sources first


@takes("sensitivity/influence/index.py", "build", "rank")
def index(
    source: Source,
    shared: Shared,
    rank: int,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="INDEX", help="A folder to write.")],
) -> None:
    """An index of what a model was trained on: asked later without another pass.

    Of your own task; FILE is what posterior.save(FILE) wrote after training:

      blr-analysis index train.py:make_task -p FILE --out INDEX
      blr-analysis index train.py:make_task --fit kron --out INDEX

    Or of a causal language model. MODEL is a folder as save_pretrained leaves it, or a LoRA adapter
    on its base; DATA has a text per row, a prompt and an answer, or messages; of the last two the
    answers alone count:

      blr-analysis index ./llm train.jsonl --out INDEX
      blr-analysis index ./adapter chats.parquet --out INDEX --max-length 512
      blr-analysis index ./llm train.jsonl --out INDEX -p POSTERIOR

    Without -p a Kronecker posterior is fitted; a diagonal one (--fit diag) takes less time and
    memory, and is weak for influence.

    Kept of every example: the longest parts of its gradient and signs of random sums of the rest.
    How far their influence is from the exact one is measured and said. A run that was killed goes
    on where it was; --force begins anew.
    """
    from blr_analysis import ranks
    from blr_analysis.files import drafted, held
    from blr_analysis.files.headers import record_text
    from blr_analysis.huggingface.questions import ids_known_by
    from blr_analysis.sensitivity import Index
    from blr_analysis.sensitivity.influence.index import PLAN, build_cost, check_place

    if source.structure in ("lowrank", "full"):
        raise InputError(f"an index takes --fit diag or kron, not {source.structure}")
    out, say = out.expanduser(), Teller()
    with held(out) if ranks.first() and not shared.dry_run else nullcontext():
        task, _ = source.tasks(shared, say)
        if shared.force and (out / PLAN).is_file() and ranks.first() and not shared.dry_run:
            shutil.rmtree(out)
        check_place(out, task, rank, at_model=source.posterior is None)
        if shared.dry_run:
            saved = source.posterior.stat().st_size if source.posterior else 0
            kind: dict[str, Any] = {"structure": source.structure, "saved": saved}
            show_forecast(build_cost(task, source.examples(task), rank, **kind))
            return
        q = source.posterior_of(task, say)
        say("indexing")
        built = Index.build(task, q, out, rank=rank)
        if not ranks.first():
            return
        places = {"data": source.data or Path(source.task), "base": source.base}
        places["model"] = source.data and Path(source.task)
        about: dict[str, Any] = {n: p and str(p.expanduser().absolute()) for n, p in places.items()}
        about |= {"text": source.text, "max_length": source.max_length}
        if source.data is not None:
            about["tokenizer"] = ids_known_by(task.dataset.tokenizer, built.examples["text"])
            about["frozen"] = _frozen(task.model)
        with drafted(out / SOURCE) as draft:
            draft.write_text(record_text(about), encoding="utf-8")
    _say_rough(say, built)
    of_script, of_texts = ("examples", "SCRIPT.py:TASK"), ("sequences", "QUESTIONS.jsonl")
    what, asked = of_script if source.data is None else of_texts
    error = built.error
    pairs(
        {
            what: f"{built.n_data:,}",
            "kept": f"{built.numbers:,} {'signs' if built.signs else 'numbers'} of each",
            "error": f"{error.relative_rms:.3f} of the influence, rank correlation "
            f"{error.spearman:.3f}",
            "written": out,
            "next": f"blr-analysis query {out} {asked}",
        }
    )


@takes("sensitivity/influence/index.py", "top", "refine")
def query(
    shared: Shared,
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="What index wrote.")],
    questions: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT.py:TASK|QUESTIONS",
            help="A function of your script that returns a Task; or, of a language model, rows "
            "with a prompt and an answer, messages, or texts: .jsonl, .csv, ...",
        ),
    ],
    refine: int,
    top: Annotated[int, typer.Option(metavar="K", min=1, help="Sources shown of each.")] = 5,
    normalize: Annotated[
        bool,
        typer.Option(
            help="By the length of each source: what an answer came from, where long or odd texts "
            "otherwise lead every list. Without: nats."
        ),
    ] = True,
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
) -> None:
    """Which training examples a model's answers rest on.

    Of a script's task, whose index knows where the training task is:

      blr-analysis query INDEX train.py:make_test --top 20
      blr-analysis query INDEX train.py:make_test --out DIR --refine 50

    Of a language model:

      blr-analysis query INDEX questions.jsonl --top 20
      blr-analysis query INDEX questions.jsonl --out DIR --tokens

    A row of QUESTIONS has a prompt and an answer, or a text. Shown are the examples without which
    the loss of the question would rise most, to first order: for their length (--normalize), or by
    how many nats (--no-normalize). With --out, the table sources names their metadata too. --tokens
    writes how many nats each token of these texts makes up; it and --refine read the training data
    again, where the index was told they are.
    """
    from blr_analysis.audit import in_text
    from blr_analysis.audit.sections import sources
    from blr_analysis.files.headers import read_record
    from blr_analysis.sensitivity import Index, TopInfluence
    from blr_analysis.sensitivity.influence.results import Pairs, quantity_of
    from blr_analysis.sensitivity.subjects import subject_of
    from blr_analysis.tables import write_table

    say = Teller()
    if tokens and out is None:
        raise InputError("--tokens writes a table: say where with --out DIR")
    given = {"model": model, "data": data, "base": base}
    with shared.folder(out) as folder:
        opened, place = Index.open(index), index / SOURCE
        about = read_record(place) if place.is_file() else {}
        about |= {n: str(p) for n, p in given.items() if p is not None}
        if ".py:" in questions:
            if tokens or (model, base, text, max_length) != (None,) * 4:
                raise InputError(
                    "--tokens, --model, --base, --text and --max-length belong to a language model"
                )
            trained, asked = _script_tasks(opened, about, questions)
        else:
            how = {"text": text, "max_length": max_length, "say": say}
            again = bool(refine or tokens)
            trained, asked = _text_tasks(opened, about, str(index), questions, again, how)
        asked = shared.of(asked)
        if shared.dry_run:
            pairs({"questions": f"{asked.n_data:,}", "writes": out or "nothing"})
            return
        opened = Index.open(index, task=trained)
        quantity = quantity_of(normalize)
        if not refine:
            _say_rough(say, opened)
        count = min(top, opened.n_data)
        exactly = min(max(refine, count), opened.n_data) if refine else 0
        matches: Any = opened.top(asked, count, refine=exactly, normalize=normalize, harmful=False)
        if trained is not None and not asked.likelihood.is_sequence:  # labels come with the pairs
            subject = subject_of(trained, opened.posterior)
            pairs_of = Pairs(subject, asked, quantity=quantity)
            matches = TopInfluence(**vars(matches), pairs=pairs_of)
        table = matches.table.query("effect == 'helpful'").drop(columns="effect")
        table = table.rename(columns={"test": "question", "train": "example"})
        if out is not None:
            write_table(table, folder, "sources")
        if tokens and trained is not None:
            write_table(_token_shares(trained, opened, asked, matches.helpful), folder, "tokens")
    words = asked.metadata.get("text") if asked.likelihood.is_sequence else None
    show(in_text(sources(table, quantity, words), most=len(table)))


def _script_tasks(opened: Index, about: dict[str, Any], questions: str) -> tuple[Task, Task]:
    """The training task and that of the questions, from a user's script."""
    if ".py:" not in about.get("data", ""):
        raise InputError("name the training task with --data SCRIPT.py:TASK")
    trained, _ = load_tasks(about["data"])
    asked, _ = load_tasks(questions)
    opened.posterior.on(asked, same_data=False)
    return trained, asked.with_model(trained)


def _text_tasks(
    opened: Index, about: dict[str, Any], index: str, questions: str, again: bool, how: Any
) -> tuple[Task | None, Task]:
    """The training texts, where they are read ``again``, and the questions to a language model,
    which must be the index's."""
    from blr_analysis.huggingface.models import load_language_model
    from blr_analysis.huggingface.questions import ids_known_by
    from blr_analysis.posterior.stationarity import check_weights

    if not about.get("model"):
        raise InputError(
            f"{index!r} does not say where its language model is: name it with --model; or "
            "ask SCRIPT.py:TASK"
        )
    loaded = load_language_model(about["model"], base=about.get("base"))
    known = about["tokenizer"]
    if ids_known_by(loaded.tokenizer, opened.examples["text"], known["tokens"]) != known:
        raise InputError(
            f"the tokenizer of {about['model']!r} is not the index's: it makes other ids of "
            "the same texts; put the one of the training there, or name its folder (--model)"
        )
    if about["frozen"] not in ("", _frozen(loaded.model)):
        where = about.get("base") or about["model"]
        raise InputError(f"{where!r} is not the base that the index was built on: name it (--base)")
    asked = texts_of(loaded, Path(questions), **how)
    check_weights(asked, opened.posterior)
    if not again:
        return None, asked
    if not about.get("data"):
        raise InputError("name the training data with --data")
    trained = {**how, "text": about["text"], "max_length": about["max_length"]}
    return texts_of(loaded, Path(about["data"]), **trained), asked


def _token_shares(trained: Task, opened: Index, asked: Task, helpful: Any) -> Any:
    """How many nats each token of these texts makes up."""
    import pandas as pd

    from blr_analysis.sensitivity.token_scores import token_influence

    shares = token_influence(trained, opened.posterior, asked, helpful)
    names = trained.dataset.tokenizer.convert_ids_to_tokens(shares["target"].tolist())
    return pd.DataFrame(shares | {"token": names})


def _frozen(model: Any) -> str:
    """What tells the weights that are not trained, an adapter's base, from others; "": all are."""
    from blr_analysis.files import Loaded, fingerprint
    from blr_analysis.files.storage import SAMPLE

    held = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    return fingerprint(Loaded("the base", held), most=SAMPLE, progress=False) if held else ""


def _say_rough(say: Teller, index: Index) -> None:
    """Where an index errs by much."""
    if (error := index.error.relative_rms) > ROUGH:
        say(f"note: rough, {error:.2f} off: a larger --rank, or query --refine N")

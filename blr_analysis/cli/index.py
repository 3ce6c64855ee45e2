"""``blr-analysis index`` and ``query``: an index of a model's training data, and questions to it.
What only these commands need is imported inside of them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.cli.options import (
    Base,
    Data,
    DryRun,
    Fit,
    Initial,
    Length,
    PosteriorFile,
    PriorPrecision,
    TaskOrModel,
    TextColumn,
    TextOptions,
    Way,
    say_cut,
    show_forecast,
    tasks_of,
)
from blr_analysis.errors import InputError
from blr_analysis.terminal import Teller, pairs, paper, show

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    import pandas as pd

    from blr_analysis.sensitivity import Index
    from blr_analysis.sensitivity.influence.results import Matches
    from blr_analysis.task import Task

SOURCE = "source.json"  # where model and data were
ROUGH = 0.3  # of the influence: an index that errs by more puts other sources first


def index(
    task: TaskOrModel,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="INDEX", help="A folder to write.")],
    data: Data = None,
    posterior: PosteriorFile = None,
    fit: Fit = None,
    prior_precision: PriorPrecision = None,
    initial: Initial = None,
    base: Base = None,
    text: TextColumn = None,
    rank: Annotated[
        int, typer.Option(metavar="K", min=1, help="Kept of every example: 2·K bytes.")
    ] = 16384,
    max_length: Length = None,
    dry_run: DryRun = False,
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

    Of these a Kronecker posterior is fitted without -p: labels drawn from the model, both factors
    of every layer but the vocabulary's. A
    diagonal one (--fit diag) takes less time and memory, and is weak for influence.

    Kept of every example: the longest parts of its gradient and signs of random sums of the rest.
    How far their influence is from the exact one is measured and said. A run that was killed goes
    on where it was.
    """
    from blr_analysis import ranks
    from blr_analysis.files import drafted, held
    from blr_analysis.huggingface.tokens import ids_known_by
    from blr_analysis.sensitivity import Index
    from blr_analysis.sensitivity.influence.index import build_cost, check_place

    texts = TextOptions.of(task, data, base, text, max_length)
    way, say = Way(posterior, fit, prior_precision, initial=initial).checked(texts), Teller()
    if way.fit in ("lowrank", "full"):
        raise InputError(f"an index takes --fit diag or kron, not {way.fit}")
    out = out.expanduser()
    with held(out) if ranks.first() and not dry_run else nullcontext():
        ours, _ = tasks_of(task, None, texts, say)
        check_place(out, ours, rank, at_model=posterior is None)
        if dry_run:
            known = way.posterior and way.posterior.stat().st_size
            kind = {"structure": str(way.fit or ""), "saved": known or 0}
            show_forecast(build_cost(ours, way.stages(ours), rank, **kind))
            return
        q = way.posterior_of(ours, say)
        say("indexing")
        built = Index.build(ours, q, out, rank=rank)
        if not ranks.first():
            return
        about = {"model": data and Path(task), "data": data or Path(task), "base": base}
        record: dict[str, Any] = {n: p and str(p.expanduser().absolute()) for n, p in about.items()}
        record |= {"text": text, "max_length": max_length}
        if texts is not None:
            tokenizer = ours.dataset.tokenizer
            record["tokenizer"] = ids_known_by(tokenizer, built.examples["text"])
            record["frozen"] = _frozen(ours.model)
        with drafted(out / SOURCE) as draft:
            draft.write_text(json.dumps(record, indent=2), encoding="utf-8")
    say("done")
    _say_rough(say, built)
    pairs(
        {
            "sequences" if texts else "examples": f"{built.n_data:,}",
            "kept": f"{built.numbers:,} {'signs' if built.signs else 'numbers'} of each",
            "error": f"{built.error.relative_rms:.3f} of the influence, rank correlation "
            f"{built.error.spearman:.3f}",
            "written": out,
            "next": f"blr-analysis query {out} "
            + ("QUESTIONS.jsonl" if texts else "SCRIPT.py:TASK"),
        }
    )


def query(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="What index wrote.")],
    questions: Annotated[
        Path,
        typer.Argument(
            metavar="SCRIPT.py:TASK|QUESTIONS",
            help="A function of your script that returns a Task; or, of a language model, rows "
            "with a prompt and an answer, messages, or texts: .jsonl, .csv, ...",
        ),
    ],
    top: Annotated[int, typer.Option(metavar="K", min=1, help="Sources shown of each.")] = 5,
    refine: Annotated[
        int, typer.Option(metavar="N", min=0, help="Recompute the best N exactly.")
    ] = 0,
    normalize: Annotated[
        bool | None,
        typer.Option(
            help="By the length of each source: what an answer came from, where long or odd texts "
            "otherwise lead every list. Without: nats."
        ),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Write the share of every token, too (needs --out).")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Where the model is now, if it was moved."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA", help="Where the training data (or their SCRIPT.py:TASK) are now."
        ),
    ] = None,
    base: Base = None,
    text: TextColumn = None,
    max_length: Length = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write the table here.")
    ] = None,
) -> None:
    """Which training examples a model's answers rest on.

    Of a script's task, whose index knows where the training task is:

      blr-analysis query INDEX train.py:make_test --top 20
      blr-analysis query INDEX train.py:make_test --out DIR --refine 50

    Of a language model:

      blr-analysis query INDEX questions.jsonl --top 20
      blr-analysis query INDEX questions.jsonl --out DIR --tokens
      blr-analysis query INDEX questions.jsonl --refine 50

    A row of QUESTIONS has a prompt and an answer, or a text. Shown are the examples without which
    the loss of the question would rise most, to first order: for their length (--normalize), or by
    how many nats (--no-normalize). With --out, the
    table sources names their metadata too. --tokens writes how many nats each token of these texts
    makes up; it and --refine read the training data again, where the index was told they are.
    """
    from blr_analysis.checks import printable
    from blr_analysis.huggingface.models import load_language_model
    from blr_analysis.huggingface.questions import language_task
    from blr_analysis.huggingface.tokens import ids_known_by
    from blr_analysis.posterior.stationarity import check_weights
    from blr_analysis.sensitivity import Index

    if tokens and out is None:
        raise InputError("--tokens writes a table: say where with --out DIR")
    opened, about = Index.open(index), _source(index)
    given = {"model": model, "data": data, "base": base}
    about |= {n: str(p) for n, p in given.items() if p is not None}
    if ".py:" in str(questions):
        if tokens or (model, base, text, max_length) != (None,) * 4:
            raise InputError(
                "--tokens, --model, --base, --text and --max-length belong to a language model"
            )
        _query_task(index, about, str(questions), top, refine, normalize, out)
        return
    if not about.get("model"):
        raise InputError(
            f"{str(index)!r} does not say where its language model is: name it with --model; or "
            "ask SCRIPT.py:TASK"
        )
    loaded = load_language_model(about["model"], base=about.get("base"))
    if known := about.get("tokenizer"):  # which indexes of earlier versions do not say
        own = ids_known_by(loaded.tokenizer, opened.examples["text"], known["tokens"])
        if own != known:
            raise InputError(
                f"the tokenizer of {about['model']!r} is not the index's: it makes other ids of "
                "the same texts; put the one of the training there, or name its folder (--model)"
            )
    if about.get("frozen", "") not in ("", _frozen(loaded.model)):
        where = about.get("base") or about["model"]
        raise InputError(f"{where!r} is not the base that the index was built on: name it (--base)")
    task = language_task(loaded, questions, text=text, max_length=max_length)
    check_weights(task, opened.posterior)
    say_cut(Teller(), task, questions, max_length)
    trained = None
    if refine or tokens:
        if not about.get("data"):
            raise InputError("name the training data with --data")
        trained = language_task(
            loaded, about["data"], text=about.get("text"), max_length=about.get("max_length")
        )
        opened = Index.open(index, task=trained)
    matches = _strongest(opened, task, top, refine, normalize)
    sources = _sources(matches, out)
    if out is not None and trained is not None and tokens:
        import pandas as pd

        from blr_analysis.sensitivity.tokens import token_influence
        from blr_analysis.tables import write_table

        traced = (trained, opened.posterior, task, matches.helpful)
        shares = token_influence(*traced)
        shares["token"] = loaded.tokenizer.convert_ids_to_tokens(shares["target"].tolist())
        write_table(pd.DataFrame(shares), out, "tokens")
    console = paper()
    for question, asked in enumerate(task.metadata["text"]):
        console.print(f"\n{question}  {printable(asked)}")
        found = sources.query("question == @question").to_dict("records")
        for row in found:
            line = (
                f"{row[matches.quantity]:>10.4g}  {row['example']:>7}  {row.get('text', '')[:90]}"
            )
            console.print(f"  {printable(line)}", soft_wrap=True)
        if not found:
            console.print("  no example helps")


def _frozen(model: Any) -> str:
    """What tells the weights that are not trained, an adapter's base, from others; "": all are."""
    from blr_analysis.files import Loaded, fingerprint
    from blr_analysis.files.storage import SAMPLE

    held = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    return fingerprint(Loaded("the base", held), most=SAMPLE, progress=False) if held else ""


def _query_task(
    index: Path,
    about: dict[str, Any],
    questions: str,
    top: int,
    refine: int,
    normalize: bool | None,
    out: Path | None,
) -> None:
    """The questions of a script's task, to an index of another's."""
    from blr_analysis.audit.summary import sources_section
    from blr_analysis.cli.script import load_tasks
    from blr_analysis.sensitivity import Index, TopInfluence
    from blr_analysis.sensitivity.influence.results import Pairs

    if ".py:" not in about.get("data", ""):
        raise InputError("name the training task with --data SCRIPT.py:TASK")
    trained, _ = load_tasks(about["data"])
    opened = Index.open(index, task=trained)
    asked, _ = load_tasks(questions)
    opened.posterior.on(asked, same_data=False)
    asked = asked.with_model(trained)
    matches = _strongest(opened, asked, top, refine, normalize)
    # Labels and predictions come with the pairs.
    pairs = Pairs(trained, opened.posterior, asked, quantity=matches.quantity)
    sources = _sources(TopInfluence(**vars(matches), pairs=pairs), out)
    show(sources_section(sources))


def _strongest(index: Index, asked: Task, top: int, refine: int, normalize: bool | None) -> Matches:
    """As many as the options say, and as there are."""
    from blr_analysis.posterior.prior_choice import in_words
    from blr_analysis.sensitivity.influence.results import quantity_of

    normalize = True if normalize is None else normalize
    say, how = Teller(), quantity_of(normalize).replace("_", " ")
    choice = index.posterior.record.get("prior_choice")
    say(how + (f", prior precision {in_words(choice)}" if choice else ""))
    if not refine:
        _say_rough(say, index)
    count = min(top, index.n_data)
    if count < top:
        what = "texts" if asked.likelihood.is_sequence else "examples"
        paper().print(f"all {count} {what} of the index, fewer than --top {top}")
    exactly = min(max(refine, count), index.n_data) if refine else 0
    return index.top(asked, count, refine=exactly, normalize=normalize, harmful=False)


def _sources(matches: Matches, out: Path | None) -> pd.DataFrame:
    """The table of those that help, which is written where ``out`` says."""
    from blr_analysis.tables import write_table

    table = matches.table.query("effect == 'helpful'").drop(columns="effect")
    table = table.rename(columns={"test": "question", "train": "example"})
    if out is not None:
        write_table(table, out, "sources")
    return table


def _say_rough(say: Teller, index: Index) -> None:
    """Where an index errs by much."""
    if index.error.relative_rms > ROUGH:
        say(
            f"note: rough, {index.error.relative_rms:.2f} off: a larger --rank, or query --refine N"
        )


def _source(index: Path) -> dict[str, Any]:
    """Where the index says that its model and data are."""
    place = index / SOURCE
    return json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}

"""``blr-analysis index`` and ``query``: an index of a language model's training data, and questions
to it. What only these commands need is imported inside of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from blr_analysis.cli.options import (
    Base,
    DryRun,
    Fit,
    Length,
    PosteriorFile,
    PriorPrecision,
    Teller,
    TextColumn,
    TextOptions,
    Way,
    paper,
    say_cut,
    show_forecast,
)

SOURCE = "source.json"  # where model and data were
ROUGH = 0.3  # of the influence: an index that errs by more puts other sources first


def index(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A causal language model, or a LoRA adapter on one."),
    ],
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="What it was trained on: .jsonl, .csv, .parquet, ..."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="INDEX", help="A folder to write.")],
    posterior: PosteriorFile = None,
    fit: Fit = None,
    prior_precision: PriorPrecision = None,
    base: Base = None,
    text: TextColumn = None,
    rank: Annotated[
        int, typer.Option(metavar="K", min=1, help="Numbers kept of every example, 2 bytes each.")
    ] = 16384,
    max_length: Length = None,
    dry_run: DryRun = False,
) -> None:
    """Fit a posterior, pass over the data once, write."""
    from blr_analysis import ranks
    from blr_analysis.files import drafted
    from blr_analysis.sensitivity import Index
    from blr_analysis.sensitivity.influence.index import build_cost

    texts = TextOptions(data, base, text, max_length)
    way = texts.fitting(Way(posterior, fit, prior_precision))
    way.check()
    say = Teller()
    say(f"loading {model}")
    task, _ = texts.tasks(str(model), say=say)
    if dry_run:
        show_forecast(build_cost(task, way.stages(task), rank))
        return
    q = way.posterior_of(task, say)
    say("indexing")
    built = Index.build(task, q, out, rank=rank)
    about = {"model": model, "data": data, "base": base}
    about = {n: p and str(p.expanduser().absolute()) for n, p in about.items()}
    if not ranks.first():
        return
    with drafted(out / SOURCE) as draft:
        record = {**about, "text": text, "max_length": max_length}
        draft.write_text(json.dumps(record, indent=2), encoding="utf-8")
    say("done")
    _say_rough(say, built)
    console = paper()
    for name, value in {
        "sequences": f"{built.n_data:,}",
        "numbers": f"{built.numbers:,} of each",
        "error": f"{built.error.relative_rms:.3f} of the influence, rank correlation "
        f"{built.error.spearman:.3f}",
        "written": str(out),
        "next": f"blr-analysis query {out} QUESTIONS.jsonl",
    }.items():
        console.print(f"{name:<11}{value}", soft_wrap=True)


def query(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="What index wrote.")],
    questions: Annotated[
        Path,
        typer.Argument(
            metavar="QUESTIONS",
            help="Rows with a prompt and an answer, messages, or texts: .jsonl, .csv, ...",
        ),
    ],
    top: Annotated[int, typer.Option(metavar="K", min=1, help="Sources shown of each.")] = 5,
    refine: Annotated[
        int, typer.Option(metavar="N", min=0, help="Recompute the best N exactly.")
    ] = 0,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Write the share of every token, too (needs --out).")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Where the model is now, if it was moved."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DATA", help="Where the training data are now, if they were moved."),
    ] = None,
    base: Base = None,
    text: TextColumn = None,
    max_length: Length = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write the table here.")
    ] = None,
) -> None:
    """The training examples that matter most to each question."""
    import pandas as pd

    from blr_analysis.checks import printable
    from blr_analysis.errors import InputError
    from blr_analysis.huggingface.models import load_language_model
    from blr_analysis.huggingface.questions import language_task
    from blr_analysis.sensitivity import Index
    from blr_analysis.tables import write_table

    if tokens and out is None:
        raise InputError("--tokens writes a table: say where with --out DIR")
    opened = Index.open(index)
    about = _source(index)
    given = {"model": model, "data": data, "base": base}
    about |= {n: str(p) for n, p in given.items() if p is not None}
    if not about.get("model"):
        raise InputError(f"{str(index)!r} does not say where its model is: name it with --model")
    loaded = load_language_model(about["model"], base=about.get("base"))
    task = language_task(loaded, questions, text=text, max_length=max_length)
    say_cut(Teller(), task, questions, max_length)
    trained = None
    if refine or tokens:
        if not about.get("data"):
            raise InputError("name the training data with --data")
        trained = language_task(
            loaded, about["data"], text=about.get("text"), max_length=about.get("max_length")
        )
        opened = Index.open(index, task=trained)
    if not refine:
        _say_rough(Teller(), opened)
    count = min(top, opened.n_data)
    matches = opened.top(
        task, count, refine=min(max(refine, count), opened.n_data) if refine else 0
    )
    known = opened.examples.get("text", [""] * opened.n_data)
    rows = [
        {
            "question": asked,
            "rank": rank,
            "example": int(example),
            "influence": float(value),
            "text": known[int(example)],
        }
        for asked in range(task.n_data)
        for rank, (example, value) in enumerate(
            zip(matches.helpful[asked], matches.helpful_values[asked], strict=True), start=1
        )
    ]
    if out is not None:
        write_table(pd.DataFrame(rows), out, "sources")
    if out is not None and trained is not None and tokens:
        from blr_analysis.sensitivity.tokens import token_influence

        shares = token_influence(trained, opened.posterior, task, matches.helpful)
        shares["token"] = loaded.tokenizer.convert_ids_to_tokens(shares["target"].tolist())
        write_table(pd.DataFrame(shares), out, "tokens")
    console = paper()
    if count < top:
        console.print(f"all {count} texts of the index, fewer than --top {top}")
    for row in rows:
        if row["rank"] == 1:
            asked = task.metadata["text"][row["question"]]
            console.print(f"\n{row['question']}  {printable(asked)}")
        line = f"  {row['influence']:>10.4g}  {row['example']:>7}  {row['text'][:90]}"
        console.print(printable(line), soft_wrap=True)


def _say_rough(say: Teller, index: Any) -> None:
    """Where an index errs by much."""
    if index.error.relative_rms > ROUGH:
        say(
            f"note: rough, {index.error.relative_rms:.2f} off: a larger --rank, or query --refine N"
        )


def _source(index: Path) -> dict[str, Any]:
    """Where the index says that its model and data are."""
    place = index / SOURCE
    return json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}

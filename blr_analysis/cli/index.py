"""``blr-analysis index`` and ``query``: an index of a language model's training data, and questions
to it. What only these commands need is imported inside of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blr_analysis.cli.options import Teller, paper

MODEL = "model.txt"
Length = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", min=2, help="Tokens read of a text; otherwise at most 512."),
]


def index(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A folder with a causal language model.")
    ],
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="What it was trained on: .jsonl, .csv, .txt, ..."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="INDEX", help="A folder to write.")],
    prior_precision: Annotated[
        float | None,
        typer.Option(
            metavar="D",
            help="Of the posterior that is fitted: N times the L2 penalty of a mean loss.",
        ),
    ] = None,
    posterior: Annotated[
        Path | None,
        typer.Option("--posterior", "-p", metavar="FILE", help="Instead: one that was saved."),
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="COLUMN", help="The texts' column.")] = None,
    rank: Annotated[
        int, typer.Option(metavar="K", min=1, help="Numbers kept of every example, 2 bytes each.")
    ] = 16384,
    max_length: Length = None,
) -> None:
    """Fit a posterior, pass over the data once, write."""
    from blr_analysis.errors import InputError
    from blr_analysis.files import drafted
    from blr_analysis.huggingface.models import load_model
    from blr_analysis.huggingface.questions import language_task
    from blr_analysis.posterior import Posterior, fit_laplace
    from blr_analysis.sensitivity import Index

    if (posterior is None) == (prior_precision is None):
        raise InputError("name the posterior (-p FILE), or --prior-precision D to fit one")
    say = Teller()
    say(f"loading {model}")
    task = language_task(load_model(model), data, text=text, max_length=max_length)
    if posterior is None:
        say(f"fitting a diagonal posterior to {task.n_data:,} sequences")
        q = fit_laplace(
            task, structure="diag", curvature="empirical_fisher", prior_precision=prior_precision
        )
    else:
        q = Posterior.load(posterior)
    say("indexing")
    built = Index.build(task, q, out, rank=rank)
    with drafted(out / MODEL) as draft:
        draft.write_text(str(model.expanduser().absolute()), encoding="utf-8")
    say("done")
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
            help="Rows with a prompt and an answer, or texts: .jsonl, .csv, ...",
        ),
    ],
    top: Annotated[int, typer.Option(metavar="K", min=1, help="Sources shown of each.")] = 5,
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Where the model is now, if it was moved."),
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="COLUMN", help="The texts' column.")] = None,
    max_length: Length = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write the table here.")
    ] = None,
) -> None:
    """The training examples that matter most to each question."""
    import pandas as pd

    from blr_analysis.errors import InputError
    from blr_analysis.huggingface.models import load_model
    from blr_analysis.huggingface.questions import language_task
    from blr_analysis.sensitivity import Index
    from blr_analysis.tables import write_table

    opened = Index.open(index)
    if model is None and not (index / MODEL).is_file():
        raise InputError(f"{str(index)!r} does not say where its model is: name it with --model")
    where = model or Path((index / MODEL).read_text(encoding="utf-8"))
    task = language_task(load_model(where), questions, text=text, max_length=max_length)
    matches = opened.top(task, min(top, opened.n_data))
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
    console = paper()
    for row in rows:
        if row["rank"] == 1:
            console.print(f"\n{row['question']}  {task.metadata['text'][row['question']]}")
        line = f"  {row['influence']:>10.4g}  {row['example']:>7}  {row['text'][:90]}"
        console.print(line, soft_wrap=True)

"""``blr-analysis query``: the training examples that the answers of a model rest on.

What only this command needs is imported inside of it, so that the others start faster.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.cli.behaviour import show_behaviour
from blr_analysis.cli.inputs import TextColumns
from blr_analysis.cli.options import Out, Shared, dry_run
from blr_analysis.cli.origin import IndexedModel, ScriptTasks, read_origin
from blr_analysis.cli.query_options import Behaviour, Places, Ranking, Request, check_options
from blr_analysis.cli.refinement import (
    Opened,
    note_of_sizes,
    open_for,
    refinement_reported,
    say_if_rough,
)
from blr_analysis.terminal import Teller, pairs, show

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    import pandas as pd
    from torch import Tensor

    from blr_analysis.task import Task

ORDER_OF_HYBRID = "Ordered by influence and words in common (BM25), each in standard deviations."


def query(
    *,
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="The folder that index wrote.")],
    questions: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT.py:TASK|QUESTIONS",
            help="A function of your script that returns a Task; or, for a language "
            "model, a file (.jsonl, .csv, ...) of prompts and answers, messages, or "
            "texts.",
            show_default=False,
        ),
    ] = None,
    ranking: Ranking,
    behaviour: Behaviour,
    places: Places,
    out: Out = None,
    shared: Shared,
) -> dict[str, Any]:
    """Find the training examples that a model's answers rest on.

      blr-analysis query INDEX train.py:make_test --top 20

    For a language model, name a file of questions, each a prompt and an answer, or a text:

      blr-analysis query INDEX questions.jsonl --out DIR

    The command shows the examples without which the loss of a question would rise most. With --out
    it writes the table sources, with their metadata.

    To find the texts that taught a language model a behaviour, and write the data without them:

      blr-analysis query INDEX --bad outputs.jsonl --top 20 --write less.jsonl

    --json prints questions, quantity, refined, sources, note.
    """
    from blr_analysis.sensitivity import Index

    say = Teller()
    request = Request(ranking, places, shared, out, say)
    check_options(questions, behaviour, request)
    write = shared.free(behaviour.write)
    with shared.folder(out) as folder:
        opened = Index.open(index)
        origin = read_origin(index, places)
        asks_a_script = questions is not None and ".py:" in questions
        columns = TextColumns(places.text, places.max_length, eos=places.eos)
        model = IndexedModel(opened, origin, columns, shared.device, say)
        if questions is None:
            return show_behaviour(model, behaviour, request, folder, write)
        if asks_a_script:
            return show_sources(ScriptTasks(opened, origin), questions, request, folder)
        return show_sources(model, questions, request, folder)


def show_sources(
    reader: ScriptTasks | IndexedModel, address: str, request: Request, folder: Path
) -> dict[str, Any]:
    """Print the sources of every question, and write them where a folder was named.

    Args:
        reader: reads the training data and the questions.
        address: the file or the script's function with the questions.
        folder: where tables are written.

    Returns:
        The sources as plain values.
    """
    from blr_analysis.audit import in_text
    from blr_analysis.audit.sections import sources
    from blr_analysis.sensitivity.influence.results import quantity_of
    from blr_analysis.tables import write_table

    questions = request.shared.of(reader.questions(address))
    opened = open_for(reader, questions, request)
    if request.shared.dry_run:
        pairs({"questions": f"{questions.n_data:,}", "writes": request.out or "nothing"})
        return dry_run(questions=questions.n_data)
    if request.ranking.hybrid:
        quantity = "influence"
        table = table_with_words(opened, questions, request)
    else:
        quantity = quantity_of(request.ranking.normalizes(questions))
        matches = matches_of(opened, questions, request)
        table = table_of_sources(matches)
        if request.ranking.tokens:
            write_table(table_of_tokens(opened, questions, matches.helpful), folder, "tokens")
    if request.out is not None:
        write_table(table, folder, "sources")
    words = questions.metadata.get("text") if questions.likelihood.is_sequence else None
    section = sources(table, quantity, words)
    if request.ranking.hybrid:
        section = replace(section, lead=f"{section.lead} {ORDER_OF_HYBRID}")
    trust = note_of_sizes(opened.index.posterior, quantity)
    if trust:
        section = replace(section, notes=[trust])
    show(in_text(section, max_rows=len(table)))
    return {
        "questions": questions.n_data,
        "quantity": quantity,
        "refined": opened.n_refined,
        "sources": table.to_dict("records"),
        "note": trust,
    }


def matches_of(opened: Opened, questions: Task, request: Request) -> Any:
    """The sources of every question, as ``Index.top`` gives them.

    Of data that are no texts they name labels and predictions too.
    """
    from blr_analysis.sensitivity import TopInfluence
    from blr_analysis.sensitivity.influence.results import Pairs, quantity_of
    from blr_analysis.sensitivity.subjects import subject_of

    index = opened.index
    normalize = request.ranking.normalizes(questions)
    with refinement_reported(opened, request.say):
        matches = index.top(
            questions,
            min(request.ranking.top, index.n_data),
            refine=opened.n_refined,
            normalize=normalize,
            harmful=False,
        )
    if opened.training is None or questions.likelihood.is_sequence:
        return matches
    subject = subject_of(opened.training, index.posterior)
    labelled_pairs = Pairs(subject, questions, quantity=quantity_of(normalize))
    return TopInfluence(**vars(matches), pairs=labelled_pairs)


def table_of_sources(matches: Any) -> pd.DataFrame:
    """A row for each question and helpful training example."""
    table = matches.table.query("effect == 'helpful'").drop(columns="effect")
    return table.rename(columns={"test": "question", "train": "example"})


def table_with_words(opened: Opened, questions: Task, request: Request) -> pd.DataFrame:
    """A row for each question and source, by influence and by words."""
    from blr_analysis.cli.word_scores import hybrid_table

    assert opened.training is not None
    say_if_rough(request.say, opened.index.error)
    return hybrid_table(
        opened.index,
        opened.training,
        questions,
        top=request.ranking.top,
        normalize=request.ranking.normalizes(questions),
    )


def table_of_tokens(opened: Opened, questions: Task, sources: Tensor) -> pd.DataFrame:
    """How many nats each token of these sources ``[M, k]`` contributes to their influence."""
    import pandas as pd

    from blr_analysis.sensitivity.token_scores import token_influence

    assert opened.training is not None
    shares = token_influence(opened.training, opened.index.posterior, questions, sources)
    tokenizer = opened.training.dataset.tokenizer
    names = tokenizer.convert_ids_to_tokens(shares["target"].tolist())
    return pd.DataFrame(shares | {"token": names})

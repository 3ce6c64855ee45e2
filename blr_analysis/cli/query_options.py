"""The options of ``blr-analysis query``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from blr_analysis.cli.options import Base, Eos, Length, Shared, Text, option
from blr_analysis.errors import InputError

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.task import Task

REFINED = 50  # texts of each question that are compared exactly; a reader looks through so many


@dataclass(frozen=True)
class Ranking:
    """The options that say how the sources of a question are ranked, and what is shown."""

    PANEL: ClassVar[str] = "What is shown"

    top: Annotated[int, option("K", "How many sources to show for each question.", least=1)] = 5
    refine: Annotated[
        int | None,
        option(
            "N",
            "Order the best N of each question again, by their exact influence. If left "
            f"out: {REFINED}, or 0 without the training data. 0 keeps the order of the index.",
            least=0,
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        typer.Option(
            help="Divide influence by the length of each source's gradient, so that long or odd "
            "examples do not lead every list. If left out: yes, but not for texts."
        ),
    ] = None
    hybrid: Annotated[
        bool,
        typer.Option("--hybrid", help="Add the score of BM25, which compares words."),
    ] = False
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also write the share of every token (needs --out).")
    ] = False

    @property
    def needs_training_data(self) -> bool:
        """Whether an option was given that cannot be answered without the training data."""
        return bool(self.refine) or self.hybrid or self.tokens

    def normalizes(self, questions: Task) -> bool:
        """Whether influence is divided by lengths; unless an option says so, not of texts."""
        if self.normalize is None:
            return not questions.likelihood.is_sequence
        return self.normalize


@dataclass(frozen=True)
class Behaviour:
    """Outputs of one behaviour, whose sources are looked for in place of those of questions."""

    PANEL: ClassVar[str] = "Texts behind a behaviour"

    bad: Annotated[
        str | None,
        option("OUTPUTS", "In place of QUESTIONS: outputs of one unwanted behaviour."),
    ] = None
    good: Annotated[
        str | None,
        option("OUTPUTS", "Wanted outputs; their mean influence is subtracted."),
    ] = None
    write: Annotated[
        Path | None,
        option("FILE", "With --bad: write the training rows, except those shown, as .jsonl."),
    ] = None


@dataclass(frozen=True)
class Places:
    """The options that say where model and data are now, and how questions are read."""

    PANEL: ClassVar[str] = "Where model and data are now"

    model: Annotated[
        Path | None,
        option("MODEL", "Where the model is now, if it was moved."),
    ] = None
    data: Annotated[
        str | None,
        option("DATA", "Where the training data (or their SCRIPT.py:TASK) are now."),
    ] = None
    base: Base = None
    text: Text = None
    max_length: Length = None
    eos: Eos = None

    @property
    def belong_to_a_language_model(self) -> bool:
        """Whether an option was given that a script's task does not have."""
        options = (self.model, self.base, self.text, self.max_length, self.eos)
        return any(value is not None for value in options)


@dataclass(frozen=True)
class Request:
    """How an index is asked, and where the answer goes.

    Attributes:
        ranking, places, shared: the options of these names.
        out: the folder for tables; None: none is written.
        say: prints what is done.
    """

    ranking: Ranking
    places: Places
    shared: Shared
    out: Path | None
    say: Callable[[str], None]


def check_options(questions: str | None, behaviour: Behaviour, request: Request) -> None:
    """Refuse options that do not go together, before any work."""
    ranking = request.ranking
    has_bad = behaviour.bad is not None
    if ranking.tokens and request.out is None:
        raise InputError("--tokens writes a table: say where with --out DIR")
    if (questions is None) != has_bad:
        raise InputError("name QUESTIONS, or outputs of one behaviour with --bad")
    if not has_bad and (behaviour.good is not None or behaviour.write is not None):
        raise InputError("--good and --write belong to --bad")
    if has_bad and ranking.needs_training_data:
        raise InputError("--refine, --tokens and --hybrid belong to QUESTIONS")
    if ranking.hybrid and (ranking.refine or ranking.tokens):
        raise InputError("--hybrid orders by two scores: leave --refine and --tokens out")
    asks_a_script = questions is not None and ".py:" in questions
    is_for_texts = ranking.tokens or ranking.hybrid or request.places.belong_to_a_language_model
    if asks_a_script and is_for_texts:
        raise InputError(
            "--tokens, --hybrid, --model, --base, --text, --max-length and --eos belong to a "
            "language model"
        )

"""Which texts ``query`` compares exactly.

An index estimates influence, and its error may be large. The texts that it puts first are therefore
compared again, by their exact influence, where model and training data are at hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blr_analysis.cli.origin import IndexedModel, ScriptTasks
from blr_analysis.cli.query_options import REFINED, Request
from blr_analysis.errors import BLRError

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.posterior import Posterior
    from blr_analysis.sensitivity import Index
    from blr_analysis.sensitivity.influence.results import ProjectionError
    from blr_analysis.task import Task

MOST_GRADIENTS = 5000  # computed without being asked for; minutes for a small language model
ROUGH = 0.3  # relative error of an index from which on other texts may come first


@dataclass(frozen=True)
class Opened:
    """An index that is ready for a request.

    Attributes:
        index: the index; with the training task it computes exact influence too.
        training: the training task; None where it is not needed, or not at hand.
        n_refined: how many texts of each question are compared exactly.
    """

    index: Index
    training: Task | None = None
    n_refined: int = 0


def open_for(reader: ScriptTasks | IndexedModel, questions: Task, request: Request) -> Opened:
    """The index, with its training data where they are needed, or where they refine the answer.

    Raises:
        BLRError: data that are needed, or that the user named (--data), are not those of the index.
    """
    n_refined = number_to_refine(reader.opened, questions, request)
    if isinstance(reader, ScriptTasks) or request.ranking.needs_training_data:
        return open_with_training(reader, request, n_refined)
    if n_refined == 0 or request.shared.dry_run:
        return Opened(reader.opened)
    request.say("reading the training data, to refine the best (--refine 0 leaves this out)")
    try:
        return open_with_training(reader, request, n_refined)
    except BLRError as error:
        if request.places.data is not None:
            raise
        reason = " ".join(str(error).split())
        request.say(f"not refined without the training data: {reason}")
    return Opened(reader.opened)


def open_with_training(
    reader: ScriptTasks | IndexedModel, request: Request, n_refined: int
) -> Opened:
    """The index with its training data.

    Raises:
        BLRError: the data cannot be read, or have changed since the index was built.
    """
    from blr_analysis.sensitivity import Index

    training = request.shared.of(reader.training())
    return Opened(Index.open(reader.opened.path, task=training), training, n_refined)


def number_to_refine(index: Index, questions: Task, request: Request) -> int:
    """How many texts of each question are to be compared exactly; 0: none.

    It is the user's number (--refine) or :data:`REFINED`. The latter is left out, and a line says
    so, where it takes more than :data:`MOST_GRADIENTS` gradients.
    """
    ranking = request.ranking
    if ranking.refine == 0 or ranking.hybrid:
        return 0
    number = REFINED if ranking.refine is None else ranking.refine
    number = min(max(number, ranking.top), index.n_data)
    gradients = gradients_of_refinement(index, questions, number)
    is_too_much = ranking.refine is None and gradients > MOST_GRADIENTS
    if is_too_much:
        request.say(
            f"not refined: {questions.n_data:,} questions may take {gradients:,} gradients; "
            f"--refine {number} computes them"
        )
        return 0
    return number


def gradients_of_refinement(index: Index, questions: Task, number: int) -> int:
    """The most gradients that a refinement of ``number`` texts of each question computes.

    The questions come in blocks whose gradients fit into memory. The texts of a block's questions
    are united, and the gradient of each is computed once.
    """
    from blr_analysis.sensitivity.index.index import blocks_of_questions

    texts_by_block = [
        min(index.n_data, len(block) * number)
        for block in blocks_of_questions(questions, index.posterior)
    ]
    return questions.n_data + sum(texts_by_block)


@contextmanager
def refinement_reported(opened: Opened, say: Callable[[str], None]) -> Iterator[None]:
    """Say after the block how many texts were refined, and how long it took."""
    index = opened.index
    number = opened.n_refined
    start = time.monotonic()
    yield
    if number == 0:
        say_if_rough(say, index.error)
        return
    seconds = time.monotonic() - start
    best = f"the best {number:,} examples of each question"
    if number == index.n_data:
        best = f"all {number:,} examples"
    hint = ""
    is_rough = index.error.relative_rms > ROUGH and number < index.n_data
    if is_rough:
        hint = f"; the index is rough, a larger --refine than {number} may find others"
    say(f"refined: {best} by their exact influence, in {seconds:.1f} s{hint}")


def note_of_sizes(posterior: Posterior, quantity: str) -> str:
    """A sentence on whether printed influences hold in size; "" where they do, or are no sizes.

    A posterior that a training recorded does not know how near the minimum is. Its sizes count as
    unknown until they are measured.
    """
    if quantity != "influence":
        return ""
    note = posterior.note
    is_measured = posterior.calibration is not None
    if not note and posterior.stationarity is None and not is_measured:
        note = "only rankings hold, until calibrate measures the sizes (index --calibrate)"
    return f"How far to trust it: {note}." if note else ""


def say_if_rough(say: Callable[[str], None], error: ProjectionError) -> None:
    """Say that an index errs by much, and what helps."""
    if error.relative_rms > ROUGH:
        say(
            f"note: the index is rough (relative error {error.relative_rms:.2f}); one with a "
            "larger --rank is closer to the exact influence"
        )

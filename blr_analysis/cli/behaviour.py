"""The training texts that a behaviour rests on, and the data without them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr_analysis.cli.options import dry_run
from blr_analysis.cli.origin import IndexedModel
from blr_analysis.cli.query_options import Behaviour, Request
from blr_analysis.cli.refinement import note_of_sizes, say_if_rough
from blr_analysis.errors import InputError
from blr_analysis.terminal import grid, json_value, note, pairs, section, show

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    import pandas as pd
    from torch import Tensor

    from blr_analysis.sensitivity import Index
    from blr_analysis.task import Task

EXCERPT = 60  # characters of a text that are printed
IMPROBABLE = 3.0  # standard deviations; one in 700 sets of a model's own outputs is beyond
LEAST_LOG = -1e4  # of a probability
TINY = 1e-6  # nats; of a model that is certain of every token
LEAD = "How far the loss of an unwanted output would rise without each, on average."


def show_behaviour(
    model: IndexedModel, behaviour: Behaviour, request: Request, folder: Path, write: Path | None
) -> dict[str, Any]:
    """Print the texts that a behaviour rests on most, and write the data without them.

    Args:
        folder: where the table is written.
        write: a file for the data without these texts; None: it is not written.

    Returns:
        The texts as plain values.
    """
    from blr_analysis.sensitivity.influence.results import quantity_of
    from blr_analysis.tables import write_table

    assert behaviour.bad is not None
    shared = request.shared
    bad = shared.of(model.questions(behaviour.bad))
    good = None
    if behaviour.good is not None:
        good = shared.of(model.columns.task_of(model.loaded, behaviour.good, request.say))
    if shared.dry_run:
        pairs({"outputs": f"{bad.n_data:,}", "writes": write or "nothing"})
        return dry_run(questions=bad.n_data)
    index = model.opened
    say_if_rough(request.say, index.error)
    if good is not None:
        say_if_improbable(request.say, good)
    normalize = bool(request.ranking.normalize)
    scores = behaviour_scores(index, bad, good, normalize=normalize)
    quantity = quantity_of(normalize)
    table = table_of_behaviour(index, scores, request.ranking.top, quantity)
    if request.out is not None:
        write_table(table, folder, "sources")
    trust = note_of_sizes(index.posterior, quantity)
    remarks = [note(trust)] if trust else []
    rows = grid(columns_to_print(table, quantity))
    show(section("Sources of the behaviour", LEAD, rows, *remarks))
    if write is not None:
        write_data_without(model, table["example"].tolist(), write)
    return {
        "questions": bad.n_data,
        "quantity": quantity,
        "refined": 0,
        "sources": table.to_dict("records"),
        "note": trust,
    }


@dataclass(frozen=True)
class Surprise:
    """How outputs compare with those that the model draws itself.

    Attributes:
        loss: −log p of a token in nats, on average.
        own_loss: what it would be for tokens that the model draws in the same places.
        deviations: the difference of their sums, in standard deviations of the draws.
    """

    loss: float
    own_loss: float
    deviations: float


def say_if_improbable(say: Callable[[str], None], good: Task) -> None:
    """Say where good outputs are not what the model says.

    They surprise it, and their long gradients hide the sources of the bad outputs.
    """
    if not good.likelihood.is_sequence:
        return
    surprise = surprise_of(good)
    if surprise.deviations > IMPROBABLE:
        say(
            f"the --good outputs are unlikely for this model ({surprise.loss:.1f} nats a token, "
            f"its own have {surprise.own_loss:.1f}): give outputs of the model itself, or --bad "
            "alone"
        )


def surprise_of(outputs: Task) -> Surprise:
    """Whether outputs are what the model draws.

    For a token that is drawn from p_t, the loss −log p_t has the mean H_t = −Σ p log p and the
    variance v_t = Σ p log² p − H_t². By the central limit theorem for martingales,

        z = Σ_t (−log p_t − H_t) / √Σ_t v_t

    is then about normal with variance 1. Likelier outputs, as of a search, have a smaller z.
    """
    import torch

    weights = outputs.parameters()
    losses = []
    entropies = []
    variances = []
    for index in range(outputs.n_data):
        rows = torch.tensor([index])
        with torch.no_grad(), outputs.evaluation():
            logits, labels = outputs.run(outputs.fetch(rows), weights, rows)
        is_counted = outputs.likelihood.counted(labels)
        log_p = logits[is_counted].float().log_softmax(-1)
        p = log_p.exp()
        log_p = log_p.clamp_min(LEAST_LOG)  # 0 · log 0 is 0
        entropy = -(p * log_p).sum(-1)
        losses.append(-log_p.gather(1, labels[is_counted].unsqueeze(1)).squeeze(1))
        entropies.append(entropy)
        variances.append((p * log_p.square()).sum(-1) - entropy.square())
    loss, own_loss, variance = (torch.cat(x).double() for x in (losses, entropies, variances))
    deviation = float(variance.sum().clamp_min(0).sqrt())
    excess = float((loss - own_loss).sum())
    return Surprise(float(loss.mean()), float(own_loss.mean()), excess / (deviation + TINY))


def behaviour_scores(index: Index, bad: Task, good: Task | None, *, normalize: bool) -> Tensor:
    """How far the loss of a bad output would rise without each training text, ``[N]``.

    This is the text's mean influence on the bad outputs, less its mean influence on the good ones.
    """
    scores = _mean_influence(index, bad, normalize)
    if good is not None:
        scores = scores - _mean_influence(index, good, normalize)
    return scores


def _mean_influence(index: Index, outputs: Task, normalize: bool) -> Tensor:
    """The influence of each training text, averaged over these outputs, ``[N]``."""
    return index.influence(outputs, normalize=normalize).double().mean(1)


def table_of_behaviour(index: Index, scores: Tensor, top: int, quantity: str) -> pd.DataFrame:
    """A row for each of the texts that the behaviour rests on most.

    Args:
        scores: what :func:`behaviour_scores` returns.
        top: the number of texts.
        quantity: the name of the column of scores.
    """
    from blr_analysis.tables import frame_of

    examples = scores.argsort(descending=True, stable=True)[:top]
    columns = {"example": examples, quantity: scores[examples]}
    return frame_of(columns, metadata_of(index, examples))


def metadata_of(index: Index, examples: Tensor) -> dict[str, list[Any]]:
    """The columns of the index's table of examples, for these examples."""
    indices = examples.tolist()
    return {name: [column[i] for i in indices] for name, column in index.examples.items()}


def columns_to_print(table: pd.DataFrame, quantity: str) -> dict[str, list[str]]:
    """The columns of the printed table, by their titles."""
    from blr_analysis.audit.section import excerpt

    return {
        "index": table["example"].astype(str).tolist(),
        "text": [excerpt(text, EXCERPT) for text in table["text"]],
        quantity.replace("_", " "): [f"{value:.3g}" for value in table[quantity]],
    }


def write_data_without(model: IndexedModel, examples: list[int], place: Path) -> None:
    """Write the training data of an index without these examples, and print their number."""
    online = bool(model.origin.get("loading", {}).get("online"))
    n_left = write_without(model.origin["data"], examples, place, online=online)
    pairs({"written": f"{place}, {n_left:,} rows without these {len(examples):,}"})


def write_without(data: str, examples: Sequence[int], path: Path, *, online: bool) -> int:
    """Write the training rows without these examples, as .jsonl.

    Args:
        data: the address of the training data.
        examples: the places of the rows that are left out.
        online: whether the data may be fetched from the Hub.

    Returns:
        The number of rows that were written.

    Raises:
        InputError: no row would be left.
    """
    from blr_analysis.files import drafted
    from blr_analysis.huggingface.data import read_rows

    table, _ = read_rows(data, online=online)
    rows = table.reset_index(drop=True).drop(index=list(examples))
    if not len(rows):
        raise InputError("no row is left: ask for fewer (--top)")
    lines = [json.dumps(json_value(row)) for row in rows.to_dict("records")]
    with drafted(path) as draft:
        draft.write_text("\n".join(lines) + "\n")
    return len(rows)

"""Preference pairs: a model was trained to prefer one answer to another (DPO).

The loss of a pair is that of Rafailov et al. (2023), eq. 7,

    ℓ_i = −log σ(z_i),   z_i = β (log π(y_w|x) − log π_ref(y_w|x) − log π(y_l|x) + log π_ref(y_l|x))

Here y_w is the chosen and y_l the rejected answer. This is the loss of a Bernoulli likelihood with
one output z_i and target 1. π_ref is the model before training: the first weights that
``CheckpointsCallback`` kept, or else an adapter's base. Both are what TRL's ``DPOTrainer`` takes,
the first where the training began with an adapter that had learned something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from blr_analysis.data.batches import to_device
from blr_analysis.errors import DataError, InputError
from blr_analysis.huggingface.chats import IGNORED, Ids, encoded_chat, turns_of
from blr_analysis.huggingface.data import places_of
from blr_analysis.huggingface.models import Pretrained
from blr_analysis.huggingface.tokens import (
    BATCH,
    Tokens,
    check_ids,
    encoded_answer,
    metadata_of,
    words_of_turns,
)
from blr_analysis.runs import training_of
from blr_analysis.snapshots import checked_state
from blr_analysis.task import Task

PAIR = ("chosen", "rejected")
BETA = 0.1  # β, as in the paper of DPO and in TRL
REFERENCE = "reference"  # the key of a batch with the margins of the model before training


@dataclass(frozen=True)
class Pairs:
    """Pairs of answers: a dataset whose batches are padded.

    Attributes:
        chosen, rejected: the answers, each after its prompt.
        references: log π_ref(y_w|x) − log π_ref(y_l|x) of each pair.
    """

    chosen: Tokens
    rejected: Tokens
    references: Sequence[float]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the ids."""
        return self.chosen.tokenizer

    @property
    def cut(self) -> int:
        """The number of answers that were cut."""
        return self.chosen.cut + self.rejected.cut

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "chosen": self.chosen[i],
            "rejected": self.rejected[i],
            REFERENCE: self.references[i],
        }

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch of both answers, each padded to its longest row."""
        return {
            "chosen": self.chosen.collate([row["chosen"] for row in rows]),
            "rejected": self.rejected.collate([row["rejected"] for row in rows]),
            REFERENCE: torch.tensor([row[REFERENCE] for row in rows]),
        }


def preference_task(
    loaded: Pretrained,
    table: Any,
    place: str,
    *,
    max_length: int | None = None,
    beta: float = BETA,
) -> Task:
    """Rows of "chosen" and "rejected" answers (and their "prompt") as a task of their model.

    Answers are texts after a prompt, or lists of messages whose common start is the prompt.

    Args:
        place: the name of the data in errors.
        max_length: longer answers are cut to so many tokens; None: they are an error.
        beta: β.

    Raises:
        InputError: the model before training is not known.
        DataError: as :func:`~blr_analysis.huggingface.questions.language_task`.
    """
    training = training_of(loaded.folder, loaded.model)
    model_before = _model_before(loaded.model, training.get("recipe"))
    columns = [name for name in ("prompt", *PAIR) if name in table]
    words, rows = _encoded_rows(loaded, table[columns].to_dict("records"), places_of(table, place))
    chosen, rejected = (
        _tokens(loaded, rows[name], max_length, name, table, place) for name in PAIR
    )
    pairs: Any = Pairs(chosen, rejected, _margins(loaded.model, model_before, chosen, rejected))

    def forward(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        margin = margin_of(model, batch) - batch[REFERENCE]
        return beta * margin.unsqueeze(1), torch.ones_like(margin).unsqueeze(1)

    task = Task(
        loaded.model,
        DataLoader(pairs, batch_size=BATCH, collate_fn=pairs.collate),
        likelihood="bernoulli",
        forward=forward,
        batch_size=BATCH,
        metadata=metadata_of(table, columns, words),
        **training,
    )
    task.chunk_size = None  # gradients of as many pairs as the memory for a chunk holds
    return task


def _encoded_rows(
    loaded: Pretrained, values_of_rows: Sequence[Mapping[str, Any]], places: Sequence[str]
) -> tuple[list[str], dict[str, list[dict[str, Ids]]]]:
    """The text of every chosen answer; and by "chosen" and "rejected" the ids of every row."""
    encoded = [
        _encoded_pair(loaded, values, place)
        for values, place in zip(values_of_rows, places, strict=True)
    ]
    words = [text for text, _ in encoded]
    return words, {name: [pair[name] for _, pair in encoded] for name in PAIR}


def _tokens(
    loaded: Pretrained,
    rows: Sequence[dict[str, Ids]],
    max_length: int | None,
    name: str,
    table: Any,
    place: str,
) -> Tokens:
    """The answers of one side, checked and cut."""
    for row, place_of_row in zip(rows, places_of(table, place), strict=True):
        check_ids(loaded, row, max_length, f"{name} of {place_of_row}")
    shortened = [{key: ids[:max_length] for key, ids in row.items()} for row in rows]
    n_cut = sum(
        len(short["input_ids"]) < len(row["input_ids"])
        for short, row in zip(shortened, rows, strict=True)
    )
    return Tokens(shortened, loaded.pad_id, max_length, n_cut, loaded.tokenizer)


def margin_of(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """log π(y_w|x) − log π(y_l|x) of each pair, ``[B]``."""
    chosen, rejected = (log_probability(model, batch[name]) for name in PAIR)
    return chosen - rejected


def log_probability(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The log-probability of the labels that count, summed over each row, ``[B]``."""
    inputs = {name: column for name, column in batch.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    counts = labels != IGNORED
    targets = labels.masked_fill(~counts, 0).unsqueeze(-1)
    by_token = logits.log_softmax(-1).gather(-1, targets).squeeze(-1)
    return (by_token * counts).sum(1)


def _encoded_pair(
    loaded: Pretrained, values: Mapping[str, Any], place: str
) -> tuple[str, dict[str, dict[str, Ids]]]:
    """The text of the chosen answer, and the ids of both answers."""
    prompt: Any = values.get("prompt")
    answers = [values[name] for name in PAIR]
    are_texts = all(isinstance(answer, str) and answer.strip() for answer in answers)
    prompt_is_text = isinstance(prompt, str)
    if are_texts and prompt_is_text:
        question = str(prompt)
        chosen, rejected = (encoded_answer(loaded, question, answer) for answer in answers)
        return f"{prompt}{answers[0]}", {"chosen": chosen, "rejected": rejected}
    if are_texts or prompt_is_text:
        raise DataError(
            f"{place} needs a prompt and two answers, all texts or all lists of messages"
        )
    turns = [turns_of(values[name], name, place) for name in PAIR]
    if prompt is not None:
        before = turns_of(prompt, "prompt", place)
        turns = [before + answer for answer in turns]
        n_common = len(before)
    else:
        n_common = _common_turns(*turns)
    chosen, rejected = (encoded_chat(loaded, answer, n_common, place) for answer in turns)
    return words_of_turns(turns[0]), {"chosen": chosen, "rejected": rejected}


def _common_turns(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The number of turns at the start that are the same."""
    for k, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return k
    return min(len(left), len(right))


def _model_before(model: Any, recipe: Any) -> Any:
    """A function that opens a context in which the model has the weights before training.

    Raises:
        InputError: these weights are not known.
    """
    first_weights = None if recipe is None else recipe.initial
    if first_weights is None and hasattr(model, "disable_adapter"):
        return model.disable_adapter
    if first_weights is None:
        raise InputError(
            "pairs of chosen and rejected need the model before training: use an adapter, or "
            "train with CheckpointsCallback, which keeps the first weights"
        )

    first_weights = checked_state(first_weights, model, "the first weights")

    @contextmanager
    def at_first_weights() -> Iterator[None]:
        weights = {
            name: value.clone()
            for name, value in model.state_dict().items()
            if name in first_weights
        }
        try:
            model.load_state_dict(first_weights, strict=False)
            yield
        finally:
            model.load_state_dict(weights, strict=False)

    return at_first_weights


@torch.no_grad()
def _margins(model: Any, model_before: Any, chosen: Tokens, rejected: Tokens) -> list[float]:
    """log π_ref(y_w|x) − log π_ref(y_l|x) of each pair, in batches."""
    device = next(model.parameters()).device
    margins = []
    with model_before():
        for first in range(0, len(chosen), BATCH):
            stretch = slice(first, first + BATCH)
            batch = {
                "chosen": chosen.collate(chosen.rows[stretch]),
                "rejected": rejected.collate(rejected.rows[stretch]),
            }
            margins += margin_of(model, to_device(batch, device)).tolist()
    return margins

"""What is merged in the contest: models fine-tuned from one base on tasks of their own.

A case is one seed of a kind; all kinds are small, so that the whole contest is some minutes of one
core.

* mlp: clothes of 14 × 14 pixels upright, turned by 90° and 180°, inverted; an MLP 196-64-32-10;
* cnn: the same pictures, two convolutions and two linear layers;
* vit: the same pictures, a transformer of two blocks on patches of 2 × 2 pixels;
* llama: a Llama of two layers, letter by letter, on film reviews, product reviews and editorials;
* lora: adapters of that Llama on the same texts, of ranks 4 and 8, one of them rank-stabilised;
* minilm: the last layer's attention of MiniLM, on three of six domains of texts, positive or not.

The base has seen a little of every task, as bases have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.merging.images import cnn, images_of, mlp, vit
from benchmarks.merging.sentiments import sentiments_of
from benchmarks.merging.texts import adapted_texts, texts_of
from benchmarks.merging.trained import Trained
from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.merging.at_weights import at_weights

State = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One seed of a kind.

    Attributes:
        base: θ_0.
        models: θ_t, by the name of the task.
        train, validate, test: each task's data; the model is the architecture, at θ_t in ``train``.
        recorded: by task, the Kronecker factors that its training left behind; empty for adapters.
    """

    base: State
    models: dict[str, State]
    train: dict[str, blr.Task]
    validate: dict[str, blr.Task]
    test: dict[str, blr.Task]
    recorded: Mapping[str, blr.Posterior]

    def evaluations(self, state: State) -> list[Evaluation]:
        """Losses on the test data of every task."""
        return [_evaluation(task, state) for task in self.test.values()]

    def rises_on_training_data(self, state: State) -> list[float]:
        """By task, the mean loss less that of the fine-tuned model, the gap of
        :func:`blr_analysis.gradient_mismatch`."""
        return [
            _evaluation(task, state).nll - _evaluation(task, home).nll
            for task, home in zip(self.train.values(), self.models.values(), strict=True)
        ]

    def own(self) -> list[Evaluation]:
        """Losses of every fine-tuned model on its own task."""
        pairs = zip(self.test.values(), self.models.values(), strict=True)
        return [_evaluation(task, state) for task, state in pairs]


def _evaluation(task: blr.Task, state: State) -> Evaluation:
    with at_weights(task, state, "a merge") as params, torch.no_grad():
        return evaluated(task, params)[0]


def _case(trained: Trained, likelihood: str) -> Case:
    def tasks(part: str) -> dict[str, blr.Task]:
        return {
            name: blr.Task(
                trained.models[name], data[part], likelihood=likelihood, batch_size=250,
                progress=False,
            )
            for name, data in trained.data.items()
        }  # fmt: skip

    return Case(
        _state(trained.base),
        {name: _state(model) for name, model in trained.models.items()},
        tasks("train"),
        tasks("validate"),
        tasks("test"),
        trained.recorded,
    )


def _state(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


CASES: dict[str, Callable[[int], Case]] = {
    "mlp": lambda seed: _case(images_of(mlp, seed), "categorical"),
    "cnn": lambda seed: _case(images_of(cnn, seed), "categorical"),
    "vit": lambda seed: _case(images_of(vit, seed), "categorical"),
    "llama": lambda seed: _case(texts_of(seed), "causal_lm"),
    "lora": lambda seed: _case(adapted_texts(seed), "causal_lm"),
    "minilm": lambda seed: _case(sentiments_of(seed), "categorical"),
}

"""kronfluence's EK-FAC self-influence on a trial problem, in an environment of its own.

    python benchmarks/peer_kronfluence.py mlp|lenet cpu|cuda

Prints one line of JSON. Fitting the factors is not timed; the scores (one number per example)
are, as :mod:`variance` times ours with a fitted posterior.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from cases import case
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from measure import interleaved, peak_above, threads
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import TensorDataset


class Softmax(Task):
    """Minus the log-probability of labels; where a Fisher is fitted, of labels that it draws."""

    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        x, given = batch
        predicted = Categorical(logits=model(x))
        return -predicted.log_prob(predicted.sample() if sample else given).sum()

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)


def main(name: str, device: str) -> None:
    threads(2)
    model, x, y = case(name)
    data, task = TensorDataset(x, y), Softmax()
    model = prepare_model(model, task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(
            name,
            model,
            task,
            cpu=device == "cpu",
            output_dir=folder,
            disable_tqdm=True,
            disable_model_save=True,
        )
        analyzer.fit_all_factors(
            "factors",
            data,
            per_device_batch_size=250,
            overwrite_output_dir=True,
            factor_args=FactorArguments(strategy="ekfac"),
        )

        def call() -> None:
            analyzer.compute_self_scores(
                "scores",
                "factors",
                data,
                per_device_train_batch_size=250,
                overwrite_output_dir=True,
                score_args=ScoreArguments(damping_factor=1.0 / len(x)),
            )

        peak = peak_above(call)
        taken = interleaved({"method": call}, rounds=3, warm=1)
    print(json.dumps({"seconds": taken["method"], "peak_mb": peak / 2**20}))


if __name__ == "__main__":
    main(*sys.argv[1:])

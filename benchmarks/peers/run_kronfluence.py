"""kronfluence: EK-FAC influence at its default damping, its heuristic, and others."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from problem import Method, Problem, main
from torch import Tensor, nn
from torch.utils.data import TensorDataset

DEFAULT_DAMPING = ScoreArguments().damping_factor


class Losses(Task):
    """The problem's loss, for kronfluence."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def compute_train_loss(
        self, batch: tuple[Tensor, Tensor], model: nn.Module, sample: bool = False
    ) -> Tensor:
        outputs = model(batch[0])
        y = batch[1]
        if sample:
            y = self.drawn(outputs.detach())
        return self.problem.losses(outputs, y).sum()

    def drawn(self, outputs: Tensor) -> Tensor:
        """Labels from the model's own predictions."""
        if self.problem.likelihood == "categorical":
            return torch.multinomial(outputs.softmax(-1), 1).flatten()
        if self.problem.likelihood == "bernoulli":
            return torch.bernoulli(outputs.sigmoid())
        return outputs + torch.randn_like(outputs)

    def compute_measurement(self, batch: tuple[Tensor, Tensor], model: nn.Module) -> Tensor:
        return self.problem.losses(model(batch[0]), batch[1]).sum()


def methods(folder: Path) -> dict[str, Method]:
    problem = Problem(folder)

    def scores(damping: float | None) -> Tensor:
        task = Losses(problem)
        model = prepare_model(problem.model(), task)
        train = TensorDataset(problem.x, problem.y)
        test = TensorDataset(problem.x_test, problem.y_test)
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as work:
            quiet: dict[str, Any] = dict(disable_tqdm=True, disable_model_save=True)
            analyzer = Analyzer("peer", model, task, cpu=True, output_dir=work, **quiet)
            analyzer.fit_all_factors(
                "factors",
                train,
                per_device_batch_size=256,
                factor_args=FactorArguments(strategy="ekfac"),
            )
            analyzer.compute_pairwise_scores(
                "scores",
                "factors",
                test,
                train,
                per_device_query_batch_size=64,
                per_device_train_batch_size=256,
                score_args=ScoreArguments(damping_factor=damping),
            )
            found = analyzer.load_pairwise_scores("scores")["all_modules"]
        return found.T / problem.n  # its curvature is a mean over the examples

    return {
        "kronfluence EK-FAC, its damping": lambda: scores(DEFAULT_DAMPING),
        "kronfluence EK-FAC, its heuristic": lambda: scores(None),
        **{
            f"kronfluence EK-FAC, damping {d:g}/N": lambda d=d: scores(d / problem.n)
            for d in problem.dampings
        },
    }


if __name__ == "__main__":
    main(methods)

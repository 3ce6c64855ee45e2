"""traker: TRAK with the same checkpoints that our own ensemble gets, on a CPU."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch
from problem import Method, Problem, main
from torch import Tensor
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset
from trak import TRAKer
from trak.modelout_functions import AbstractModelOutput
from trak.projectors import BasicProjector, ProjectionType


class BinaryOutput(AbstractModelOutput):
    """The margin of a single logit, as TRAK's own for several."""

    def __init__(self) -> None:
        super().__init__()

    @staticmethod
    def get_output(model, weights, buffers, x, y):  # type: ignore[no-untyped-def]
        logit = functional_call(model, (weights, buffers), (x[None],)).flatten()
        return ((2 * y - 1) * logit).sum()

    def get_out_to_loss_grad(self, model, weights, buffers, batch):  # type: ignore[no-untyped-def]
        x, y = batch
        margin = (2 * y - 1) * functional_call(model, (weights, buffers), (x,)).flatten()
        return (1 - margin.sigmoid()).detach()[:, None]


def methods(folder: Path) -> dict[str, Method]:
    problem = Problem(folder)
    size = sum(p.numel() for p in problem.model().parameters())

    def scores(dimensions: int, checkpoints: int) -> Tensor:
        task = "image_classification" if problem.likelihood == "categorical" else BinaryOutput()
        with tempfile.TemporaryDirectory() as work:
            traker = TRAKer(
                model=problem.model(),
                task=task,
                train_set_size=problem.n,
                save_dir=work,
                device="cpu",
                use_half_precision=False,
                logging_level=logging.ERROR,
                projector=BasicProjector(
                    grad_dim=size,
                    proj_dim=dimensions,
                    seed=0,
                    proj_type=ProjectionType.normal,
                    device="cpu",
                    dtype=torch.float32,
                    block_size=max(1, dimensions // 2),  # it frees a single block and never refills
                ),
            )
            train = DataLoader(TensorDataset(problem.x, problem.y), batch_size=100)
            test = DataLoader(TensorDataset(problem.x_test, problem.y_test), batch_size=100)
            for k in range(checkpoints):
                traker.load_checkpoint(problem.weights[k], model_id=k)
                for batch in train:
                    traker.featurize(batch=list(batch), num_samples=len(batch[0]))
            traker.finalize_features()
            for k in range(checkpoints):
                traker.start_scoring_checkpoint(
                    exp_name="test",
                    checkpoint=problem.weights[k],
                    model_id=k,
                    num_targets=len(problem.x_test),
                )
                for batch in test:
                    traker.score(batch=list(batch), num_samples=len(batch[0]))
            found = torch.from_numpy(traker.finalize_scores(exp_name="test").copy())
        return found  # how much an example raises the test margin: leaving it out hurts

    if problem.likelihood not in ("categorical", "bernoulli"):
        return {}
    # a projection wider than the examples or the parameters is singular: noise without a word
    widths = sorted({min(w, problem.n // 2, size // 2) for w in (64, 256, 512)})
    rows: dict[str, Method] = {}
    for w in widths:
        for k in sorted({1, len(problem.weights)}):
            rows[f"TRAK, {w} projections, {k} checkpoint{'s' * (k > 1)}"] = lambda w=w, k=k: scores(
                w, k
            )
    return rows


if __name__ == "__main__":
    main(methods)

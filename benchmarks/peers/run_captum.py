"""captum: TracInCPFast on the trained model and on all checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from captum.influence import TracInCPFast
from problem import Method, Problem, main
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def methods(folder: Path) -> dict[str, Method]:
    problem = Problem(folder)

    def loaded(model: nn.Module, which: Any) -> float:
        model.load_state_dict(problem.weights[int(which)])
        return 1.0

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return problem.losses(outputs, y).sum()

    def scores(checkpoints: int) -> Tensor:
        model = problem.model()
        if isinstance(model, nn.Sequential) and len(model) == 1:
            last = model[0]
            model, load = nn.Sequential(model), lambda m, k: loaded(m[0], k)
        else:
            last = list(m for m in model.modules() if isinstance(m, nn.Linear))[-1]
            load = loaded
        tracin = TracInCPFast(
            model,
            last,
            TensorDataset(problem.x, problem.y),
            [str(k) for k in range(checkpoints)],
            checkpoints_load_func=load,
            loss_fn=loss,
            batch_size=256,
        )
        found = tracin.influence((problem.x_test, problem.y_test), k=None)
        assert isinstance(found, Tensor)
        return found.T

    names = {k: f"TracInCPFast, {k} checkpoint{'s' * (k > 1)}" for k in (1, len(problem.weights))}
    return {name: (lambda k=k: scores(k)) for k, name in names.items()}


if __name__ == "__main__":
    main(methods)

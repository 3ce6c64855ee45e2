"""Networks trained anew for a few epochs, to average over."""

from __future__ import annotations

import pytest
import torch
from snapshots import untouched
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from blr_analysis.errors import InputError

N = 120


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def trained() -> nn.Sequential:
    """A replay's steps make the weights as large as the model's: it has to have some."""
    model, (x, y) = network(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def fitted(model: nn.Module) -> tuple[blr.Task, blr.Posterior]:
    task = blr.Task(model, data())
    return task, blr.fit_laplace(task, prior_precision=2.0, progress=False)


def test_each_network_is_trained_anew_and_has_the_same_prior() -> None:
    task, q = fitted(trained())
    with untouched(task.model):
        *fresh, last = blr.replays(task, q, 3, progress=False)
    again = blr.replays(task, q, 3, progress=False)
    assert last is q and len(fresh) == 3
    x, y = data()
    for one, two in zip(fresh, again, strict=False):
        assert one.prior_precision == 2.0 and one.n_data == N and one.structure == "kron"
        outputs = torch.func.functional_call(task.model, dict(one.mean), (x,))
        assert cross_entropy(outputs, y) < 0.9 * cross_entropy(network()(x), y)
        for name, weight in one.mean.items():
            assert torch.equal(weight, two.mean[name])
    assert not torch.equal(fresh[0].mean["0.weight"], fresh[1].mean["0.weight"])
    matrices = [blr.influence(task, p, task, progress=False).matrix for p in (*fresh, q)]
    mean = blr.influence(task, [*fresh, q], task, progress=False).matrix
    torch.testing.assert_close(mean, torch.stack(matrices).mean(0))


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (dict(count=0), "count"),
        (dict(epochs=0.0), "epochs"),
        (dict(epochs="4"), "epochs"),
        (dict(seed=0.5), "seed"),
    ],
)
def test_bad_settings_are_named(asked: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        blr.replays(*fitted(network()), **asked)  # type: ignore[arg-type]


def test_a_model_that_cannot_be_trained_anew_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    with pytest.raises(InputError, match="BatchNorm"):
        blr.replays(*fitted(model))

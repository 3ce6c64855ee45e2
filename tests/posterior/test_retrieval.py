"""δ under which one half of a text finds the other: against autograd, and where it must and must
not change what was found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.posterior import prior_choice

N, T, LOUD, QUIET = 40, 8, 4, 24
SILENT = {"progress": False}


def texts(telling: str, part: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens' features: what tells a text from others stands in the loud ones, or in the quiet.

    ``part``: other tokens of the same texts.
    """
    own = torch.Generator().manual_seed(0)
    noise = torch.Generator().manual_seed(1 + part)
    loud, quiet = (torch.randn(N, 1, k, generator=own).double() for k in (LOUD, QUIET))
    x = torch.randn(N, T, LOUD + QUIET, generator=noise).double()
    size = torch.tensor([10.0] * LOUD + [0.3] * QUIET)
    same = torch.cat([loud * (telling == "loud"), quiet * (telling == "quiet")], dim=-1)
    return (same * 1.5 + x) * size, torch.zeros(N, T, dtype=torch.long)


def task_of(telling: str, part: int = 0, model: nn.Module | None = None) -> blr.Task:
    x, y = texts(telling, part)
    if model is None:
        model = nn.Linear(LOUD + QUIET, 2).double()
        for p in model.parameters():
            nn.init.normal_(p, std=0.02, generator=torch.Generator().manual_seed(0))
    y[:, -2:] = -100  # six tokens count
    return blr.Task(model, (x, y), likelihood="tokens")


def found(task: blr.Task, delta: float | str | None, structure: str = "kron") -> blr.Posterior:
    how = {"structure": structure, "curvature": "empirical_fisher", **SILENT}
    return blr.fit_laplace(task, prior_precision=delta, **how)


def first(task: blr.Task, q: blr.Posterior, asked: blr.Task) -> float:
    """How many texts are the best source of their own other tokens."""
    top = blr.top_influence(task, q, asked, k=1, normalize=True, **SILENT).helpful[:, 0]
    return float((top == torch.arange(N)).double().mean())


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_ranks_of_halves_are_those_of_gradients(structure: str) -> None:
    task = task_of("quiet")
    (x, y), model = texts("quiet"), task.model

    def gradient(tokens: slice) -> dict[str, Tensor]:
        each = []
        for row, target in zip(x[:, tokens], y[:, tokens], strict=True):
            loss = nn.functional.cross_entropy(model(row), target, reduction="sum")
            each.append(torch.autograd.grad(loss, list(model.parameters())))
        named = zip(dict(model.named_parameters()), zip(*each, strict=True), strict=True)
        return {n: torch.stack(rows) for n, rows in named}

    halves = gradient(slice(0, 3)), gradient(slice(3, 6))  # of six tokens that count
    about = found(task, "retrieval", structure).record["prior_choice"]["retrieval"]
    assert about["texts"] == N and len(about["mrr"]) == 1 + len(prior_choice.TIMES)
    for delta, mrr in about["mrr"].items():
        q = found(task, float(delta), structure)
        a, b = (
            torch.cat([v.flatten(1) for v in q.covariance_root_product(half).values()], dim=1)
            for half in halves
        )
        c = nn.functional.normalize(a) @ nn.functional.normalize(b).T
        ranks = torch.cat([1.0 + (m > m.diagonal()).sum(0) for m in (c, c.T)])
        assert mrr == pytest.approx(float((1 / ranks).mean()), abs=0.02)  # held in bfloat16


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("telling", ["quiet", "loud"])
def test_sources_are_found_better_or_as_well(telling: str, structure: str) -> None:
    """Of other tokens of the same texts, which the rule has not seen; a smaller δ would help in
    one of the two cases alone."""
    task = task_of(telling)
    asked = task_of(telling, 1, task.model)
    plain, chosen = (found(task, delta, structure) for delta in (None, "retrieval"))
    gain = first(task, chosen, asked) - first(task, plain, asked)
    if telling == "quiet":
        assert chosen.prior_precision < plain.prior_precision and gain > 0.15
    else:
        assert chosen.prior_precision >= plain.prior_precision and gain >= 0


def test_it_says_what_it_chose_and_from_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of("quiet")
    q, plain = found(task, "retrieval"), found(task, None)
    q.save(tmp_path / "q")
    about = blr.Posterior.load(tmp_path / "q").record["prior_choice"]
    assert about["rule"] == "retrieval" and about["delta"] == q.prior_precision
    assert about["evidence"] == plain.prior_precision == about["retrieval"]["before"]
    assert "retrieval" in repr(q)
    monkeypatch.setattr(prior_choice, "ROOM", 0)  # of one layer alone
    assert found(task, "retrieval").prior_precision < plain.prior_precision
    monkeypatch.setattr(prior_choice, "FEWEST", N + 1)
    few = found(task, "retrieval")
    assert few.prior_precision == plain.prior_precision and "too few" in repr(few)


def test_what_has_no_halves_is_refused() -> None:
    x, y = texts("quiet")
    task = task_of("quiet")
    with pytest.raises(InputError, match="sequences"):
        found(task, "retrieval", "lowrank")
    with pytest.raises(InputError, match="prior_precision"):
        found(task, "best")
    single = blr.Task(nn.Linear(LOUD + QUIET, 2).double(), (x[:, 0], y[:, 0]))
    with pytest.raises(InputError, match="sequences"):
        found(single, "retrieval")

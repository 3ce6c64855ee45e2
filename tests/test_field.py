"""The field benchmark's truth and arithmetic, on a table trained for an epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.field import cases, tables, truth

NAME = "table"
TINY = cases.Case(cases.breast_cancer, cases.mlp(30, 4, 2), "adamw", 1e-2, 0.0, 3, 100)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> truth.Truth:
    monkeypatch.setitem(cases.CASES, NAME, TINY)
    monkeypatch.setattr(truth, "HALVES", 4)
    monkeypatch.setattr(truth, "SINGLES", 4)
    return truth.of(NAME, tmp_path, seeds=2)


def test_truth_is_kept_until_its_recipe_changes(
    known: truth.Truth, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []
    monkeypatch.setattr(truth, "train", lambda *args: calls.append(args) or cases.train(*args))
    again = truth.of(NAME, tmp_path, seeds=2)
    assert not calls
    for kind, losses in known.losses.items():
        assert torch.equal(losses, again.losses[kind])
    monkeypatch.setitem(cases.CASES, NAME, replace(TINY, lr=2e-2))
    other = truth.of(NAME, tmp_path, seeds=1, kinds=["models"])
    assert len(calls) == 1
    assert not torch.equal(other.losses["models"], known.losses["models"][:1])


def test_retrainings_have_the_changed_data(known: truth.Truth) -> None:
    data = known.data
    for kind, change in (("groups", lambda k: data.groups != k), ("halves", truth.halves(400))):
        for k, (x, y) in enumerate(truth.changed(data, kind)):
            kept = change(k) if callable(change) else change[k]
            assert torch.equal(x, data.x[kept]) and torch.equal(y, data.y[kept])
    for k, ((x, y), change) in enumerate(
        zip(truth.changed(data, "relabelled"), truth.relabelled(data), strict=True)
    ):
        moved = (y != data.y).nonzero().flatten()
        assert torch.equal(x, data.x) and sorted(change) == moved.tolist()
        assert len(moved) == -(-int((data.groups == k).sum()) // 10)
        assert bool((data.groups[moved] == k).all())


def test_a_single_example_is_left_out_of_its_minibatch(known: truth.Truth) -> None:
    """Whose training is the same up to there."""
    data, left = known.data, truth.singles(400)
    assert len(left) == 4 and known.losses["singles"].shape == (2, 4, len(data.test_x) + 4)
    model = cases.train(TINY, data.x, data.y, 1, without=left[2])
    x, y = torch.cat([data.test_x, data.x[left]]), torch.cat([data.test_y, data.y[left]])
    with torch.no_grad():
        again = cases.test_losses(model(x)[None], y)[0]
    assert torch.equal(known.losses["singles"][1, 2], again)
    once, kept = replace(TINY, optimizer="sgd", lr=1.0, epochs=1, batch=400), torch.arange(400) != 7
    models = (
        cases.train(once, data.x, data.y, 0, without=torch.tensor(7)),
        cases.train(once, data.x[kept], data.y[kept], 0),
        cases.train(once, data.x, data.y, 0),
    )
    less, other, whole = (nn.utils.parameters_to_vector(m.parameters()).detach() for m in models)
    assert float((less - other).abs().max()) < 1e-6 < 1e-4 < float((less - whole).abs().max())
    rows = list(tables.left_out(known, 1))
    assert [row[0] for row in rows][:2] == ["one seed against the others", "leave_one_out"]
    assert {len(row) for row in rows} == {7}
    true = tables.rise_of(torch.arange(4 * 9).view(4, 9).double() ** 2)
    assert tables.risen([true], [true]) == ("1.00",) * 6
    assert tables.risen([{"own": 2 * true["own"]}], [true]) == ("1.00", "1.00", "2.00", "", "", "")


def test_a_perfect_answer_scores_one_and_the_ceiling_is_the_other_seeds() -> None:
    true = torch.tensor([1.0, 2.0, 4.0, 3.0]).double()
    perfect = {"after": true, "before": torch.ones(4).double(), "low": true - 1, "high": true}
    perfect["kept"] = torch.tensor([True, True, True, False])
    halved = {**perfect, "after": true / 2, "high": true - 0.5}
    assert tables.described([perfect], true) == ("1.00", "0.00", "0.42", "1.00")
    assert tables.described([halved], true) == ("1.00", "0.50", "0.42", "0.00")
    rows = torch.stack([true, true, 2 * true])
    assert tables.top(rows)[:2] == ("1.00", f"{(1 / 3 + 1 / 3 + 1) / 3:.2f}")

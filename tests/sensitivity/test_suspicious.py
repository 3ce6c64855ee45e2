"""Relabelling gains against retraining, twins against dense linear algebra, and faults planted."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from oracles import dense_precision
from oracles_retraining import trained
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import blr_analysis as blr
from blr_analysis.sensitivity.labels import relabelling_gains
from blr_analysis.sensitivity.results import Suspicions
from blr_analysis.sensitivity.suspicious import CLOSE
from blr_analysis.sensitivity.twins import nearest, responses_of
from blr_analysis.sensitivity.wrong_labels import chance_of_wrong_labels

DELTA = 1.0
CENTRES = torch.tensor([[2.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)


def laplace(model: nn.Module, x: Tensor, y: Tensor) -> tuple[blr.Task, blr.Posterior]:
    task = blr.Task(model, (x, y))
    return task, blr.fit_laplace(task, structure="full", prior_precision=DELTA)


def blobs(n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return CENTRES[y] + torch.randn(n, 2, generator=g, dtype=torch.float64), y


def test_gain_is_the_difference_of_two_losses() -> None:
    g = torch.Generator().manual_seed(0)
    f = torch.randn(7, 4, generator=g)
    y = torch.randint(4, (7,), generator=g)
    categorical = blr.Categorical()
    gains = relabelling_gains(categorical, f, y)
    for c in range(4):
        label = torch.full_like(y, c)
        reference = categorical.nll(f, y) - categorical.nll(f, label)
        differs = label != y
        torch.testing.assert_close(gains[differs, c], reference[differs])
        assert (gains[~differs, c] == -torch.inf).all()
    bernoulli = blr.Bernoulli()
    t = torch.randint(2, (7, 4), generator=g).float()
    for c in range(4):
        flipped = t.clone()
        flipped[:, c] = 1 - t[:, c]
        reference = bernoulli.nll(f, t) - bernoulli.nll(f, flipped)
        torch.testing.assert_close(relabelling_gains(bernoulli, f, t)[:, c], reference)


@pytest.mark.slow
def test_responses_have_the_posterior_covariance_of_the_outputs() -> None:
    x, y = blobs(12)
    task, q = laplace(trained("categorical", x, y, DELTA, 3), x, y)
    drawn = [responses_of(task, q, samples=128, seed=seed)[0] for seed in range(25)]
    moves = torch.cat(drawn, 1)
    assert moves.shape == (12, 25 * 128 * 3)
    actual = moves @ moves.T / (25 * 128)
    rows = jacrev(lambda p: functional_call(task.model, p, x))(q.mean)
    j = torch.cat([rows[name].flatten(2) for name in q.mean], 2)
    p = j.flatten(0, 1).T.reshape(-1, 36)
    sigma = torch.linalg.inv(dense_precision(q))
    gram = (p.T @ sigma @ p).reshape(12, 3, 12, 3).diagonal(dim1=1, dim2=3).sum(-1)
    torch.testing.assert_close(actual, gram, rtol=0.1, atol=0.1 * float(gram.abs().mean()))


def test_nearest_against_all_distances() -> None:
    g = torch.Generator().manual_seed(0)
    unit = nn.functional.normalize(torch.randn(40, 5, generator=g, dtype=torch.float64), dim=1)
    unit[3] = unit[11]
    unit[20] = 0  # an example whose predictions never move
    distance = torch.cdist(unit, unit)
    distance.fill_diagonal_(torch.inf)
    closeness, twin, is_twin = nearest(unit, torch.full((40,), 1e-7), progress=False)
    rows = torch.arange(40) != 20
    distances = distance[rows]
    distances[:, 20] = 2**0.5  # 2 − 2 · 0
    sorted_ = distances.sort(dim=1).values
    torch.testing.assert_close(closeness[rows], 1 - sorted_[:, 0] / sorted_[:, 9])
    torch.testing.assert_close(distances.gather(1, twin[rows, None]), sorted_[:, :1])
    assert (float(closeness[3]), int(twin[3]), int(twin[11])) == (1.0, 11, 3)
    assert float(closeness[20]) == 0
    assert is_twin.nonzero().flatten().tolist() == [3, 11]


@pytest.mark.parametrize(
    ("width", "hidden", "slips"),
    [
        (2, 32, [0.0]),  # in the plane 2,000 points are too close for more
        (10, 32, [0.0, 1e-4, 1e-2]),
        (50, 0, [0.0, 1e-2, 0.05]),
        (784, 0, [0.0, 1e-2, 0.1]),
    ],
)
def test_gaussian_rows_have_no_twins_but_those_planted(
    width: int, hidden: int, slips: list[float]
) -> None:
    """Rows of the very seed that the default directions might come from; copies with slips far
    below the distance of neighbours (1e-2 among 2,000 in the plane) are told, three alike too."""
    torch.manual_seed(0)
    x = torch.randn(2000, width)
    if hidden:
        model = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    else:
        model = nn.Sequential(nn.Linear(width, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    y = torch.randint(3, (2000,))
    for rows in torch.randperm(2000).split(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()

    def suspected(x: Tensor) -> list[int]:
        task = blr.Task(model, (x, y))
        q = blr.fit_laplace(task, prior_precision=1.0)
        closeness, _, is_twin = nearest(*responses_of(task, q, samples=32))
        return (is_twin & (closeness > CLOSE)).nonzero().flatten().tolist()

    assert suspected(x) == []
    slip = torch.tensor(slips * 21)[:21, None]
    x[-21:] = x[[*range(20), 0]] + slip * torch.randn(21, width)
    assert suspected(x) == [*range(20), *range(1979, 2000)]


@pytest.mark.slow
def test_planted_faults_in_digits() -> None:
    """Wrong labels above the plain loss, noise above the confidence, copies all of them."""
    pixels, targets = load_digits(return_X_y=True)
    g = torch.Generator().manual_seed(0)
    x = torch.tensor(pixels[:900]).float() / 16
    y = torch.tensor(targets[:900])
    y[:45] = (y[:45] + torch.randint(1, 10, (45,), generator=g)) % 10
    x = torch.cat([x, torch.rand(30, 64, generator=g), x[100:120]])
    y = torch.cat([y, torch.randint(10, (30,), generator=g), y[100:120]])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    task = blr.Task(model, (x, y))
    qs = []
    for epoch in range(60):
        for batch in torch.randperm(len(x), generator=g).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        if epoch % 12 == 11:
            qs.append(blr.fit_laplace(task, structure="kron", prior_precision=10.0))
    suspicions = blr.suspicious(task, qs, samples=128)  # of ten outputs four mixtures
    flipped = torch.zeros(len(x), dtype=torch.bool)
    flipped[:45] = True
    clean = torch.arange(len(x)) < 900
    plain = blr.sensitivity(task, qs[-1]).losses
    ours = roc_auc_score(flipped[clean], suspicions.losses[clean])
    assert ours > roc_auc_score(flipped[clean], plain[clean]) + 0.002
    first = suspicions.order[:45].tolist()
    assert sum(i < 45 for i in first) >= 40  # of 45, by the mean loss of five checkpoints
    noise = torch.arange(len(x)).ge(900) & torch.arange(len(x)).lt(930)
    assert roc_auc_score(noise, suspicions.unfamiliarity) > roc_auc_score(noise, plain) > 0.5
    assert suspicions.closeness is not None
    assert (suspicions.closeness[930:] == 1).all()
    kinds = pd.Series(suspicions.kind)
    called = (kinds == "label").to_numpy().nonzero()[0]
    assert (called < 45).all()  # where nothing measured the scale few are called, or none
    assert (kinds[930:] == "duplicate").mean() > 0.6


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_other_likelihoods(likelihood: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=g)
    y = (x[:, 0] > 0).float()
    task = blr.Task(nn.Linear(2, 1), (x, y), likelihood=likelihood)
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    suspicions = blr.suspicious(task, q)
    loo = blr.leave_one_out(task, q)
    if likelihood == "gaussian":
        assert suspicions.proposed is None
        torch.testing.assert_close(suspicions.left_out, loo.losses)
        first = suspicions.losses.argsort(descending=True)[:2].tolist()  # a share of a twentieth
        assert [i for i in range(30) if suspicions.kind[i] == "label"] == sorted(first)
        assert suspicions.table.proposed.isna().all()
    else:
        assert suspicions.proposed is not None
        torch.testing.assert_close(suspicions.proposed.flatten(), 1 - y)
        contradicted = task.likelihood.nll(loo.logits, 1 - loo.targets) < loo.losses
        first = suspicions.order[: int(contradicted.sum())]
        assert set(first.tolist()) == set(contradicted.nonzero().flatten().tolist())
        assert "label" not in suspicions.kind  # fresh weights explain no label


PLANTED = list(range(5, 60, 10))


def planted() -> tuple[Tensor, Tensor]:
    """Blobs of which a tenth, in the middle of their blob, have the next label."""
    x, y = blobs()
    x[PLANTED] = 1.5 * CENTRES[y[PLANTED]]
    y[PLANTED] = (y[PLANTED] + 1) % 3
    return x, y


def test_tables_pictures_and_scores() -> None:
    x, y = planted()
    task, q = laplace(trained("categorical", x, y, DELTA, 3), x, y)
    named = blr.Task(task.model, (x, y), metadata={"source": [f"s{i}" for i in range(60)]})
    suspicions = blr.suspicious(named, q, duplicates=False)
    table = suspicions.table
    assert table["index"].tolist() == suspicions.order.tolist()
    first = table.iloc[0]
    assert first["index"] in PLANTED
    assert first.kind == "label"
    assert first.source == f"s{first['index']}"
    called = table[table.kind == "label"]
    assert suspicions.precision == pytest.approx(called.wrong.mean())
    assert (called.wrong > 0.5).all()
    assert set(PLANTED) <= set(called["index"])
    losses = nn.functional.cross_entropy(task.model(x), y, reduction="none").detach()
    assert table.training_loss.to_numpy() == pytest.approx(losses[suspicions.order].numpy())
    assert table.loss.tolist() == suspicions.losses[suspicions.order].tolist()
    assert table.left_out_loss.tolist() == suspicions.left_out[suspicions.order].tolist()
    assert set(table.kind.cat.categories) == {"label", "unfamiliar", "duplicate", "none"}
    ax = suspicions.plot()
    assert sum(len(points.get_offsets()) for points in ax.collections) == 60
    words = " ".join(text.get_text() for text in ax.get_legend().get_texts())
    assert f"label ({suspicions.kind.count('label')})" in words
    assert f"{suspicions.kind.count('label')} label" in repr(suspicions)
    assert suspicions.score("label") is suspicions.losses
    assert suspicions.score("unfamiliar") is suspicions.unfamiliarity


def test_a_wrong_label_that_the_end_knows_by_heart_is_found_in_the_run() -> None:
    """At the end its loss is the least of all; most checkpoints contradicted it."""
    x, y = blobs()
    x[5] = CENTRES[y[5]]
    y[5] = (y[5] + 1) % 3
    model = trained("categorical", x, y, DELTA, 3)
    task, last = laplace(model, x, y)
    heart = {n: m.clone() for n, m in last.mean.items()}
    heart["weight"] += 3 * nn.functional.one_hot(y[5:6], 3).T * x[5]

    def suspicions_of(*earlier: blr.Posterior) -> Suspicions:
        q = blr.Posterior(heart, last.form, prior_precision=1.0, n_data=60, earlier=earlier)
        return blr.suspicious(task, q, duplicates=False)

    runs = [suspicions_of(), suspicions_of(last), suspicions_of(last, last)]
    places = [suspicions.order.tolist().index(5) for suspicions in runs]
    assert places[2] < min(places[:2])
    losses = [float(suspicions.losses[5]) for suspicions in runs]
    assert losses[2] > losses[1] > 10 * losses[0]


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_class_that_no_example_has_is_not_proposed(absent: int) -> None:
    x, y = planted()
    present = y != absent
    model = nn.Linear(2, 3).double()
    with torch.no_grad():
        model.bias[absent] += 10.0  # the model's first choice
    task = blr.Task(model, (x[present], y[present]))
    q = blr.fit_laplace(task, structure="full", prior_precision=DELTA)
    proposed = blr.suspicious(task, q, duplicates=False).proposed
    assert proposed is not None
    torch.testing.assert_close(proposed, 3 - absent - y[present])  # the other class that is there


def test_right_labels_are_not_called_wrong_by_chance() -> None:
    """Labels drawn from a weak model's own probabilities: its errors are no wrong labels."""
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(200, 2, generator=g, dtype=torch.float64)
        labels = torch.multinomial(logits.softmax(1), 1, generator=g).flatten()
        assert float(chance_of_wrong_labels(blr.Categorical(), logits, labels).max()) == 0


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.2])
def test_as_many_labels_are_wrong_as_the_chances_say(rate: float) -> None:
    """Labels drawn by the very model of the chances, from predictions that are too sure."""
    g = torch.Generator().manual_seed(1)
    n = 20_000
    classes = 5
    sureness = 0.5
    logits = 8.0 * torch.randn(n, classes, generator=g, dtype=torch.float64)
    truth = torch.multinomial((sureness * logits).softmax(1), 1, generator=g).flatten()
    wrong = torch.rand(n, generator=g) < rate
    shift = torch.randint(1, classes, (n,), generator=g)
    labels = torch.where(wrong, (truth + shift) % classes, truth)
    chances = chance_of_wrong_labels(blr.Categorical(), logits, labels)
    noise = 3 * float((chances * (1 - chances)).sum().sqrt()) + 0.01 * n
    assert abs(float(chances.sum()) - int(wrong.sum())) < noise
    called = chances > 0.5
    if rate == 0.2:
        expected = float(chances[called].sum())
        n_wrong = int((wrong & called).sum())
        assert abs(n_wrong - expected) < 4 * expected**0.5
        assert n_wrong > 0


def test_losses_side_by_side_have_no_weights() -> None:
    x, y = planted()
    model = trained("categorical", x, y, DELTA, 3)
    weights = torch.linspace(0.2, 5.0, 60)
    by_class = blr.Categorical(weight=[0.1, 1.0, 9.0])
    losses = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
    for options in ({"weights": weights}, {"likelihood": by_class}):
        task = blr.Task(model, (x, y), **options)
        q = blr.fit_laplace(task, structure="full", prior_precision=DELTA)
        suspicions = blr.suspicious(task, q, duplicates=False)
        loo = blr.leave_one_out(task, q)
        left_out = nn.functional.cross_entropy(loo.logits, y, reduction="none")
        torch.testing.assert_close(suspicions.left_out, left_out)
        torch.testing.assert_close(suspicions.training, losses)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("n", "every", "steps", "reason"),
    [
        (100, 1, 3, "own errors explain them"),
        (300, 10, 100, "own errors explain them"),
        (600, 10, 20, ""),
    ],
)
def test_where_no_label_is_called_wrong_a_line_says_why(
    n: int, every: int, steps: int, reason: str, weighted: bool
) -> None:
    """Labels drawn at random are not explained; thirty examples a class are learned by heart."""
    pixels, targets = load_digits(return_X_y=True)
    x = torch.tensor(pixels[:n]).float() / 16
    y = torch.tensor(targets[:n])
    wrong = torch.arange(0, n, every)
    g = torch.Generator().manual_seed(0)
    y[wrong] = (y[wrong] + torch.randint(1, 10, (len(wrong),), generator=g)) % 10
    weight = n / (10 * torch.bincount(y, minlength=10).float()) if weighted else None
    loss = nn.CrossEntropyLoss(weight=weight)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    task = blr.Task(model, (x, y), likelihood=loss)
    suspicions = blr.suspicious(task, blr.fit_laplace(task), duplicates=False)
    called = suspicions.kind.count("label")
    assert bool(called) == (reason == "")
    assert ("no label is called wrong" in suspicions.note) == (not called)
    assert reason in suspicions.note
    assert suspicions.table.attrs["note"] == suspicions.note

"""How near the estimates come to a case's truth: the rows of the three tables."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.agreement import metrics, runner
from benchmarks.agreement.cases import Case as Asked
from benchmarks.field.cases import Case, test_losses, train
from benchmarks.field.truth import Truth, asked, halves, relabelled, singles
from benchmarks.peers.problem import build
from benchmarks.truth import store

JUDGED = 200  # test examples of the datamodeling score
LARGEST = 10_000  # parameters; of more, a fit of low rank takes ten minutes and longer
LOOKS = 3  # checkpoints, of one run or of several seeds
PEERS = ("kronfluence", "dattri", "traker")
GRID = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # N times a peer's damping
DEFAULT = 1.0  # where a peer has no default of its own
LIMIT = 150.0  # seconds that a peer may take, all its methods together
Row = tuple[str, ...]


def task_of(truth: Truth, model: nn.Module) -> blr.Task:
    """What the package is told: the model, its data, and the loss that was trained."""
    data = truth.data
    columns = {"group": data.groups.tolist()}
    return blr.Task(model, (data.x, data.y), likelihood=truth.case.loss(), metadata=columns)


def judged_by(truth: Truth, model: nn.Module, count: int | None = None) -> blr.Task:
    """The test examples under the plain loss."""
    data = truth.data
    likelihood = truth.case.loss() if data.y.is_floating_point() else "categorical"
    return blr.Task(model, (data.test_x[:count], data.test_y[:count]), likelihood=likelihood)


def fitted(task: blr.Task, structure: str = "kron", **options: Any) -> blr.Posterior:
    return blr.fit_laplace(task, structure=structure, prior_precision=None, **options)


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).abs() / b).mean())


def leave_one_seed_out(rows: Tensor, score: Callable[[Tensor, Tensor], float]) -> float:
    """The score of one seed (a row) against the mean of the others, averaged: the ceiling."""
    seeds = range(len(rows))
    others = [rows[[k for k in seeds if k != s]].mean(0) for s in seeds]
    return sum(score(rows[s], others[s]) for s in seeds) / len(rows)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(metrics.pearson(a, b))


def described(answers: list[dict[str, Tensor]], true: Tensor) -> Row:
    """Means over the models of Pearson's r, error, "nothing", and what the intervals hold."""
    cells = []
    for found in answers:
        kept = found["kept"]
        after, right = found["after"][kept], true[kept]
        inside = (found["low"][kept] <= right) & (right <= found["high"][kept])
        cells.append(
            (
                correlation(after, right),
                relative(after, right),
                relative(found["before"][kept], right),
                float(inside.double().mean()),
            )
        )
    means = torch.tensor(cells).mean(0).tolist()
    return tuple(f"{value:.2f}" for value in means)


def top(rows: Tensor) -> Row:
    """The ceiling's cells."""
    scores = (leave_one_seed_out(rows, score) for score in (correlation, relative))
    return (*(f"{score:.2f}" for score in scores), "", "")


def groups(truth: Truth, models: int, folder: Path) -> Iterator[Row]:
    """Without each group: by default, with as many passes as epochs, with two retrained."""
    case = truth.case
    rows = truth.losses["groups"].double().mean(2)
    yield ("one seed against the others", *top(rows), f"{case.epochs}")

    def again(data: Any, seed: int) -> nn.Module:
        x, y = (
            torch.stack(part) for part in zip(*(data[i] for i in range(len(data))), strict=True)
        )
        return train(case, x, y, seed)

    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "as many passes as epochs": {"passes": case.epochs},
        "default, two groups retrained": {"train": again, "seeds": 3, "cache": folder / "two"},
    }
    for label, options in settings.items():
        answers, spent, solvers = [], 0.0, set()
        for model in truth.models[:models]:
            task = task_of(truth, model)
            each = blr.what_if_each(
                *(task, fitted(task)),
                by="group",
                evaluate=judged_by(truth, model),
                **options,
            )
            named = {"after": "nll_after", "before": "nll_before", "low": "nll_low"}
            named["high"] = "nll_high"
            found = {k: torch.tensor(each[column].to_numpy()) for k, column in named.items()}
            found["kept"] = torch.tensor((each.solver != "retrain").to_numpy())
            answers.append(found)
            spent = max(spent, each.passes.max())
            solvers |= set(each.solver) - {"retrain"}
        yield (label, *described(answers, rows.mean(0)), f"{spent:.0f}, {', '.join(solvers)}")


def relabellings(truth: Truth, models: int) -> Iterator[Row]:
    """A tenth of each group with another target."""
    rows = truth.losses["relabelled"].double().mean(2)
    yield ("one seed against the others", *top(rows), f"{truth.case.epochs}")
    answers, solvers = [], set()
    for model in truth.models[:models]:
        task, judged = task_of(truth, model), judged_by(truth, model)
        q = fitted(task)
        options: dict[str, Any] = {"evaluate": judged, "progress": False}
        found = [blr.what_if(task, q, relabel=c, **options) for c in relabelled(truth.data)]
        ends = torch.tensor([one.interval for one in found])
        answers.append(
            {
                "after": torch.tensor([one.nll for one in found]),
                "before": torch.tensor([one.before.nll for one in found]),
                "low": ends[:, 0],
                "high": ends[:, 1],
                "kept": torch.ones(len(found), dtype=torch.bool),
            }
        )
        solvers |= {(one.solver, f"{one.passes:.0f}") for one in found}
    used = ", ".join(f"{passes}, {solver}" for solver, passes in sorted(solvers))
    yield ("default", *described(answers, rows.mean(0)), used)


def left_out(truth: Truth, models: int) -> Iterator[Row]:
    """One example at a time: what its own loss and those of test examples rise by."""
    (x, y), left = asked(truth.data, "singles"), singles(len(truth.data.x))
    count = len(x) - len(left)
    judged = torch.cat([torch.arange(min(JUDGED, count)), torch.arange(count, len(x))])
    x, y = x[judged], y[judged]
    with torch.no_grad():
        before = test_losses(torch.stack([model(x) for model in truth.models]), y)
    rise = truth.losses["singles"][:, :, judged].double() - before[:, None]  # [seeds, 48, 200 + 48]
    seeds, true = range(len(rise)), rise_of(rise.mean(0))
    others = [rise_of(rise[[k for k in seeds if k != s]].mean(0)) for s in seeds]
    yield ("one seed against the others", *risen([rise_of(r) for r in rise], others))
    answers: dict[str, list[dict[str, Tensor]]] = {}
    for k, model in enumerate(truth.models[:models]):
        task = task_of(truth, model)
        q = fitted(task)
        alone = blr.leave_one_out(task, q)
        own = test_losses(alone.logits[None, left], y[-len(left) :])[0] - before[k, -len(left) :]
        answers.setdefault("leave_one_out", []).append({"own": own})
        where = blr.Task(model, (x, y), likelihood=truth.case.loss())
        for label, solver in (("influence", "auto"), ("influence, kron", "posterior")):
            options: dict[str, Any] = {"measure": test_losses, "solver": solver, "progress": False}
            matrix = blr.influence(task, q, where, **options)[left].as_subclass(Tensor)
            answers.setdefault(label, []).append(rise_of(matrix))
        where = judged_by(truth, model, JUDGED)
        options = {"evaluate": where, "progress": False}
        each = [blr.what_if(task, q, remove=[i], **options) for i in left.tolist()]
        mean = torch.tensor([one.change for one in each])
        answers.setdefault("what_if", []).append({"mean": mean})
    for label, of in answers.items():
        yield (label, *risen(of, [true] * len(of)))


def rise_of(changes: Tensor) -> dict[str, Tensor]:
    """Of changes ``[48, 200 + 48]``: of the examples' own losses, of every test loss and of their
    mean."""
    tests, own = changes[:, : -len(changes)], changes[:, -len(changes) :].diagonal()
    return {"own": own, "mean": tests.mean(1), "each": tests}


def risen(answers: list[dict[str, Tensor]], true: list[dict[str, Tensor]]) -> Row:
    """Means over the models: own losses' Pearson's r, rank correlation and total, the mean test
    loss's r and rank correlation, the mean rank correlation of every test loss."""

    def mean(part: str, score: Callable[[Tensor, Tensor], float]) -> str:
        if part not in answers[0]:
            return ""
        pairs = zip(answers, true, strict=True)
        return f"{sum(score(a[part], b[part]) for a, b in pairs) / len(answers):.2f}"

    def ranks(a: Tensor, b: Tensor) -> float:
        return metrics.bootstrap(metrics.spearman(a.view(len(a), -1), b.view(len(b), -1))).value

    total = mean("own", lambda a, b: float(a.double().sum() / b.double().sum()))
    tests = (mean("mean", correlation), mean("mean", ranks), mean("each", ranks))
    return mean("own", correlation), mean("own", ranks), total, *tests


def datamodeling(truth: Truth, models: int, folder: Path, peers: Path | None) -> Iterator[Row]:
    """Linear datamodeling scores: ours, and every peer's at its default and its best damping."""
    case, data = truth.case, truth.data
    rows = truth.losses["halves"][:, :, :JUDGED].double()
    true, kept = rows.mean(0), halves(len(data.x))
    yield (
        "one seed against the others",
        f"{leave_one_seed_out(rows, lambda a, b: metrics.ceiling(b, a).value):.3f}",
        "",
    )

    def score(influence: Tensor) -> float:
        plain = influence.as_subclass(Tensor).double()
        return metrics.linear_datamodeling(plain, kept, true).value

    def influence(model: nn.Module, posterior: Any, solver: str = "posterior") -> Tensor:
        # of the plain loss, whatever was trained
        judged = blr.Task(
            model, (data.test_x[:JUDGED], data.test_y[:JUDGED]), likelihood=case.loss()
        )
        options: dict[str, Any] = {"measure": test_losses, "solver": solver, "progress": False}
        return blr.influence(task_of(truth, model), posterior, judged, **options)

    def mean(posteriors: Iterable[Any], solver: str = "posterior") -> Row:
        pairs = zip(chosen, posteriors, strict=True)
        each = [score(influence(model, q, solver)) for model, q in pairs]
        return (f"{sum(each) / len(each):.3f}", f"{each[0]:.3f}")

    chosen = truth.models[:models]
    tasks = [task_of(truth, model) for model in chosen]
    posteriors = [fitted(task) for task in tasks]
    yield ("default", *mean(posteriors, "auto"))
    yield ("kron", *mean(posteriors))
    pairs = zip(tasks, posteriors, strict=True)
    yield ("kron, expected", *mean(fitted(task, expected=q) for task, q in pairs))
    yield ("diag", *mean(fitted(task, "diag") for task in tasks))
    yield ("plain gradients", *mean(plain(q) for q in posteriors))
    starts = [first_weights(case, seed) for seed in range(models)]
    pairs = zip(tasks, starts, strict=True)
    known = [fitted(task, initial=start) for task, start in pairs]
    yield ("default, first weights known", *mean(known, "auto"))
    yield ("kron, first weights known", *mean(known))
    if sum(p.numel() for p in chosen[0].parameters()) <= LARGEST:
        yield ("lowrank", *mean(fitted(task, "lowrank") for task in tasks))
    runs = [run(truth, seed) for seed in range(models)]
    yield (f"kron, {LOOKS} checkpoints of a run", *mean(seen.checkpoints for seen in runs))
    yield ("kron, recorded in training", *mean(seen.recorded for seen in runs))
    own = [seen.own for seen in runs if seen.own is not None]
    if own:
        yield ("the optimizer's own", *mean(own))
    pairs = zip(tasks, posteriors, strict=True)
    yield ("kron, with 4 replays", *mean(blr.replays(t, q, progress=False) for t, q in pairs))
    if models > 1:
        together = score(influence(chosen[0], posteriors))
        yield (f"kron, {models} seeds together", f"{together:.3f}", "")
    if peers is not None:
        answers = of_peers(truth, folder, peers)
        scores = {label: score(answer) for label, answer in answers.items()}
        yield from ((label, "", f"{value:.3f}") for label, value in scores.items())


def first_weights(case: Case, seed: int) -> dict[str, Tensor]:
    """What the training with this seed started from."""
    torch.manual_seed(seed)
    return {n: p.detach() for n, p in build(case.network).named_parameters()}


def plain(q: blr.Posterior) -> blr.Posterior:
    """Of one precision everywhere: its influences are products of gradients."""
    ones = {n: torch.ones_like(m) for n, m in q.mean.items()}
    return blr.Posterior(q.mean, ones, prior_precision=1.0, n_data=q.n_data)


class Seen(NamedTuple):
    """Posteriors of a training: after every third of its epochs, what a recorder collects, and
    the optimizer's own, where it has one."""

    checkpoints: list[blr.Posterior]
    recorded: blr.Posterior
    own: blr.Posterior | None


def run(truth: Truth, seed: int) -> Seen:
    """A training that is watched."""
    case, data = truth.case, truth.data
    looks = {round(case.epochs * k / LOOKS) for k in range(1, LOOKS + 1)}
    checkpoints, recorders, own = [], [], []

    def look(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 0:
            recorders.append(blr.KroneckerRecorder(model, every=20))
        if epoch in looks:
            state = torch.get_rng_state()
            then = build(case.network).eval()
            then.load_state_dict(model.state_dict())
            checkpoints.append(fitted(task_of(truth, then)))
            torch.set_rng_state(state)
        if epoch == case.epochs and case.optimizer != "sgd":
            own.append(blr.Posterior.from_optimizer(optimizer, model, n_data=len(data.x)))

    model = train(case, data.x, data.y, seed, look)
    recorder = recorders[0]
    recorder.remove()
    recorded = blr.Posterior.from_recorder(recorder, model, n_data=len(data.x))
    return Seen(checkpoints, recorded, own[0] if own else None)


def of_peers(truth: Truth, folder: Path, peers: Path) -> dict[str, Tensor]:
    """Name → influence ``[N, M]`` of every method of every peer, or an empty tensor if it failed.

    They see the first model; what they answered is kept, as it does not depend on this package.
    """
    case, data = truth.case, truth.data
    number = data.y.is_floating_point()
    asked = Asked(
        "field",
        case.network,
        "gaussian" if number else "categorical",
        DEFAULT,
        *(data.x, data.y, data.test_x, data.test_y),
        checkpoints=[model.state_dict() for model in truth.models[:LOOKS]],
        noise=0.5,
        class_weights=list(case.class_weights) or None,
        smoothing=case.smoothing,
        dampings=GRID,
    )
    answers: dict[str, Tensor] = {}
    for name in PEERS:
        python, script = runner.interpreter(peers, name), runner.SCRIPTS / f"run_{name}.py"
        if python is None:
            continue
        shown = (script.read_text(), truth.recipe, GRID)
        digest = hashlib.sha256(repr(shown).encode()).hexdigest()[:16]
        path = folder / f"peer-{name}.safetensors"
        kept = store.read(path, digest)
        if kept is None:
            given = (data.test_x[:JUDGED], data.test_y[:JUDGED])
            found = runner.ask(python, script, asked, *given, LIMIT)
            tensors = {a.name: a.influence for a in found if a.influence is not None}
            failed = {a.name: a.error for a in found if a.influence is None}
            kept = store.Stored(tensors, {"hash": digest, "failed": failed})
            store.write(path, kept.tensors, kept.record)
        answers |= kept.tensors
        for label, why in kept.record["failed"].items():
            print(f"{label}: {why}", file=sys.stderr, flush=True)
    return answers

"""What the build of the site makes: pictures, Table 1, the tutorials as pages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import jupytext
import torch
from matplotlib.axes import Axes
from sklearn.datasets import load_digits
from torch import nn

import blr_analysis as blr
from benchmarks.papers import posterior_approximation, segmentation, theorem_1, two_wells

N, TEST = 400, 200


def world() -> dict[str, object]:
    """A network on digits with false labels, watched while it learned, and two fine-tunes of it."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float().div(16).view(-1, 1, 8, 8)
    y = labels[:N].clone()
    y[::20] = (y[::20] + 3) % 10
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    task = blr.Task(model, (images[:N], y))
    test_task = blr.Task(model, (images[-TEST:], labels[-TEST:]))
    monitor = blr.Monitor(task, test=test_task, examples=100, every=2)
    optimizer = blr.IVON(model.parameters(), lr=0.2, ess=N, weight_decay=3 / N, steps=160)
    for epoch in range(1, 17):
        for batch in torch.randperm(N).split(40):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), y[batch]).backward()
            optimizer.step()
        monitor(lambda: blr.Posterior.from_optimizer(optimizer, model), epoch)
    posterior = blr.fit_laplace(task, prior_precision=3.0)
    tuned, tasks = [], []
    for half in (labels[:N] < 5, labels[:N] >= 5):
        one = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
        one.load_state_dict(model.state_dict())
        adam = torch.optim.Adam(one.parameters(), lr=3e-3)
        for _ in range(40):
            adam.zero_grad()
            nn.functional.cross_entropy(one(images[:N][half]), labels[:N][half]).backward()
            adam.step()
        tuned.append(one)
        tasks.append(blr.Task(one, (images[:N][half], labels[:N][half])))
    diagonals = [blr.fit_laplace(t, structure="diag", prior_precision=1.0) for t in tasks]
    return dict(
        task=task, test_task=test_task, posterior=posterior, monitor=monitor, model=model,
        y=y, linear=blr.Task(nn.Linear(8, 10), (images[:100, 0].sum(1), y[:100])), tuned=tuned,
        tasks=tasks, diagonals=diagonals,
    )  # fmt: skip


# Each picture: its caption, and the call.


def memory_map(task, posterior) -> Axes:
    """The memory map: what the network learned as a rule, and what by heart."""
    return blr.memory_map(blr.sensitivity(task, posterior)).plot(images=task.dataset)


def deviations(task, posterior) -> Axes:
    """The examples whose absence would move their own prediction most."""
    return blr.sensitivity(task, posterior).plot()


def suspicious(task, posterior) -> Axes:
    """Labels that look wrong, and images unlike the others."""
    return blr.suspicious(task, posterior).plot()


def influence(task, posterior, test_task) -> Axes:
    """What the predictions of some test examples rest on."""
    return blr.influence(task, posterior, test_task.subset(range(4))).plot()


def leave_one_out(monitor) -> Axes:
    """The test loss, and its estimate from the training data alone, while the network learns."""
    return monitor.plot()


def sensitivities(monitor) -> Axes:
    """Which examples shape the network, epoch by epoch."""
    return monitor.plot(kind="sensitivities")


def what_if(task, posterior, test_task, y) -> Axes:
    """The test loss of each class, without class 4."""
    fours = (y == 4).nonzero().flatten()
    return blr.what_if(task, posterior, remove=fours, evaluate=test_task).plot()


def prior(linear) -> Axes:
    """The leave-one-out loss of a logistic regression, by prior precision (weight decay × N)."""
    return blr.select_prior_precision(linear, [0.01, 0.1, 1, 10]).plot()


def merge_curve(model, tuned, tasks, diagonals) -> Axes:
    """Two fine-tunes merged with more and more weight."""
    return blr.merge_curve(model, tuned, tasks, precisions=diagonals, delta=1.0).plot()


def mismatch(model, tuned, tasks, diagonals) -> Axes:
    """The more a merge's gradients differ from those of its models, the more loss it costs."""
    average = blr.merge(None, tuned, weights=[0.5, 0.5], method="linear")
    matched = blr.merge(model, tuned, precisions=diagonals, delta=1.0)
    merges = {"average": average, "gradient matching": matched}
    return blr.gradient_mismatch(tasks, merges, models=tuned).plot()


PICTURES: tuple[Callable[..., Axes], ...] = (
    memory_map, deviations, suspicious, influence, leave_one_out, sensitivities, what_if, prior,
    merge_curve, mismatch,
)  # fmt: skip
PAPERS = (posterior_approximation, theorem_1, two_wells, segmentation)


def make(folder: Path) -> None:
    """The pictures and a page of them, and Table 1."""
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    known = world()
    parts = []
    for picture in PICTURES:
        axes = picture(**{name: known[name] for name in inspect.signature(picture).parameters})
        axes.figure.savefig(folder / f"{picture.__name__}.png", dpi=80, bbox_inches="tight")
        call = inspect.getsource(picture).split('"""\n', 1)[1]
        parts.append(
            f"## {picture.__name__.replace('_', ' ').capitalize()}\n\n{picture.__doc__}\n\n"
            f"```py\n{inspect.cleandoc(call).replace('return ', '')}\n```\n\n"
            f"![{picture.__doc__}](_made/{picture.__name__}.png)\n"
        )
    head = "## Figures of the papers"
    parts.append(f"{head}\n\n`python -m benchmarks.papers.NAME --out DIR`, here small.\n")
    for paper in PAPERS:
        name = paper.__name__.rpartition(".")[2]
        paper.draw(True)[0].savefig(folder / f"{name}.png", dpi=80)
        parts.append(f"`{name}`: {paper.draw.__doc__}\n\n![{name}](_made/{name}.png)\n")
    (folder / "gallery.md").write_text("\n".join(parts), encoding="utf-8")
    rows = blr.table1()[["algorithm", "family", "loss", "hessian", "departures", "section"]]
    lines = [rows.columns, ["---"] * len(rows.columns), *rows.itertuples(index=False)]
    table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    (folder / "table1.md").write_text(table + "\n", encoding="utf-8")


def tutorials(source: Path, folder: Path) -> None:
    """Each tutorial as a page."""
    for script in sorted(source.glob("0*.py")):
        page = jupytext.writes(jupytext.read(script), fmt="markdown")
        text = page.split("---\n", 2)[2] if page.startswith("---\n") else page
        (folder / f"{script.stem}.md").write_text(text, encoding="utf-8")

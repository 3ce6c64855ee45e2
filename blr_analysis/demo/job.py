"""The demo from beginning to end: train, audit, compare, write, say."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console, Group, RenderableType
from rich.text import Text
from torch import nn

from blr_analysis.audit import (
    Findings,
    files_section,
    folder_for,
    investigate,
    summary,
    write,
    write_picture,
    write_text,
)
from blr_analysis.audit.pictures import figure_of
from blr_analysis.demo.removals import IVON_DIAGONAL, ClassRemovals, remove_each_class
from blr_analysis.demo.training import RECIPE, Digits, TrainingRecipe, load, train
from blr_analysis.errors import InitialPrecisionWarning
from blr_analysis.learning_rule.optim import IVON
from blr_analysis.plots import plot_what_if
from blr_analysis.posterior import Posterior
from blr_analysis.report import write_report
from blr_analysis.sensitivity import Monitor
from blr_analysis.tables import write_table
from blr_analysis.task import Task
from blr_analysis.terminal import as_text, grid, note, section, show

FOLDER = "blr-demo"
ABOUT_LOO = (
    "Its scale is that of IVON's posterior, which hess_init sets; that was chosen once for this "
    "network (blr_analysis.demo.TrainingRecipe says how)."
)
LOOKS = 10  # how often the estimate is compared with the test data while the network trains


def run(
    out: str | Path = FOLDER,
    *,
    seed: int = 0,
    recipe: TrainingRecipe = RECIPE,
    console: Console | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Findings, ClassRemovals]:
    """Train on scikit-learn's digits, audit the training data, write ``out`` and print.

    Args:
        out: the folder to write; made if need be, files of the same names are replaced.
        seed: of the split, the initial weights, the noise and the shuffling.
        recipe: how to train.
        console: where the findings are printed; standard output if None.
        say: told in a few words what begins; nothing is said if None.

    Raises:
        StorageError: the folder cannot be written; found out before the training.
    """
    say = say or (lambda text: None)
    console = console or Console(highlight=False)
    with folder_for(out) as folder, _one_thread():
        say("loading scikit-learn's digits")
        data = load(seed)
        model, optimizer, monitor = _train(data, seed, recipe, say)
        task, test = tasks(model, data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InitialPrecisionWarning)  # TrainingRecipe says so
            posterior = Posterior.from_optimizer(optimizer, model)
        findings = investigate(task, posterior, test=test, by=None, say=say)
        removals = remove_each_class(task, posterior, test, data, seed=seed, recipe=recipe, say=say)
        results = Group(summary(findings, about_loo=ABOUT_LOO), _removals_section(removals))
        files = write(findings, folder, say=say)
        files += write_table(removals.table, folder, "removals")
        files.append(
            write_picture(figure_of(monitor.plot()), folder, "leave_one_out_while_training")
        )
        files.append(write_picture(_bars(removals), folder, "removals"))
        files.append(write_text(SCRIPT.format(seed=seed), folder, "digits.py"))
        files.append(write_text(as_text(results), folder, "summary.txt"))
        say("writing the page")
        closest, truth = removals.predicted[removals.closest], removals.retrained.items()
        page = write_report(
            findings,
            folder / "report.html",
            title="Audit of the demo's digits",
            monitor=monitor,
            removals=closest,
            truth={c: nll for c, (nll, _) in truth},
        )
        files.append(page)
    show(results, console)
    show(files_section(folder, files), console)
    show(
        Text("\nNext, the same from a script that states a task, as one of your own would:"),
        console,
    )
    for command in _commands(folder):
        console.print(f"  {command}", soft_wrap=True, markup=False, highlight=False)
    console.print(
        f"\nOpen {page} in a browser: the same, to look at and to hand on.",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    return findings, removals


def tasks(model: nn.Module, data: Digits) -> tuple[Task, Task]:
    """The training data and the test data under the model; ``row`` is the row in scikit-learn."""
    return (
        Task(model, (data.images, data.labels), metadata={"row": data.rows.tolist()}),
        Task(
            model, (data.test_images, data.test_labels), metadata={"row": data.test_rows.tolist()}
        ),
    )


def _train(
    data: Digits, seed: int, recipe: TrainingRecipe, say: Callable[[str], None]
) -> tuple[nn.Module, IVON, Monitor]:
    """Train, and look ten times at how the leave-one-out estimate follows the test data."""
    monitors: list[Monitor] = []  # one, as soon as there is a model

    def look(epoch: int, model: nn.Module, optimizer: IVON) -> None:
        if not monitors:
            task, test = tasks(model, data)
            every = max(1, recipe.epochs // LOOKS)
            monitors.append(Monitor(task, every=every, test=test, keep=()))
        row = monitors[0](lambda: Posterior.from_optimizer(optimizer, model), epoch)
        if row is not None:
            nll = f"leave-one-out NLL {row['loo_nll']:.3f}, test NLL {row['test_nll']:.3f}"
            say(f"  epoch {epoch}: {nll}")

    n = len(data.labels)
    say(f"training a small convolutional network on {n:,} digits: {recipe.epochs} epochs of IVON")
    model, optimizer = train(data.images, data.labels, seed=seed, recipe=recipe, each_epoch=look)
    return model, optimizer, monitors[0]


def _removals_section(removals: ClassRemovals) -> RenderableType:
    """Every posterior beside the retrained networks, and which of them came closest."""
    table = removals.table
    best = removals.predicted[removals.closest]["nll_after"]
    order = best.argsort(kind="stable").tolist()[::-1]
    columns = {"class": table["group"].tolist(), "examples": table["n"].tolist()}
    for name, each in removals.predicted.items():
        columns[name] = [f"{v:.3f}" for v in each["nll_after"]]
    columns["retrained"] = ["" if v != v else f"{v:.3f}" for v in table["nll_after_retrained"]]
    rows = {name: [values[k] for k in order] for name, values in columns.items()}
    lead = (
        f"Test NLL without each class; with all data it is {table['nll_before'].iloc[0]:.3f}. "
        "One step without retraining by each of three posteriors (at the same weights), and two "
        "networks retrained from scratch without the class, with the same recipe and seed."
    )
    misses = ", ".join(f"{miss:.3f} ({name})" for name, miss in removals.misses().items())
    verdict = (
        f"Without one of those two the NLL truly rises by {removals.rise:.3f} on average; the "
        f"steps miss that by {misses}. Closest: {removals.closest}."
    )
    if removals.closest != IVON_DIAGONAL:
        verdict += (
            " IVON's own posterior is diagonal, without correlations between weights: it serves "
            "for single examples (above), not for a whole class."
        )
    return section("What if a class were gone?", lead, grid(rows), note(verdict))


def _bars(removals: ClassRemovals) -> Figure:
    """IVON's own diagonal posterior beside the best with correlations, on one scale."""
    misses = removals.misses()
    best = min((name for name in misses if name != IVON_DIAGONAL), key=misses.__getitem__)
    figure = Figure(figsize=(12.5, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    truth = {c: nll for c, (nll, _) in removals.retrained.items()}
    top = 0.0
    for ax, name in zip(axes, (IVON_DIAGONAL, best), strict=True):
        plot_what_if(removals.predicted[name], ax, truth=truth)
        ax.set_title(f"{name} posterior")
        top = max(top, ax.get_ylim()[1])
    for ax in axes:
        ax.set_ylim(0, top)
        ax.set_xlabel("class taken out")
    figure.suptitle("Test NLL without each class: one step, against retraining")
    return figure


def _commands(folder: Path) -> list[str]:
    script, posterior = folder / "digits.py", folder / "posterior.safetensors"
    return [
        f"blr-analysis what-if {script}:train --posterior {posterior} --remove target=3",
        f"blr-analysis audit {script}:train --posterior {posterior} --test test --out again",
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread while the body runs: a network this small only waits for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SCRIPT = '''\
"""The demo's task, as a script of your own would state it.

    blr-analysis audit digits.py:train --posterior posterior.safetensors --test test --out again

A script of your own would load what it saved after training:

    model.load_state_dict(torch.load("model.pt", weights_only=True))
"""

from pathlib import Path

from blr_analysis import Posterior, Task
from blr_analysis.demo import load, network

DATA = load(seed={seed})


def model():
    trained = network()
    posterior = Posterior.load(Path(__file__).with_name("posterior.safetensors"))
    trained.load_state_dict(posterior.mean)  # a posterior's mean is the trained weights
    return trained


def train():
    metadata = {{"row": DATA.rows.tolist()}}  # columns to select and group by
    return Task(model(), (DATA.images, DATA.labels), likelihood="categorical", metadata=metadata)


def test():
    return Task(model(), (DATA.test_images, DATA.test_labels), likelihood="categorical")
'''

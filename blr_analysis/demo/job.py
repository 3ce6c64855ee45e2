"""The demo from beginning to end: plant wrong labels, train, find them, compare with retraining.

With each step it prints the line that does the same for a model of the user's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console, Group, RenderableType
from rich.text import Text
from torch import nn

from blr_analysis import audit
from blr_analysis.audit.section import two_digits
from blr_analysis.demo.training import Digits, load, recipe, train
from blr_analysis.files.placing import folder_for
from blr_analysis.plots import plot_what_if
from blr_analysis.posterior import fit_laplace
from blr_analysis.report.page import write_page
from blr_analysis.sensitivity import calibrate, what_if
from blr_analysis.task import Task
from blr_analysis.terminal import as_text, section, show


def run(
    out: str | Path = "blr-demo",
    *,
    seed: int = 0,
    console: Console | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[audit.Findings, dict[int, float]]:
    """Train on scikit-learn's digits, audit the training data, write ``out`` and print.

    Args:
        out: the folder to write; it is made if need be, and files of the same names are replaced.
        seed: of the split, the initial weights, the noise and the shuffling.
        console: where the findings are printed; None: standard output.
        say: is called with a few words when a step begins; None: nothing is said.

    Returns:
        The findings, and the test NLL of networks retrained without two of the classes.

    Raises:
        StorageError: the folder cannot be written; raised before the training.
    """
    say = with_typed_lines(say or (lambda text: None))
    console = console or Console(highlight=False)
    with folder_for(out) as folder, _one_thread():
        data = load(seed)
        findings = _trained_and_audited(data, folder, seed, say)
        truth = retrained(findings, say)
        sections = audit.sections(findings)
        sections["removals"] = beside(sections["removals"], truth)
        results = Group(planted(findings, data), audit.in_text(*sections.values()))
        files = audit.write(findings, folder, say=say)
        picture = plot_what_if(findings.removals, truth=truth)
        files.append(audit.write_picture(picture, folder, "removals"))
        files.append(audit.write_text(SCRIPT.format(seed=seed), folder, "digits.py"))
        files.append(audit.write_text(as_text(results), folder, "summary.txt"))
        say("writing the page")
        page = write_page(findings, folder / "report.html", truth=truth)
        files.append(page)
    show(Group(results, audit.list_of_files(folder, files)), console)
    for line in _next_steps(folder, page):
        console.print(Text(line), soft_wrap=True)
    return findings, truth


def _trained_and_audited(
    data: Digits, folder: Path, seed: int, say: Callable[[str], None]
) -> audit.Findings:
    """Train a network, fit and calibrate its posterior, and audit the training data."""
    n_wrong = int(data.planted.sum())
    network = f"a small convolutional network on {len(data.labels):,} digits"
    say(f"training {network}, {n_wrong} of them mislabelled")
    model, _ = train(data.images, data.labels, seed=seed, folder=folder / "checkpoints")
    task, test = tasks(model, data, folder / "checkpoints")
    say("fitting a posterior, and measuring its scale by a training on nine tenths")
    posterior = calibrate(task, fit_laplace(task))
    return audit.investigate(task, posterior, test=test, say=say)


# The first words of a step, and the line that does the same for another model.
TYPED = {
    "training": "checkpoints = blr.Checkpoints(model, steps=steps)  # in your own loop",
    "fitting": "posterior = blr.calibrate(task, blr.fit_laplace(task))",
    "sensitivity": "blr.sensitivity(task, posterior).table",
    "leave-one-out": "blr.leave_one_out(task, posterior)",
    "wrong labels": "blr.suspicious(task, posterior).table",
    "what if": 'blr.what_if_each(task, posterior, by="target", evaluate=test)',
    "retraining": 'blr.what_if(task, posterior, remove="target == CLASS", solver="retrain")',
    "writing the page": 'blr.report(task, posterior, "report.html", test=test)',
}


def with_typed_lines(say: Callable[[str], None]) -> Callable[[str], None]:
    """A function that says a step, and below it what to type for a model of one's own."""

    def say_with_line(text: str) -> None:
        line = next((line for words, line in TYPED.items() if text.startswith(words)), "")
        named_class = re.search(r"class (\d+)", text)
        if named_class is not None:
            line = line.replace("CLASS", named_class[1])
        say(f"{text}\n            >>> {line}" if line else text)

    return say_with_line


def planted(findings: audit.Findings, data: Digits) -> RenderableType:
    """The number of planted wrong labels, and how many of them lead the ranking of suspects."""
    n_planted = int(data.planted.sum())
    first_suspects = findings.suspicions.order[:n_planted]
    n_right = int(data.planted[first_suspects].sum())
    lead = (
        f"{n_planted} labels were planted wrong, all of them by one annotator. Of the first "
        f"{n_planted} rows to look at, {n_right} are planted ones."
    )
    return section("Did it find them?", lead)


def _next_steps(folder: Path, page: Path) -> tuple[str, ...]:
    """Lines on what to do with the files of the demo."""
    script = folder / "digits.py"
    posterior = folder / "posterior.safetensors"
    return (
        "\nNext: the same from a script that defines a task, as yours would:",
        f"  blr-analysis what-if {script}:train -p {posterior} --remove \"annotator == 'eve'\"",
        f"  blr-analysis audit {script}:train -p {posterior} --test test --out again",
        f"\nOpen {page} in a browser: it shows all of this, and you can pass it on.",
    )


def tasks(model: nn.Module, data: Digits, checkpoints: Path) -> tuple[Task, Task]:
    """The training data and the test data under the model; ``row`` is the row in scikit-learn."""
    task = Task(
        model,
        (data.images, data.labels),
        metadata={"row": data.rows.tolist(), "annotator": data.annotators},
        checkpoints=checkpoints,
        recipe=recipe(len(data.labels)),
    )
    test = Task(
        model,
        (data.test_images, data.test_labels),
        metadata={"row": data.test_rows.tolist(), "annotator": data.test_annotators},
    )
    return task, test


def retrained(findings: audit.Findings, say: Callable[[str], None]) -> dict[int, float]:
    """The test NLL without each of two classes, by one whole training each.

    They are the classes for which the short trainings predict the highest and the lowest NLL.
    """
    assert findings.removals is not None
    groups = findings.removals["group"].tolist()
    predicted = findings.removals["nll_after"].to_numpy()
    truth: dict[int, float] = {}
    for place in (int(predicted.argmax()), int(predicted.argmin())):
        label = int(groups[place])
        say(f"retraining from scratch without class {label}, to compare")
        result = what_if(
            findings.task,
            findings.posterior,
            remove=f"target == {label}",
            evaluate=findings.test,
            solver="retrain",
            seeds=1,
        )
        truth[label] = result.nll
    return truth


def beside(section: audit.Section, truth: dict[int, float]) -> audit.Section:
    """The section on groups with a column of the retrained networks' NLL."""
    losses = {str(label): two_digits(nll) for label, nll in truth.items()}
    groups = next(iter(section.columns.values()))
    retrained_column = [losses.get(str(group), "") for group in groups]
    return replace(section, columns={**section.columns, "retrained": retrained_column})


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch has one thread: a network this small only waits for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SCRIPT = '''\
"""The demo's task, as your own script would define it: a trained model and a Task."""

from pathlib import Path

from blr_analysis import Posterior
from blr_analysis.demo import load, network
from blr_analysis.demo.job import tasks

HERE = Path(__file__).parent
MODEL = network()
MODEL.load_state_dict(Posterior.load(HERE / "posterior.safetensors").mean)  # the trained weights


def train():
    return tasks(MODEL, load(seed={seed}), HERE / "checkpoints")[0]


def test():
    return tasks(MODEL, load(seed={seed}), HERE / "checkpoints")[1]
'''

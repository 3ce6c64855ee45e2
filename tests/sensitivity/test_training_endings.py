"""What a training drew, where it stopped, and whether a recipe's training is the model's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import normal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import blr_analysis as blr
from blr_analysis.errors import DataError, InputError
from blr_analysis.sensitivity.endings import ending_note
from blr_analysis.sensitivity.training import trained, whole_data

N = 24
EPOCHS = 6
BATCH = 8
LR = 0.2
CLASSES = torch.arange(N) % 3


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def inputs() -> Tensor:
    return normal(N, 4) + CLASSES[:, None]


def mirrored(x: Tensor) -> Tensor:
    """A change that a test can repeat."""
    return x.flip(-1) + 1


class Mirrored(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return mirrored(x), y


class Drawing(Mirrored):
    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + torch.randn(4), y


def plain() -> TensorDataset:
    return TensorDataset(inputs(), CLASSES)


def recipe_of(**options: Any) -> blr.Recipe:
    settings: dict[str, Any] = {"lr": LR, "epochs": EPOCHS, "batch_size": BATCH}
    return blr.Recipe("sgd", **{**settings, "initial": network().state_dict(), **options})


def task_of(recipe: blr.Recipe | None = None, data: Any = None) -> blr.Task:
    return blr.Task(network(1).eval(), data or plain(), recipe=recipe, progress=False)


def state_by(recipe: blr.Recipe) -> dict[str, Tensor]:
    task = task_of(recipe)
    return trained(task, whole_data(task), recipe, 0)


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.allclose(actual[n], t, rtol=1e-9, atol=1e-12) for n, t in expected.items())


@pytest.fixture(scope="module", autouse=True)
def _first_training() -> None:
    """torch imports its compiler when the first optimizer is made."""
    state_by(recipe_of(epochs=1))


WAYS: dict[str, Any] = {
    "a function": mirrored,
    "a data set": Mirrored(plain()),
    "a loader": DataLoader(Mirrored(plain())),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_training_draws_its_inputs_and_the_analysis_does_not(way: str) -> None:
    """The training is that of the changed inputs, the task's losses those of the plain ones."""
    recipe = recipe_of(augment=WAYS[way])
    task = task_of(recipe)
    actual = trained(task, whole_data(task), recipe, 0)
    changed = task_of(data=(mirrored(inputs()), CLASSES))
    assert same(actual, trained(changed, whole_data(changed), recipe_of(), 0))
    assert torch.equal(task.fetch(torch.arange(N))[0], inputs())


@pytest.mark.parametrize("way", WAYS)
def test_relabelled_and_left_out_examples_are_drawn_too(way: str) -> None:
    task = task_of(recipe_of(augment=WAYS[way]))
    changed = task_of(recipe_of(), (mirrored(inputs()), CLASSES))
    question: dict[str, Any] = {"relabel": {3: 2, 7: 0}, "remove": [5]}
    question |= {"solver": "retrain", "seeds": 1}
    actual, expected = (
        blr.what_if(t, blr.fit_laplace(t, structure="diag", prior_precision=1.0), **question)
        for t in (task, changed)
    )
    assert same(actual.parameters, expected.parameters)


def test_a_part_of_a_task_draws_its_own_examples() -> None:
    task = task_of(recipe_of(augment=Mirrored(plain()))).subset([1, 2, 3, 4])
    rest = (mirrored(inputs())[1:5], CLASSES[1:5])
    expected = task_of(recipe_of(), rest)
    assert task.recipe is not None
    assert expected.recipe is not None
    actual = trained(task, whole_data(task), task.recipe, 0)
    assert same(actual, trained(expected, whole_data(expected), expected.recipe, 0))


def test_added_examples_need_a_function() -> None:
    added = blr.Task(network().eval(), (inputs()[:2], CLASSES[:2]))
    task = task_of(recipe_of(augment=Mirrored(plain())))
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    with pytest.raises(InputError, match="function"):
        blr.what_if(task, q, add=added, solver="retrain", seeds=1)


def test_data_that_draw_are_named() -> None:
    with pytest.raises(DataError, match=r"example 0 .*augment="):
        task_of(data=Drawing(plain()))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"augment": 3}, "augment"),
        ({"patience": 2}, "validation"),
        ({"schedule_epochs": 2}, "schedule_epochs"),
        ({"reduction": "median"}, "reduction"),
        ({"mode": "sleep"}, "mode"),
        ({"prior": None}, "prior="),
    ],
)
def test_what_a_recipe_refuses(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        recipe_of(**options)


def test_data_that_draw_have_the_tasks_length() -> None:
    with pytest.raises(InputError, match="24"):
        task_of(recipe_of(augment=Mirrored(TensorDataset(inputs()[:5], CLASSES[:5]))))


def test_a_training_of_ones_own_draws_itself() -> None:
    with pytest.raises(InputError, match="augment"):
        blr.Recipe(train=lambda data, seed: network(seed), augment=mirrored)


def test_a_cosine_that_was_cut_has_the_rates_of_the_whole() -> None:
    """In full batches, against torch's own schedule."""
    recipe = recipe_of(batch_size=N, schedule="cosine", schedule_epochs=3 * EPOCHS)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * EPOCHS)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        cross_entropy(model(inputs()), CLASSES).backward()
        optimizer.step()
        schedule.step()
    assert same(state_by(recipe), dict(model.state_dict()))


def test_a_cut_cosine_is_shortened_by_the_rates_that_it_made() -> None:
    cut = recipe_of(epochs=10, schedule="cosine", schedule_epochs=20).shortened(5)
    mean = 0.5 + math.sin(math.pi / 2) / math.pi  # of the first half of a cosine
    assert cut.factor == pytest.approx(mean * 10 / 5, rel=1e-6)
    assert cut.schedule_epochs is None


@pytest.mark.parametrize("patience", [None, 1])
def test_the_epoch_that_does_best_on_validation_data_is_kept(patience: int | None) -> None:
    """Against the losses after every epoch of plain trainings, each of so many epochs."""
    validation = (inputs().flip(0), CLASSES)
    settings: dict[str, Any] = {"lr": 1.5, "batch_size": N}
    states = [state_by(recipe_of(epochs=k, **settings)) for k in range(1, EPOCHS + 1)]
    model = network()
    losses = []
    for state in states:
        model.load_state_dict(state)
        losses.append(float(cross_entropy(model(validation[0]), validation[1]).detach()))
    end = EPOCHS
    if patience is not None:
        worse = [k for k in range(1, EPOCHS) if losses[k] >= min(losses[:k])]
        end = worse[0] + 1 if worse else EPOCHS
    best = min(range(end), key=losses.__getitem__)
    assert best < EPOCHS - 1
    assert losses[0] > losses[best]
    actual = state_by(recipe_of(validation=validation, patience=patience, **settings))
    assert same(actual, states[best])


def test_validation_data_of_which_none_counts_choose_no_epoch() -> None:
    ignored = torch.full_like(CLASSES, -100)
    recipe = recipe_of(validation=(inputs(), ignored))
    task = blr.Task(network(), plain(), likelihood=nn.CrossEntropyLoss(), progress=False)
    with pytest.raises(InputError, match="validation= is nan"):
        trained(task, whole_data(task), recipe, 0)


def test_what_a_recipe_misses_may_be_one_word() -> None:
    recipe = recipe_of(missing="augmentation")
    assert recipe.missing == ["augmentation"]
    assert not recipe.known


def test_a_rerun_that_stops_early_keeps_the_states_before() -> None:
    recipe = recipe_of(validation=(inputs().flip(0), CLASSES), epochs=9)
    (q,) = blr.rerun(task_of(recipe), seeds=1)
    assert len(q.run) > 1


def trained_by(recipe: blr.Recipe, seed: int = 5, data: Any = None) -> blr.Task:
    """A task whose model was trained by a recipe, from other first weights."""
    task = task_of(recipe, data)
    model = copy.deepcopy(task.model)
    model.load_state_dict(trained(task, whole_data(task), recipe, seed))
    return blr.Task(model.eval(), data or plain(), recipe=recipe, progress=False)


def answers(task: blr.Task) -> dict[str, str]:
    """What each path says of the recipe."""
    q = blr.fit_laplace(task, structure="diag")
    question: dict[str, Any] = {"remove": [1], "seeds": 2}
    return {
        "rerun": blr.rerun(task, seeds=2)[0].note,
        "calibrate": blr.calibrate(task, q).note,
        "retrain": blr.what_if(task, q, solver="retrain", **question).note,
        "replay": blr.what_if(task, q, solver="replay", passes=8, **question).note,
    }


WORDS = "another training"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not calibrated")
def test_a_recipe_that_is_not_the_trainings_is_said_on_every_path() -> None:
    right = recipe_of(initial=None, epochs=30)
    task = trained_by(right)
    assert not any(WORDS in note for note in answers(task).values())
    wrong = recipe_of(initial=None, epochs=30, lr=LR / 100)
    mistaken = blr.Task(task.model, plain(), recipe=wrong, progress=False)
    assert all(WORDS in note for note in answers(mistaken).values())


def test_a_change_that_lets_other_examples_fit_better_is_no_other_training() -> None:
    """Without six wrong labels, the right ones end at a lower loss by the same recipe."""
    wrong = list(range(6))
    labels = CLASSES.clone()
    labels[wrong] = (labels[wrong] + 1) % 3
    data = TensorDataset(inputs(), labels)
    right = recipe_of(initial=None, epochs=40)
    task = trained_by(right, data=data)
    q = blr.fit_laplace(task, structure="diag")
    question: dict[str, Any] = {"remove": wrong, "solver": "retrain", "seeds": 2}
    assert WORDS not in blr.what_if(task, q, **question).note
    mistaken = recipe_of(initial=None, epochs=40, lr=LR / 100)
    task = blr.Task(task.model, data, recipe=mistaken, progress=False)
    assert WORDS in blr.what_if(task, q, **question).note


@pytest.mark.parametrize(
    ("trainings", "is_noted"),
    [
        ([0.2, 0.21], False),
        ([0.5, 0.49], True),
        ([0.1, 0.45], False),  # two seeds differ as much
        ([0.02, 0.03], True),
    ],
)
def test_trainings_are_others_beyond_what_seeds_differ(
    trainings: list[float], is_noted: bool
) -> None:
    model_losses = torch.full((50,), 0.2)
    note = ending_note(model_losses, [torch.full((50,), loss) for loss in trainings])
    assert bool(note) is is_noted


def test_further_trainings_are_asked_for_only_where_those_so_far_end_elsewhere() -> None:
    """One where it is like the model's own; two, and no more, where none of them is."""
    model_losses = torch.full((50,), 0.2)
    calls: list[int] = []

    def another(loss: float) -> Callable[[int], Tensor]:
        def train(further: int) -> Tensor:
            calls.append(further)
            return torch.full((50,), loss + 0.001 * further)

        return train

    assert ending_note(model_losses, [model_losses + 0.01], another=another(0.21)) == ""
    assert calls == []
    assert ending_note(model_losses, [model_losses + 0.3], another=another(0.21)) == ""
    assert calls == [0]
    assert WORDS in ending_note(model_losses, [model_losses + 0.3], another=another(0.5))
    assert calls == [0, 0, 1]


def test_correct_recipes_are_seldom_called_others() -> None:
    """The model's own loss and those of the seeds drawn from one distribution, far apart."""
    generator = torch.Generator().manual_seed(0)
    n_false = 0
    for _ in range(400):
        model, *seeds = (1 + 0.3 * torch.randn(4, generator=generator)).tolist()
        further = iter(seeds[1:])
        note = ending_note(
            torch.full((50,), model),
            [torch.full((50,), seeds[0])],
            another=lambda _, further=further: torch.full((50,), next(further)),
        )
        n_false += bool(note)
    assert n_false <= 0.05 * 400

"""Frozen layers run once: the same answers as of whole passes, or a whole pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Graph, normal, randomised, seeded
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import blr_analysis as blr
from blr_analysis.backprop.engine import predict
from blr_analysis.backprop.plan import plan_for
from blr_analysis.frozen.fingerprints import fingerprints
from blr_analysis.task import Task

N = 12


def trunk() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())


def frozen(model: nn.Module, *paths: str) -> nn.Module:
    """The model in eval mode, with the modules at these paths frozen."""
    for path in paths:
        model.get_submodule(path).requires_grad_(False)
    return model.eval()


def chain() -> nn.Module:
    return frozen(nn.Sequential(trunk(), nn.Linear(6, 3)), "0")


def siblings() -> nn.Module:
    """Frozen layers one after the other, of which the model looks at the last one's outputs."""
    layers = (nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    return frozen(nn.Sequential(*layers), "0", "1", "3")


def two_towers() -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.head(m.left(x) * m.right(x))

    return frozen(Graph(call, left=trunk(), right=trunk(), head=nn.Linear(6, 3)), "left", "right")


class WithFeatures(nn.Module):
    """Gives its features beside a summary that alone is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = trunk()

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        features = self.layers(x)
        return features.unsqueeze(1).expand(-1, 50, -1), {"summary": features, "kind": "mean"}


def unused_outputs() -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.head(m.trunk(x)[1]["summary"])

    return frozen(Graph(call, trunk=WithFeatures(), head=nn.Linear(6, 3)), "trunk")


def unused_outputs_of_two() -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.head(m.left(x)[1]["summary"] * m.right(x)[1]["summary"])

    parts = {"left": WithFeatures(), "right": WithFeatures(), "head": nn.Linear(6, 3)}
    return frozen(Graph(call, **parts), "left", "right")


def in_place() -> nn.Module:
    """What comes after the frozen layers overwrites their outputs."""

    def call(m: Any, x: Tensor) -> Tensor:
        return m.head(m.trunk(x).mul_(2))

    return frozen(Graph(call, trunk=trunk(), head=nn.Linear(6, 3)), "trunk")


KEPT: dict[str, Callable[[], nn.Module]] = {
    "chain": chain,
    "siblings": siblings,
    "two towers": two_towers,
    "unused outputs": unused_outputs,
    "unused outputs of two": unused_outputs_of_two,
    "in place": in_place,
}


def keeps_state() -> nn.Module:
    """The head looks at what a frozen layer left behind."""

    def call(m: Any, x: Tensor) -> Tensor:
        summary = m.trunk(x).mean()
        return m.head(m.trunk.features) + 0 * summary

    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = trunk()

        def forward(self, x: Tensor) -> Tensor:
            self.features = self.layers(x)
            return self.features

    return frozen(Graph(call, trunk=Leaving(), head=nn.Linear(6, 3)), "trunk")


def behind_a_trained_layer() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), trunk(), nn.Linear(6, 3))
    return frozen(model, "1")


def of_a_trained_number() -> nn.Module:
    """The whole model's own parameter comes before the frozen layers."""

    def call(m: Any, x: Tensor) -> Tensor:
        return m.head(m.trunk(x * m.scale))

    parts = {"trunk": trunk(), "head": nn.Linear(6, 3), "scale": nn.Parameter(torch.ones(4))}
    return frozen(Graph(call, **parts), "trunk")


def of_a_trained_choice() -> nn.Module:
    """A trained weight that is read before, and that no gradient passes to."""

    def call(m: Any, x: Tensor) -> Tensor:
        shift = (m.head.weight.sum() > 0).to(x)
        return m.head(m.trunk(x + shift))

    return frozen(Graph(call, trunk=trunk(), head=nn.Linear(6, 3)), "trunk")


def watched() -> nn.Module:
    """A hook of the user's looks at a frozen layer, and the head at what it saw."""
    seen: dict[str, Tensor] = {}

    def call(m: Any, x: Tensor) -> Tensor:
        m.trunk(x)
        return m.head(seen["features"])

    model = frozen(Graph(call, trunk=trunk(), head=nn.Linear(6, 3)), "trunk")
    layer: Any = model.get_submodule("trunk.2")
    layer.register_forward_hook(lambda module, args, output: seen.update(features=output))
    return model


def overwrites_its_inputs() -> nn.Module:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = trunk()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.mul_(2))

    return frozen(nn.Sequential(Doubling(), nn.Linear(6, 3)), "0")


def mostly_trained() -> nn.Module:
    layers = [nn.Linear(4, 4) for _ in range(5)]
    return frozen(nn.Sequential(*layers, nn.Linear(4, 3)), "0")


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "keeps state": keeps_state,
    "behind a trained layer": behind_a_trained_layer,
    "of a trained number": of_a_trained_number,
    "of a trained choice": of_a_trained_choice,
    "watched": watched,
    "overwrites its inputs": overwrites_its_inputs,
    "mostly trained": mostly_trained,
}


def looked_at(model: nn.Module, **options: Any) -> Task:
    """A task whose model was looked at."""
    task = Task(randomised(model), (normal(N, 4), torch.arange(N) % 3), **options)
    plan_for(task, task.parameters())
    return task


def made(make: Callable[[], nn.Module], **options: Any) -> Task:
    with seeded(0):
        return looked_at(make(), **options)


def moved(task: Task) -> dict[str, Tensor]:
    with seeded(1):
        return {name: p + torch.randn_like(p) for name, p in task.parameters().items()}


def whole(task: Task, params: dict[str, Tensor]) -> Tensor:
    with task.frozen.off():
        return predict(task, params)[0]


class Passes:
    """How many examples pass a module."""

    def __init__(self, module: nn.Module) -> None:
        self.examples = 0
        self.module = module
        self.forward = module.forward
        module.forward = self.counted  # type: ignore[method-assign]

    def counted(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.examples += len(x)
        return self.forward(x, *args, **kwargs)


@pytest.mark.parametrize("name", KEPT)
def test_a_second_pass_gives_the_same_without_the_frozen_layers(name: str) -> None:
    task = made(KEPT[name])
    first = next(m for m in task.model.modules() if isinstance(m, nn.BatchNorm1d))
    passes = Passes(first)
    predict(task, task.parameters())
    params = moved(task)
    outputs = predict(task, params)[0]
    assert passes.examples == N
    assert torch.equal(outputs, whole(task, params))
    assert passes.examples == 2 * N
    some = task.subset([7, 2, 5])
    assert torch.equal(predict(some, params)[0], outputs[[7, 2, 5]])
    assert passes.examples == 2 * N


@pytest.mark.parametrize("name", WHOLE)
def test_models_that_must_run_whole(name: str) -> None:
    task = made(WHOLE[name])
    assert not task.frozen.layers
    predict(task, task.parameters())
    params = moved(task)
    assert torch.equal(predict(task, params)[0], whole(task, params))
    assert torch.equal(task.dataset.tensors[0], normal(N, 4))


def changed_in_place(task: Task) -> dict[str, Tensor]:
    next(task.model[0].parameters()).data.mul_(2)  # type: ignore[index]
    return {}


def in_training_mode(task: Task) -> dict[str, Tensor]:
    task.model[0][2].train()  # type: ignore[index]
    return {}


def other_buffers(task: Task) -> dict[str, Tensor]:
    return {"0.1.running_mean": normal(6, seed=3)}


def weights_of_a_frozen_layer(task: Task) -> dict[str, Tensor]:
    return {"0.0.weight": normal(6, 4, seed=3)}


def hook_of_the_user(task: Task) -> dict[str, Tensor]:
    task.model[0][2].register_forward_hook(lambda m, args, output: 2 * output)  # type: ignore[index]
    return {}


def signs_by_data(task: Task) -> dict[str, Tensor]:
    task.model[0][0].weight.data.neg_()  # type: ignore[index]
    return {}


def order_by_data(task: Task) -> dict[str, Tensor]:
    weights = task.model[0][3].weight.data  # type: ignore[index]
    weights.copy_(weights.flip(0, 1))
    return {}


def signs_of_a_buffer(task: Task) -> dict[str, Tensor]:
    task.model[0][1].running_mean.data.neg_()  # type: ignore[index]
    return {}


def a_setting(task: Task) -> dict[str, Tensor]:
    task.model[0][1].eps = 3.0  # type: ignore[index]
    return {}


def another_forward(task: Task) -> dict[str, Tensor]:
    task.model[0][2].forward = torch.relu  # type: ignore[index]
    return {}


def inputs_in_place(task: Task) -> dict[str, Tensor]:
    task.dataset.tensors[0].neg_()
    return {}


CHANGES = [
    changed_in_place,
    signs_by_data,
    order_by_data,
    signs_of_a_buffer,
    a_setting,
    another_forward,
    inputs_in_place,
    in_training_mode,
    other_buffers,
    weights_of_a_frozen_layer,
    hook_of_the_user,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_rows_are_not_used_where_the_frozen_layers_are_others(change: Any) -> None:
    task = made(chain)
    predict(task, task.parameters())
    params = task.parameters() | change(task)
    run = task.fetch(torch.arange(N)), params, torch.arange(N)
    outputs = task.run(*run)[0]
    with task.frozen.off():
        assert torch.equal(outputs, task.run(*run)[0])


class Scaled(nn.Module):
    """Scales by numbers that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = trunk()
        self.scale = 1.0
        self.scales = torch.ones(6)
        self.by_name = {"scale": torch.ones(6)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale * self.scales * self.by_name["scale"]


PLAIN: dict[str, Callable[[Scaled], Any]] = {
    "number": lambda m: setattr(m, "scale", 3.0),
    "tensor": lambda m: setattr(m, "scales", -m.scales),
    "tensor in place": lambda m: m.scales.data.neg_(),
    "tensor of a dict": lambda m: m.by_name.update(scale=-torch.ones(6)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_rows_are_not_used_where_a_plain_attribute_is_another(name: str) -> None:
    task = made(lambda: frozen(nn.Sequential(Scaled(), nn.Linear(6, 3)), "0"))
    assert task.frozen.layers
    params = task.parameters()
    before = predict(task, params)[0]
    PLAIN[name](task.model[0])  # type: ignore[index]
    outputs = predict(task, params)[0]
    assert not torch.allclose(outputs, before)
    assert torch.equal(outputs, whole(task, params))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]
)
def test_a_fingerprint_is_of_the_row_alone(dtype: torch.dtype) -> None:
    numbers = (50 * normal(5, 7)).to(dtype)
    for columns in range(8):
        rows = numbers[:, :columns]
        alone = [fingerprints(rows[k : k + 1])[0] for k in range(5)]
        assert fingerprints(rows) == alone == fingerprints(rows.clone())


@pytest.mark.parametrize("columns", [2, 3, 8])
def test_turned_signs_and_another_order_change_a_fingerprint(columns: int) -> None:
    rows = normal(5, columns).float()
    in_pairs = rows.clone()
    in_pairs[:, :2].neg_()
    for changed in (-rows, in_pairs, rows.flip(1)):
        pairs = zip(fingerprints(rows), fingerprints(changed), strict=True)
        assert all(before != after for before, after in pairs)


def test_rows_are_those_of_the_same_data() -> None:
    task = made(chain)
    params = task.parameters()
    outputs = predict(task, params)[0]
    other = Task(task.model, (normal(N, 4, seed=5), torch.arange(N) % 3)).with_model(task)
    plan_for(other, params)
    assert not torch.allclose(predict(other, params)[0], outputs)
    assert torch.equal(predict(other, params)[0], whole(other, params))


def test_kept_rows_take_no_more_than_the_memory_that_is_allowed() -> None:
    bytes_of_a_row = 6 * torch.float64.itemsize
    task = made(chain, memory_budget=4 * bytes_of_a_row, batch_size=2)
    for _ in range(2):
        predict(task, task.parameters())
    assert len(task.frozen._rows) == 4
    params = moved(task)
    assert torch.equal(predict(task, params)[0], whole(task, params))


def texts(lengths: list[int]) -> Any:
    """Padded to the longest of a batch."""

    def padded(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence([row for row, _ in rows], batch_first=True)
        labels = torch.tensor([label for _, label in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    with seeded(0):
        rows = [(torch.randint(1, 20, (n,)), k % 3) for k, n in enumerate(lengths)]
    return torch.utils.data.DataLoader(rows, collate_fn=padded)  # type: ignore[arg-type]


def test_a_tuned_head_is_audited_in_one_pass_of_the_frozen_layers() -> None:
    """And finds what it finds with whole passes."""
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        num_labels=3,
    )
    with seeded(0):
        model = BertForSequenceClassification(config).double().eval()
    model.bert.requires_grad_(False)
    task = Task(model, texts([3 + k % 7 for k in range(N)]))

    def found(task: Task) -> tuple[Tensor, ...]:
        q = blr.fit_laplace(task, prior_precision=1.0)
        suspects = blr.suspicious(task, q, samples=4)
        closeness = suspects.closeness
        assert closeness is not None
        return blr.leave_one_out(task, q).losses, suspects.losses, closeness

    passes = Passes(model.bert.encoder.layer[0])
    plan_for(task, task.parameters())
    looked_at = passes.examples
    once = found(task)
    of_one_sweep = passes.examples - looked_at
    assert N <= of_one_sweep < 2 * N  # some are looked at in other batches, to know the data by
    with task.frozen.off():
        for kept, run in zip(once, found(task), strict=True):
            torch.testing.assert_close(kept, run, rtol=1e-9, atol=1e-12)
    assert passes.examples > 5 * N

"""What processes compute of models that ``fully_shard`` divides, for ``test_sharded``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import mlp
from tiny_lm import sequences, task_of, tiny_lm
from tiny_transformers import build
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef

import blr_analysis as blr
from blr_analysis import ranks, sharded
from blr_analysis.errors import BLRError

N = 13  # neither two nor four divide it
SIZES = (0.2, 0.6)  # of checkpoints, as parts of the weights
RANK = 40  # numbers of an index: fewer than parameters


def network(*, shard: bool, frozen: bool = False, checkpoints: bool = False) -> blr.Task:
    """A classifier whose first layer is divided for itself.

    Args:
        frozen: whether this layer does not train.
        checkpoints: whether weights along the training are given, whole.
    """
    source = torch.Generator().manual_seed(0)
    X = torch.randn(N, 4, dtype=torch.float64, generator=source)
    model: Any = mlp().double()
    model[0].requires_grad_(not frozen)
    earlier = [
        {name: size * tensor for name, tensor in model.state_dict().items()} for size in SIZES
    ]
    if shard:
        fully_shard(model[0])
        fully_shard(model)
    data = (X, torch.arange(N) % 3)
    return blr.Task(model, data, batch_size=4, checkpoints=earlier if checkpoints else None)


def words(*, shard: bool) -> blr.Task:
    """A language model with tied tables, whose attention uses a layer that it does not call."""
    model = tiny_lm(tied=True, library=True)
    if shard:
        fully_shard(model.attention)
        fully_shard(model)
    return task_of(model, sequences(9))


def adapter(*, shard: bool) -> blr.Task:
    """A Llama whose adapter trains, divided layer by layer."""
    from peft import LoraConfig, get_peft_model

    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3}
    llama = build("llama", "causal_lm", **sizes).double()
    settings = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = get_peft_model(llama, settings)
    if shard:
        for layer in llama.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return task_of(model, sequences(9))


TASKS: dict[str, Callable[..., blr.Task]] = {
    "classifier": network,
    "frozen layer": partial(network, frozen=True),
    "checkpoints": partial(network, checkpoints=True),
    "language model": words,
    "adapter": adapter,
}


def answers(folder: Path, names: Iterable[str], *, shard: bool) -> dict[str, Any]:
    """Fits, analyses and an index of these models."""
    actual: dict[str, Any] = {}
    for name in names:
        task = TASKS[name](shard=shard)
        place = folder / name.replace(" ", "_")
        for analysis, value in analyses(task, place, shard=shard).items():
            actual[f"{name}: {analysis}"] = value
    return actual


def analyses(task: blr.Task, place: Path, *, shard: bool) -> dict[str, Any]:
    """Fits, analyses and an index of one model.

    The index is of the posterior that one process left: rounding may turn eigenvectors, and an
    index is a random projection in these.
    """
    actual: dict[str, Any] = {}
    settings: dict[str, Any] = {"prior_precision": 2.0}
    if task.likelihood.is_sequence:
        settings["curvature"] = "mc_fisher"
    for structure in ("diag", "kron"):
        q = blr.fit_laplace(task, structure=structure, **settings)
        actual[f"fit {structure}"] = [q.mean, q.form.diagonal()]
    test = task.subset(range(3))
    scores = blr.sensitivity(task, q)
    actual["sensitivity"] = [scores.losses, scores.self_influence]
    actual["leave one out"] = blr.leave_one_out(task, q).losses
    actual["influence"] = blr.influence(task, q, test).matrix
    actual["prediction"] = q.predict(test, 0).losses
    file = place.with_suffix(".safetensors")
    if not shard:
        q.save(file)
    stored = blr.Posterior.load(file)
    index = blr.Index.build(task, stored, place / f"index{shard:d}", dtype="float64", rank=RANK)
    actual["index"] = [
        index.self_influence,
        index.influence(test),
        index.top(test, 2).helpful_values,
    ]
    return actual


def memory() -> dict[str, float]:
    """Bytes of an adapter's weights: whole, in this process, and gathered at once at most.

    ``layer`` are the bytes of the largest layer with what the outermost module itself holds.
    """
    whole = bytes_of(adapter(shard=False).model)
    task = adapter(shard=True)
    parts: Any = [m for m in ranks.divided(task.model) if m is not task.model]
    layer = max(bytes_of(part) for part in parts)
    outermost = whole - sum(bytes_of(part) for part in parts)
    storages: list[tuple[StorageWeakRef, int]] = []
    most = [0]
    gather = sharded.gathered_piece

    def watched(piece: Tensor) -> Tensor:
        weight = gather(piece)
        storages.append((StorageWeakRef(weight.untyped_storage()), weight.nbytes))
        most[0] = max(most[0], alive())
        return weight

    def alive() -> int:
        return sum(size for storage, size in storages if not storage.expired())

    sharded.gathered_piece = watched  # type: ignore[assignment]
    try:
        q = blr.fit_laplace(task, structure="kron", curvature="mc_fisher", prior_precision=1.0)
        influence = blr.influence(task, q, task.subset([1]))
    finally:
        sharded.gathered_piece = gather
    local = sum(of_rank(p) for p in task.model.parameters())
    trained = sum(m.nbytes for m in q.mean.values())
    assert len(influence.matrix) == len(task)
    return {
        "whole": whole,
        "local": local + trained,
        "gathered": most[0],
        "layer": layer + outermost,
        "left": alive(),
    }


def bytes_of(module: nn.Module) -> int:
    """Of all processes together."""
    return sum(p.nbytes for p in module.parameters())


def of_rank(parameter: Any) -> int:
    """The bytes of a parameter that this process holds."""
    return parameter.to_local().nbytes if ranks.is_sharded(parameter) else parameter.nbytes


def refusals() -> list[str]:
    """The messages of what a divided model cannot do, or another way of dividing it."""
    task = network(shard=True)
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    recipe = blr.Recipe(optimizer="sgd", lr=0.1, epochs=1, batch_size=4)
    trained = blr.Task(task.model, task.dataset, recipe=recipe)
    by_columns: Any = mlp()
    mesh = init_device_mesh("cpu", (ranks.count(),))
    parallelize_module(by_columns, mesh, {"0": ColwiseParallel()})
    data = (torch.zeros(2, 4), torch.zeros(2).long())
    calls: list[Callable[[], Any]] = [
        lambda: blr.what_if(trained, q, remove=[0], solver="replay"),
        lambda: blr.Checkpoints(task.model, steps=8),
        lambda: blr.Task(by_columns, data),
        divided_late,
        lambda: in_one_process(task, q),
    ]
    messages = []
    for call in calls:
        try:
            call()
            messages.append("")
        except BLRError as error:
            messages.append(str(error))
    return messages


def divided_late() -> None:
    """A model that is divided after its task was made."""
    model = mlp()
    task = blr.Task(model, (torch.zeros(2, 4), torch.zeros(2).long()))
    fully_shard(model)
    task.parameters()


def in_one_process(task: blr.Task, q: blr.Posterior) -> None:
    with ranks.alone():
        blr.sensitivity(task, q)


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    names = sys.argv[2:]
    with ranks.opened():
        actual: dict[str, Any] = {"answers": answers(place, names, shard=True)}
        if names == list(TASKS):
            actual["memory"] = memory()
            actual["refusals"] = refusals()
        torch.save(actual, place / f"rank{ranks.rank()}.pt")

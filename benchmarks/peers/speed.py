"""What influence costs by each package: MLP 784-32-16-10 (2,000 images) and LeNet-5 (1,000).

    python benchmarks/peers/speed.py [--peers DIR] [--rounds 3] | python -m benchmarks.results peers

``make bench`` runs it too. DIR holds an environment for each peer, as ``make peers`` makes them in
``.venv-peers``; those that are missing are left out. Processor seconds of two threads, float32,
every package in a process of its own, the packages in turn in every round; the least of the rounds.

* fit, scores: the Kronecker factors of EK-FAC; influence of all images on 100 others.
* self-influence: one number per image, under the fitted factors. pyDVL and TRAK have no call for
  it: the diagonal of pairs, pyDVL's of 200 images and times N / 200, TRAK's of all. Bergson's: the
  squared length of projected gradients, whitened by their autocorrelation; it has no other here.
* build: gradients of all images projected and stored, in as many bytes each: 16 × 16 numbers a
  layer by Bergson and dattri's LoGra (MLP 3 kB, LeNet 5 kB), as many by TRAK (its fit is none)
  and ours (two bytes each, so twice as many). kronfluence and pyDVL keep no gradients.

What a package cannot do is a dash, and its error goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import case, layer_modules
from measure import threads

DAMPING = 1.0  # the prior precision, of a sum of losses
TESTS, BATCH, SIDE = 100, 250, 16
PYDVL = 200  # images of its self-influence
STEPS = ("fit", "scores", "self-influence", "build")
Steps = dict[str, Callable[[Any], Any]]  # of what the fit gives


def ours(model: nn.Module, train: TensorDataset, test: TensorDataset, numbers: int) -> Steps:
    import blr_analysis as blr

    task, held = (blr.Task(model, data.tensors) for data in (train, test))
    quiet: Any = {"progress": False}
    index = tempfile.mkdtemp() + "/index"
    return {
        "fit": lambda _: blr.fit_laplace(task, structure="kron", prior_precision=DAMPING, **quiet),
        "scores": lambda q: blr.influence(task, q, held, **quiet),
        "self-influence": lambda q: blr.sensitivity(task, q, variance=False, **quiet),
        "build": lambda q: blr.Index.build(task, q, index, rank=2 * numbers, **quiet),
    }


def kronfluence(model: nn.Module, train: TensorDataset, test: TensorDataset, _: int) -> Steps:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from peer_kronfluence import Softmax

    folder, task = tempfile.mkdtemp(), Softmax()
    quiet: Any = {"cpu": True, "disable_tqdm": True, "disable_model_save": True}
    analyzer = Analyzer("x", prepare_model(model, task), task, output_dir=folder, **quiet)
    of_test, of_train = "per_device_query_batch_size", "per_device_train_batch_size"
    how: Any = {of_train: BATCH, "score_args": ScoreArguments(damping_factor=DAMPING / len(train))}
    strategy = FactorArguments(strategy="ekfac")
    return {
        "fit": lambda _: analyzer.fit_all_factors(
            "f", train, per_device_batch_size=BATCH, factor_args=strategy
        ),
        "scores": lambda _: analyzer.compute_pairwise_scores(
            "s", "f", test, train, **{of_test: TESTS}, **how
        ),
        "self-influence": lambda _: analyzer.compute_self_scores("own", "f", train, **how),
    }


def bergson(model: nn.Module, train: TensorDataset, _: TensorDataset, __: int) -> Steps:
    from bergson import GradientCollector, GradientProcessor, IndexConfig, InMemoryCollector
    from bergson.hessians.preconditioner import DensePreconditioner
    from datasets import Dataset

    model.device = torch.device("cpu")  # type: ignore[assignment]

    def collected(kind: Any, **options: Any) -> Any:
        config = IndexConfig(tempfile.mkdtemp() + "/index", projection_dim=SIDE, include_bias=True)
        Path(config.partial_run_path).mkdir()
        processor = GradientProcessor(projection_dim=SIDE, include_bias=True)
        rows = {"input_ids": [[0]] * len(train), "length": [1] * len(train)}
        known: Any = {"data": Dataset.from_dict(rows), "cfg": config, "processor": processor}
        collector = kind(model=model, **known, **options)
        with collector:
            for part in torch.arange(len(train)).split(BATCH):
                x, y = train[part]
                x = x.unsqueeze(1) if x.ndim == 2 else x  # it sees sequences, here of one token
                collector.with_batch(torch.ones(len(x), 1, dtype=torch.bool))
                model.zero_grad()
                losses = F.cross_entropy(model(x).flatten(1), y, reduction="none")
                losses.sum().backward()
                collector.process_batch(part.tolist(), losses=losses)
        collector.teardown()
        return collector

    def own(_: None) -> Tensor:
        found = collected(InMemoryCollector, skip_hessians=False)
        whiten = DensePreconditioner.from_processor(found.processor, power=-0.5)
        lengths = [g.square().sum(1) for g in whiten.apply(found.gradients).values()]
        return torch.stack(lengths).sum(0)

    return {"build": lambda _: collected(GradientCollector), "self-influence": own}


def dattri(model: nn.Module, train: TensorDataset, test: TensorDataset, numbers: int) -> Steps:
    from dattri.algorithm.influence_function import IFAttributorEKFAC
    from dattri.algorithm.logra import LoGraAttributor
    from dattri.task import AttributionTask

    def loss(params: dict[str, Tensor], batch: Any) -> Tensor:
        x, y = batch
        one = x.ndim == train[0][0].ndim  # inside its vmap an example has no batch dimension
        x, y = (x[None], y[None]) if one else (x, y)
        return F.cross_entropy(functional_call(model, params, (x,)), y)

    def whole(network: nn.Module, batch: Any, _: str = "cpu") -> Tensor:
        return F.cross_entropy(network(batch[0]).flatten(1), batch[1], reduction="sum")

    weights = {n: p.detach() for n, p in model.named_parameters()}
    task = AttributionTask(loss_func=loss, target_func=loss, model=model, checkpoints=[weights])
    parts, held = DataLoader(train, batch_size=BATCH), DataLoader(test, batch_size=TESTS)

    def fit(_: None) -> Any:
        attributor = IFAttributorEKFAC(task=task, device="cpu", damping=DAMPING / len(train))
        attributor.cache(DataLoader(train, batch_size=len(train)))
        return attributor

    def build(_: None) -> None:
        of = AttributionTask(loss_func=whole, target_func=whole, model=model, checkpoints=[weights])
        x, y = train.tensors
        rows = TensorDataset(x.unsqueeze(1) if x.ndim == 2 else x, y)  # its rows are sequences
        logra = LoGraAttributor(
            of, hessian="Identity", proj_dim=SIDE**2, damping=DAMPING, cache_dir=tempfile.mkdtemp()
        )
        logra.cache(DataLoader(rows, batch_size=BATCH))

    return {
        "build": build,
        "fit": fit,
        "scores": lambda a: a.attribute(parts, held),
        "self-influence": lambda a: a.self_attribute(DataLoader(train, batch_size=len(train))),
    }


def pydvl(model: nn.Module, train: TensorDataset, test: TensorDataset, _: int) -> Steps:
    from pydvl.influence import InfluenceMode
    from pydvl.influence.torch import EkfacInfluence

    how = EkfacInfluence(model, update_diagonal=True, hessian_regularization=DAMPING / len(train))
    up: Any = {"mode": InfluenceMode.Up}
    few = train[:PYDVL]
    return {
        "fit": lambda _: how.fit(DataLoader(train, batch_size=BATCH)),
        "scores": lambda q: q.influences(*test.tensors, *train.tensors, **up),
        "self-influence": lambda q: q.influences(*few, *few, **up).diagonal(),
    }


def traker(model: nn.Module, train: TensorDataset, test: TensorDataset, numbers: int) -> Steps:
    import logging

    from trak import TRAKer
    from trak.projectors import BasicProjector, ProjectionType

    weights = {n: p.detach() for n, p in model.named_parameters()}
    projector = BasicProjector(
        grad_dim=sum(p.numel() for p in weights.values()),
        proj_dim=numbers,
        seed=0,
        proj_type=ProjectionType.normal,
        device="cpu",
        dtype=torch.float32,
        block_size=numbers // 2,  # it frees a single block and never refills
    )
    scorer = TRAKer(
        model=model,
        task="image_classification",
        train_set_size=len(train),
        save_dir=tempfile.mkdtemp(),
        device="cpu",
        use_half_precision=False,
        logging_level=logging.ERROR,
        projector=projector,
    )

    def build(_: None) -> None:
        scorer.load_checkpoint(weights, model_id=0)
        for batch in DataLoader(train, batch_size=BATCH):
            scorer.featurize(batch=list(batch), num_samples=len(batch[0]))
        scorer.finalize_features()

    def scores(data: TensorDataset, name: str) -> Any:
        scorer.start_scoring_checkpoint(
            exp_name=name, checkpoint=weights, model_id=0, num_targets=len(data)
        )
        for batch in DataLoader(data, batch_size=BATCH):
            scorer.score(batch=list(batch), num_samples=len(batch[0]))
        return scorer.finalize_scores(exp_name=name)

    return {
        "build": build,
        "scores": lambda _: scores(test, "test"),
        "self-influence": lambda _: scores(train, "own").diagonal(),
    }


PEERS = {f.__name__: f for f in (ours, kronfluence, bergson, dattri, pydvl, traker)}


def timed(name: str, model_name: str, images: int) -> dict[str, float | str]:
    """Processor seconds of each step on the first ``images``, or its error."""
    model, x, y = case(model_name)
    train = TensorDataset(x[:images], y[:images])
    test = TensorDataset(torch.rand(TESTS, *x.shape[1:]), torch.randint(10, (TESTS,)))
    taken: dict[str, float | str] = {}
    fitted = None
    for step, run in PEERS[name](model, train, test, SIDE**2 * len(layer_modules(model))).items():
        start = time.process_time()
        try:
            found = run(fitted)
        except Exception as error:  # of whatever kind a package raises
            taken[step] = f"{type(error).__name__}: {error}"
            continue
        scale = len(train) / PYDVL if (name, step) == ("pydvl", "self-influence") else 1
        taken[step] = scale * (time.process_time() - start)
        if step == "fit":
            fitted = found
    return taken


def worker(name: str, model_name: str) -> dict[str, float | str]:
    """After a run on few images, which imports what it needs and is not counted."""
    threads(2)
    timed(name, model_name, 40)
    package = "blr_analysis" if name == "ours" else name
    return {**timed(name, model_name, 10**6), "version": f"{package} {version(package)}"}


def shown(rows: Iterable[dict[str, Any]], step: str) -> float | None:
    return min((r[step] for r in rows if isinstance(r.get(step), float)), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", nargs="+", default=["mlp", "lenet"])
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(*args.worker)))
        return
    asleep = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}  # none spins
    pythons = {name: args.peers / name / "bin" / "python" for name in PEERS}
    pythons["ours"] = Path(sys.executable)
    for model in args.case:
        taken: dict[str, list[dict[str, Any]]] = {}
        for _ in range(args.rounds):
            for name, python in pythons.items():
                if not python.exists():
                    continue
                command = [str(python), "-W", "ignore", __file__, "--worker", name, model]
                done = subprocess.run(command, capture_output=True, text=True, env=asleep)
                if done.returncode:
                    print(f"{model}, {name} failed:\n{done.stderr[-800:]}", file=sys.stderr)
                    continue
                taken.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
        print(f"\n**{model}**\n")
        print(f"| package | {', s | '.join(STEPS)}, s |\n|{'---|' * (1 + len(STEPS))}")
        for name, rows in taken.items():
            for step in STEPS:
                if isinstance(error := rows[0].get(step), str):
                    print(f"{model}, {name}, {step}: {error[:300]}", file=sys.stderr)
            found = [shown(rows, step) for step in STEPS]
            cells = " | ".join("–" if t is None else f"{t:.3f}" for t in found)
            print(f"| {rows[0]['version']} | {cells} |")


if __name__ == "__main__":
    main()

"""Influence of 2,000 images on 100 by EK-FAC (784-32-16-10): processor seconds of each package.

    python benchmarks/peers/speed.py [--peers DIR] [--rounds 3] | python -m benchmarks.results peers

DIR holds an environment for each peer, as ``make peers`` makes them in ``.venv-peers``; those that
are missing are left out. Every package fits its factors and scores all pairs in a process of its
own, on one thread in float32, the packages in turn in every round; the least of the rounds.
Bergson reads Hugging Face models only, laplace-torch has no influence: neither has a row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import case
from measure import threads

DAMPING = 1.0  # the prior precision, of a sum of losses
TESTS = 100
PEERS = ("kronfluence", "dattri", "pydvl")
Steps = tuple[Callable[[], Any], Callable[[Any], Any]]  # fit, and scores [N, M] of what it gives


def ours(model: nn.Module, train: TensorDataset, test: TensorDataset) -> Steps:
    import blr_analysis as blr

    task, held = (blr.Task(model, data.tensors) for data in (train, test))
    return (
        lambda: blr.fit_laplace(task, structure="kron", prior_precision=DAMPING, progress=False),
        lambda q: blr.influence(task, q, held, progress=False),
    )


def kronfluence(model: nn.Module, train: TensorDataset, test: TensorDataset) -> Steps:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from peer_kronfluence import Softmax

    folder, task = tempfile.mkdtemp(), Softmax()
    quiet: Any = {"cpu": True, "disable_tqdm": True, "disable_model_save": True}
    analyzer = Analyzer("x", prepare_model(model, task), task, output_dir=folder, **quiet)

    def fit() -> None:
        strategy = FactorArguments(strategy="ekfac")
        analyzer.fit_all_factors("f", train, per_device_batch_size=250, factor_args=strategy)

    def scores(_: None) -> Any:
        how = ScoreArguments(damping_factor=DAMPING / len(train))
        batches: Any = {"per_device_query_batch_size": 100, "per_device_train_batch_size": 250}
        return analyzer.compute_pairwise_scores("s", "f", test, train, score_args=how, **batches)

    return fit, scores


def dattri(model: nn.Module, train: TensorDataset, test: TensorDataset) -> Steps:
    from dattri.algorithm.influence_function import IFAttributorEKFAC
    from dattri.task import AttributionTask

    def loss(params: dict[str, Tensor], batch: Any) -> Tensor:
        x, y = batch
        one = x.ndim == 1  # inside its vmap an example has no batch dimension
        x, y = (x[None], y[None]) if one else (x, y)
        return F.cross_entropy(functional_call(model, params, (x,)), y)

    weights = {n: p.detach() for n, p in model.named_parameters()}
    task = AttributionTask(loss_func=loss, target_func=loss, model=model, checkpoints=[weights])

    def fit() -> Any:
        attributor = IFAttributorEKFAC(task=task, device="cpu", damping=DAMPING / len(train))
        attributor.cache(DataLoader(train, batch_size=len(train)))
        return attributor

    return fit, lambda a: a.attribute(
        DataLoader(train, batch_size=250), DataLoader(test, batch_size=TESTS)
    )


def pydvl(model: nn.Module, train: TensorDataset, test: TensorDataset) -> Steps:
    from pydvl.influence import InfluenceMode
    from pydvl.influence.torch import EkfacInfluence

    how = EkfacInfluence(model, update_diagonal=True, hessian_regularization=DAMPING / len(train))
    return (
        lambda: how.fit(DataLoader(train, batch_size=250)),
        lambda q: q.influences(*test.tensors, *train.tensors, mode=InfluenceMode.Up),
    )


def worker(name: str) -> dict[str, float]:
    threads(1)
    model, x, y = case("mlp")
    train = TensorDataset(x, y)
    test = TensorDataset(torch.rand(TESTS, x.shape[1]), torch.randint(10, (TESTS,)))
    fit, scores = globals()[name](model, train, test)
    start = time.process_time()
    fitted = fit()
    middle = time.process_time()
    scores(fitted)
    return {"fit": middle - start, "scores": time.process_time() - middle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(args.worker)))
        return
    pythons = {"ours": Path(sys.executable)}
    pythons |= {peer: args.peers / peer / "bin" / "python" for peer in PEERS}
    taken: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for name, python in pythons.items():
            if not python.exists():
                continue
            command = [str(python), "-W", "ignore", __file__, "--worker", name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name} failed:\n{done.stderr[-800:]}", file=sys.stderr)
                continue
            taken.setdefault(name, []).append(json.loads(done.stdout.strip().splitlines()[-1]))
    print("| package | fit, s | scores, s | × ours, fit | × ours, scores |\n|---|---|---|---|---|")
    least = {n: {k: min(r[k] for r in rows) for k in rows[0]} for n, rows in taken.items()}
    for name, row in least.items():
        times = [f"{row[k] / least['ours'][k]:.1f}" for k in row]
        print(f"| {name} | {row['fit']:.3f} | {row['scores']:.3f} | {' | '.join(times)} |")


if __name__ == "__main__":
    main()

"""The merges that FusionBench has too: how far they are from ours, and what both lose.

    python -m benchmarks.merging.fusionbench [--kinds mlp cnn llama] [--seeds 1 2 3] [--peers DIR] \
        | python -m benchmarks.results merging_fusionbench

The models and their losses are those of :mod:`benchmarks.merging.contest`. Both packages merge in
float64, by the same settings. The columns: FusionBench's mean test loss over tasks and seeds, ours,
and the largest difference between two merged numbers, over the largest number of their tensor, in
the weights of linear layers and in other tensors (the embedding and the head of a language model
among them). DIR has FusionBench's environment as DIR/fusion-bench (``make peers`` sets it up).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import blr_analysis as blr
from benchmarks.merging.cases import CASES, Case
from benchmarks.merging.child import output
from benchmarks.merging.contest import LETTERS_READ, TEXTS, Contender, State, markdown

PEER = Path(__file__).with_name("peers_fusionbench.py")
KINDS = ("mlp", "cnn", "llama")
# They have a row for each token: ours averages them, and FusionBench is told to.
TABLES = ["model.embed_tokens.weight", "lm_head.weight"]


class Doubled(Contender):
    """A contender that merges in float64, and what else FusionBench is given."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.base = _doubled(case.base)
        self.models = [_doubled(model) for model in self.models]

    def merged(self, **how: Any) -> State:
        return blr.merge(self.base, self.models, dtype=torch.float64, progress=False, **how)

    def slerp(self) -> State:
        models = self.models[:2]
        return blr.merge(None, models, method="slerp", t=0.4, dtype=torch.float64, progress=False)

    @cached_property
    def fisher(self) -> list[State]:
        """The diagonal of each task's Fisher information."""
        return [
            {
                name: posterior.precision(name).double() - posterior.prior_precision
                for name in posterior.mean
            }
            for posterior in self.diag
        ]

    @cached_property
    def moments(self) -> list[State]:
        """The mean x xᵀ of the inputs of every linear layer, in the task's own model."""
        return [_moments(task) for task in self.case.train.values()]


def _doubled(state: State) -> State:
    return {name: tensor.double().contiguous() for name, tensor in state.items()}


def _moments(task: blr.Task) -> State:
    sums: State = {}
    n_rows: dict[str, int] = {}

    def hook_of(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def add(module: nn.Module, arguments: Any, result: Any) -> None:
            rows = arguments[0].detach().flatten(0, -2).double()
            sums[name] = sums.get(name, 0) + rows.mT @ rows
            n_rows[name] = n_rows.get(name, 0) + len(rows)

        return add

    layers = {n: m for n, m in task.model.named_modules() if isinstance(m, nn.Linear)}
    handles = [layer.register_forward_hook(hook_of(name)) for name, layer in layers.items()]
    with torch.no_grad():
        for _, (x, _) in task.batches():
            task.model(x)
    for handle in handles:
        handle.remove()
    return {name: total / n_rows[name] for name, total in sums.items()}


@dataclass(frozen=True)
class Merge:
    """A merge by both packages.

    Attributes:
        name: its name in the table.
        algorithm: FusionBench's class, or "Fisher" or "RegMean", whose statistics are given.
        settings: of FusionBench's.
        ours: the same merge by this package.
    """

    name: str
    algorithm: str
    settings: dict[str, Any]
    ours: Callable[[Doubled], State]


def merges(n_models: int) -> list[Merge]:
    """All merges, for so many models."""
    share = 1 / n_models
    regmean = {
        "exclude_param_names_regex": [],
        "num_regmean_examples": 1,
        "reduce_non_diagonal_ratio": 1.0,
        "weight_transpose": True,
    }
    fisher = {
        "exclude_param_names_regex": [],
        "num_fisher_examples": 1,
        "normalize_fisher_weight": False,
        "minimal_fisher_weight": 1e-12,
    }
    ties = {"scaling_factor": 1.0, "threshold": 20, "remove_keys": [], "merge_func": "mean"}
    dare = {"sparsity_ratio": 0.5, "only_on_linear_weights": False}
    return [
        Merge("average", "SimpleAverageAlgorithm", {}, lambda c: c.merged(method="linear")),
        Merge(
            "task arithmetic, λ = 0.3",
            "TaskArithmeticAlgorithm",
            {"scaling_factor": 0.3},
            lambda c: c.merged(method="task_arithmetic", weights=0.3),
        ),
        Merge(
            "TIES, density 0.2",
            "TiesMergingAlgorithm",
            ties,
            lambda c: c.merged(method="ties", density=0.2),
        ),
        Merge(
            "DARE, density 0.5",
            "DareSimpleAverage",
            dare,
            lambda c: c.merged(method="dare_linear", density=0.5, weights=share),
        ),
        Merge("SLERP of two, t = 0.4", "SlerpMergeAlgorithm", {"t": 0.4}, Doubled.slerp),
        Merge("Model Stock", "ModelStock", {}, lambda c: c.merged(method="model_stock")),
        Merge(
            "Fisher average, diag",
            "Fisher",
            fisher,
            lambda c: c.merged(method="fisher", precisions=c.fisher),
        ),
        Merge(
            "RegMean (gram)",
            "RegMean",
            regmean,
            lambda c: c.merged(method="fisher", precisions=c.gram),
        ),
        Merge(
            "iso_c",
            "ISO_C_Merge",
            {"scaling_factor": share, "exclude_keys": TABLES},
            lambda c: c.merged(method="iso_c", scale=share),
        ),
        Merge(
            "iso_cts",
            "ISO_CTS_Merge",
            {"scaling_factor": share, "common_space_fraction": 0.8, "exclude_keys": TABLES},
            lambda c: c.merged(method="iso_cts", scale=share),
        ),
        Merge(
            "tsv_m",
            "TaskSingularVectorMerging",
            {"alpha": 0.5, "exclude_keys": TABLES},
            lambda c: c.merged(method="tsv_m", scale=0.5),
        ),
        Merge(
            "wudi",
            "WUDIMerging",
            {"iter_num": 300, "exclude_keys": TABLES},
            lambda c: c.merged(method="wudi"),
        ),
    ]


def rows_of(kind: str, seed: int, python: Path) -> list[dict[str, Any]]:
    """Losses and differences of all merges of one case."""
    case = CASES[kind](seed)
    contender = Doubled(case)
    taken = merges(len(case.models))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _write(contender, root, taken)
        output([python, "-W", "ignore", PEER, root])
        files = {path.stem: path for path in (root / "merged").glob("*.safetensors")}
        theirs = {name: load_file(path) for name, path in files.items()}
    scale = 1 / LETTERS_READ if kind in TEXTS else 1.0
    rows = []
    for merge in taken:
        our_state = merge.ours(contender)
        row = {"merge": merge.name, "kind": kind, "ours": scale * _mean_loss(case, our_state)}
        if merge.name in theirs:
            their_state = theirs[merge.name]
            row["FusionBench"] = scale * _mean_loss(case, their_state)
            layers = {f"{name}.weight" for name in contender.moments[0]} - set(TABLES)
            row["linear weights"] = _largest_difference(our_state, their_state, layers)
            row["other tensors"] = _largest_difference(
                our_state, their_state, their_state.keys() - layers
            )
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def _write(contender: Doubled, root: Path, taken: list[Merge]) -> None:
    """What FusionBench reads."""
    by_folder = {
        "models": contender.models,
        "fisher": contender.fisher,
        "moments": contender.moments,
    }
    for name, states in by_folder.items():
        (root / name).mkdir()
        for number, state in enumerate(states, 1):
            save_file(state, root / name / f"{number}.safetensors")
    (root / "merged").mkdir()
    save_file(contender.base, root / "base.safetensors")
    asked = {
        merge.name: {"algorithm": merge.algorithm, "settings": merge.settings} for merge in taken
    }
    (root / "merges.json").write_text(json.dumps(asked))


def _mean_loss(case: Case, state: State) -> float:
    losses = [evaluation.nll for evaluation in case.evaluations(state)]
    return sum(losses) / len(losses)


def _largest_difference(ours: State, theirs: State, names: Collection[str]) -> float:
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in names
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    python = options.peers / "fusion-bench" / "bin" / "python"
    rows = []
    for kind in options.kinds:
        for seed in options.seeds:
            rows += rows_of(kind, seed, python)
    groups = pd.DataFrame(rows).groupby(["merge", "kind"], sort=False)
    columns = {
        "FusionBench": groups["FusionBench"].agg(lambda loss: f"{loss.mean(skipna=False):.3f}"),
        "ours": groups["ours"].agg(lambda loss: f"{loss.mean():.3f}"),
        "linear weights": groups["linear weights"].agg(lambda gap: f"{gap.max():.0e}"),
        "other tensors": groups["other tensors"].agg(lambda gap: f"{gap.max():.0e}"),
    }
    print(markdown(pd.DataFrame(columns).reset_index()))


if __name__ == "__main__":
    main()

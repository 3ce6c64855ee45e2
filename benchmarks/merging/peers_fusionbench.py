"""FusionBench's merges of state dicts, written beside what they were made of.

    python peers_fusionbench.py FOLDER

Runs in FusionBench's own environment. FOLDER has base.safetensors, models/TASK.safetensors and
merges.json: the algorithm and the settings of every merge, which goes to merged/MERGE.safetensors.

Fisher merging and RegMean are given what they would measure: fisher/TASK.safetensors has the Fisher
information of every weight, moments/TASK.safetensors the mean x xᵀ of the inputs of every linear
layer. A merge that would invert a singular matrix is left out.
"""

# FusionBench is in another environment.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fusion_bench.method as algorithms
import torch
from fusion_bench import BaseModelPool
from fusion_bench.method.fisher_merging.fisher_merging import FisherMergingAlgorithm
from fusion_bench.method.regmean.regmean import RegMeanAlgorithm
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

State = dict[str, Tensor]


class Pool(BaseModelPool):
    """A base and models, with the tensors that stand for a model's data."""

    def __init__(self, models: dict[str, nn.Module], data: dict[str, State]) -> None:
        super().__init__(models)
        self.data = data

    def load_train_dataset(self, name: str) -> State:
        return self.data[name]


class Fisher(FisherMergingAlgorithm):
    """Fisher merging by statistics that are given."""

    def get_fisher_weights(
        self, model_name: str, model: nn.Module, train_dataset: State, param_names_to_merge: Any
    ) -> State:
        return {name: train_dataset[name] for name in param_names_to_merge}


class RegMean(RegMeanAlgorithm):
    """RegMean by statistics that are given."""

    _include_module_type = (nn.Module,)

    def get_regmean_weights(
        self, model_name: str, model: nn.Module, train_dataset: State, linear_modules_to_merge: Any
    ) -> State:
        return train_dataset


def module_of(state: State) -> nn.Module:
    """A module that holds the tensors of a state dict by their names, and computes nothing."""
    root = nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(tensor))
    return root


def tensors_in(folder: Path) -> dict[str, State]:
    """The tensors of every file of a folder, by the file's name."""
    return {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def merged(folder: Path, algorithm: str, settings: dict[str, Any]) -> State:
    """A merge of the models of a folder."""
    models = {name: module_of(state) for name, state in tensors_in(folder / "models").items()}
    if algorithm == "SlerpMergeAlgorithm":
        models = dict(list(models.items())[:2])  # it takes no base
    else:
        models["_pretrained_"] = module_of(load_file(folder / "base.safetensors"))
    if algorithm == "Fisher":
        pool = Pool(models, tensors_in(folder / "fisher"))
        result = Fisher(**settings).run(pool)
    elif algorithm == "RegMean":
        pool = Pool(models, tensors_in(folder / "moments"))
        result = RegMean(**settings).run(pool)
    else:
        kind = getattr(algorithms, algorithm)
        result = kind(**settings).run(Pool(models, {}))
    return {name: tensor.detach().clone() for name, tensor in result.state_dict().items()}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)  # DARE draws
    for name, merge in json.loads((folder / "merges.json").read_text()).items():
        try:
            state = merged(folder, merge["algorithm"], merge["settings"])
        except torch.linalg.LinAlgError as error:  # RegMean inverts whatever it is given
            print(f"{name}: {error}", file=sys.stderr)
            continue
        save_file(state, folder / "merged" / f"{name}.safetensors")


if __name__ == "__main__":
    main()

"""FusionBench's merges of state dicts, written beside what they were made of.

    python peers_fusionbench.py FOLDER

Runs in FusionBench's own environment. FOLDER has base.safetensors, models/TASK.safetensors and
merges.json: the algorithm and the settings of every merge, which goes to merged/MERGE.safetensors.

Fisher merging and RegMean are given what they would measure: fisher/TASK.safetensors has the Fisher
information of every weight, moments/TASK.safetensors the mean x xᵀ of the inputs of every linear
layer. RegMean++ measures these itself, on inputs/TASK.safetensors, for linear layers with ReLU
between them.
"""

from __future__ import annotations

import contextlib
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


class RegMeanPlusPlus(algorithms.RegMeanAlgorithmPlusPlus):
    """RegMean++ of linear layers with ReLU between them."""

    def merge_embedding_layer(self, models_to_merge_dict: Any) -> State:
        return {}

    def get_input_for_first_layer(self, model: nn.Module, train_dataset: State) -> list[Tensor]:
        return [train_dataset["x"]]

    def get_layers(self, model: nn.Module) -> list[Layer]:
        state = model.state_dict()
        layers = {name.rpartition(".")[0] for name in state}
        self.names = sorted(layers, key=int)
        return [Layer(state, name, is_first=name == self.names[0]) for name in self.names]

    def get_regmean_weights(
        self,
        model_name: str,
        layer: Layer,
        batches_input: list[Tensor],
        linear_modules_to_merge: Any,
    ) -> State:
        inputs = layer.inputs(batches_input[0])
        return {"linear": inputs.mT @ inputs / len(inputs)}

    def layer_batches_forward(self, layer: Layer, batches_input: list[Tensor]) -> list[Tensor]:
        return [layer.linear(layer.inputs(batch)) for batch in batches_input]

    def update_merged_params_dict(
        self, merged_params_dict: State, new_merged_params: State, layer_idx: int
    ) -> State:
        layer = self.names[layer_idx]
        named = {
            name.replace("linear", layer): tensor for name, tensor in new_merged_params.items()
        }
        return {**merged_params_dict, **named}


class Layer(nn.Module):
    """A linear layer behind ReLU, unless it is the first."""

    def __init__(self, state: State, name: str, *, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        weight = state[f"{name}.weight"]
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
        self.linear.load_state_dict({"weight": weight, "bias": state[f"{name}.bias"]})

    def inputs(self, batch: Tensor) -> Tensor:
        return batch if self.is_first else batch.relu()


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


def merged(folder: Path, algorithm: str, settings: dict[str, Any]) -> State:
    """A merge of the models of a folder."""
    models = {path.stem: module_of(load_file(path)) for path in tensors_in(folder / "models")}
    if algorithm == "SlerpMergeAlgorithm":
        models = dict(list(models.items())[:2])
    else:
        models["_pretrained_"] = module_of(load_file(folder / "base.safetensors"))
    kind = OURS.get(algorithm) or getattr(algorithms, algorithm)
    data = {path.stem: load_file(path) for path in tensors_in(folder / DATA.get(algorithm, ""))}
    model = kind(**settings).run(Pool(models, data))
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def tensors_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


OURS = {"Fisher": Fisher, "RegMean": RegMean, "RegMeanPlusPlus": RegMeanPlusPlus}
DATA = {"Fisher": "fisher", "RegMean": "moments", "RegMeanPlusPlus": "inputs"}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)  # DARE draws
    for name, merge in json.loads((folder / "merges.json").read_text()).items():
        with contextlib.redirect_stdout(sys.stderr):
            state = merged(folder, merge["algorithm"], merge["settings"])
        save_file(state, folder / "merged" / f"{name}.safetensors")


if __name__ == "__main__":
    main()

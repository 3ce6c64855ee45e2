"""mergekit on a recipe, timed from after its imports; gradient matching is added to it.

    python peers_mergekit.py RECIPE.yml OUT

Runs in mergekit's own environment. The method is added as mergekit has methods added: a function
of the tensors of all "models", decorated and registered. It is written with as few copies as
torch allows; the precisions come as models too, after the fine-tunes, base's first.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from mergekit.merge_methods import InputContract, PerNonBase, TensorGroup, merge_method, register
from mergekit.merge_methods.base import BasePolicy
from mergekit.scripts.run_yaml import main as mergekit_yaml

FLAGS = ("--allow-crimes", "--lazy-unpickle", "--no-write-model-card", "--quiet")


@merge_method(
    name="gradient_matching",
    pretty_name="Gradient matching",
    reference_url="https://arxiv.org/abs/2310.12808",
    contract=InputContract(base=BasePolicy.REQUIRED, min_inputs=4),
)
def gradient_matching(
    group: TensorGroup, weight: PerNonBase[float], delta: float = 0.0
) -> torch.Tensor:
    assert group.base is not None
    start = group.base.tensor
    count = (len(group.non_base) - 1) // 2
    models = group.non_base[:count]
    precisions = group.non_base[count:]
    first = precisions[0].tensor + delta
    total = first.clone()
    step = torch.zeros_like(start)
    for model, precision in zip(models, precisions[1:], strict=True):
        alpha = weight[model.id]
        total.add_(precision.tensor, alpha=alpha)
        step.addcmul_(first + precision.tensor, model.tensor - start, value=alpha)
    return step.div_(total).add_(start)


def main() -> None:
    recipe = sys.argv[1]
    out = sys.argv[2]
    register(gradient_matching)
    started = time.perf_counter()
    mergekit_yaml([recipe, out, *FLAGS], standalone_mode=False)
    print(json.dumps({"inner": time.perf_counter() - started}))


if __name__ == "__main__":
    main()

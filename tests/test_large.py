"""The recipes for GPUs at toy size: what they read, learn, judge and go on from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_model
from sklearn.metrics import accuracy_score, log_loss

pytest.importorskip("transformers")

import blr_analysis as blr
from benchmarks import large
from benchmarks.binary import expected_calibration_error
from benchmarks.large import Recipe

IVON = {"lr": 1.0, "hess_init": 1.0, "weight_decay": 1e-5}


def tiny_gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rest = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=8,
            n_positions=8,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            **rest,
        )
    )


def tiny_resnet() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=2)
    )


TOYS = {
    "gpt2": Recipe(
        tiny_gpt2, large.windows_of(8), 60, 4, 8, 4, 8, None,
        {"IVON": IVON, "AdamW": {"lr": 0.01}},
    ),
    "imagenet": Recipe(
        tiny_resnet, large.pictures_of(32), 30, 3, 8, 4, 1, None, {"IVON": IVON, "SGD": {"lr": 0.1}}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A b c d, over and over, from any letter on."""
    folder = tmp_path_factory.mktemp("texts")
    lines = (("abcd" * 12)[k % 4 :][:41] for k in range(4001))
    large.write_tokens(folder, lines, lambda t: [ord(c) - ord("a") for c in t])
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Red and blue ones, 50 by 40, in train/ and val/."""
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for part, n in (("train", 16), ("val", 6)):
        for channel, name in enumerate(("red", "blue")):
            (folder / part / name).mkdir(parents=True)
            for k in range(n):
                pixels = draw.integers(0, 100, (40, 50, 3), dtype=np.uint8)
                pixels[:, :, 2 * channel] += 120
                Image.fromarray(pixels).save(folder / part / name / f"{k}.png")
    return folder


def run(what: str, folder: Path, out: Path, *more: str) -> None:
    given = [what, str(folder), "--out", str(out), "--every", "10", "--draws", "3"]
    large.main([*given, "--device", "cpu", *more], TOYS)


def test_the_networks_are_those_of_the_papers() -> None:
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in r.model().parameters()) for r in large.RECIPES.values()]
    assert sizes == [25_557_032, 124_439_808]


@pytest.mark.parametrize("kind", ["IVON", "AdamW"])
def test_a_language_model_learns_and_goes_on_to_the_bit(
    kind: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("gpt2", texts, tmp_path / "whole", "--optimizer", kind)
    said = capsys.readouterr().out.splitlines()
    found = {line.partition(" {")[0]: eval("{" + line.partition(" {")[2]) for line in said[6:]}
    assert ("3 draws" in found) == (kind == "IVON")
    assert all(way["accuracy"] > 0.9 and way["nll"] < 0.5 for way in found.values())
    for more in (["--until", "30"], []):
        run("gpt2", texts, tmp_path / "parts", "--optimizer", kind, *more)
    models = [tiny_gpt2(), tiny_gpt2()]
    for model, name in zip(models, ("whole", "parts"), strict=True):
        load_model(model, tmp_path / name / "model.safetensors")
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(one, other)
    if kind == "IVON":
        posterior = blr.Posterior.load(tmp_path / "whole" / "posterior.safetensors")
        named = dict(models[0].named_parameters())
        assert {*posterior.mean} == {*named}
        assert all(torch.equal(posterior.mean[n], p) for n, p in named.items())


def test_pictures_are_told_apart_and_judged_as_scikit_learn_does(
    pictures: Path, tmp_path: Path
) -> None:
    recipe = TOYS["imagenet"]
    model, optimizer, data = large.train(recipe, "IVON", pictures, tmp_path, "cpu", 100, None)
    found = large.judged(model, optimizer, data, 0, 5, "cpu")
    x, y = (torch.stack([torch.as_tensor(row[k]) for row in data]) for k in (0, 1))  # type: ignore[attr-defined]
    probs = model(x).logits.detach().double().softmax(-1)
    assert found["accuracy"] == pytest.approx(accuracy_score(y, probs.argmax(-1)))
    assert found["nll"] == pytest.approx(log_loss(y, probs.numpy()), abs=1e-5)
    assert found["ece"] == pytest.approx(expected_calibration_error(probs, y), abs=1e-5)
    assert found["accuracy"] > 0.9

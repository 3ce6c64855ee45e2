"""Weights over the layers: every value worked out by hand."""

from __future__ import annotations

import pytest

from blr_analysis.merging.recipe.layer_weights import (
    LayerWeights,
    Rule,
    depth_of,
    depths,
    varies,
    weight_by_layer,
)

LLAMA = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{part}" for i in range(5) for part in ("mlp.up.weight", "norm.weight")),
    "model.norm.weight",
    "lm_head.weight",
]


def weight(*rules: Rule, names: list[str] = LLAMA, default: float = 1.0) -> LayerWeights:
    return LayerWeights(rules, depths(names), default)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # five layers stand at t = 0, 1/4, 1/2, 3/4, 1
        ((0.0, 1.0), [0.0, 0.25, 0.5, 0.75, 1.0]),
        ((0.0, 1.0, 0.0), [0.0, 0.5, 1.0, 0.5, 0.0]),
        ((1.0, 4.0, 2.0, 8.0, 0.0), [1.0, 4.0, 2.0, 8.0, 0.0]),
        ((0.0, 3.0, 6.0, 0.0), [0.0, 2.25, 4.5, 4.5, 0.0]),  # 3t = 0, 3/4, 3/2, 9/4, 3
        ((-2.0,), [-2.0] * 5),
    ],
)
def test_a_list_is_interpolated_over_the_layers(
    values: tuple[float, ...], expected: list[float]
) -> None:
    found = weight(Rule(values))
    assert [found(f"model.layers.{i}.mlp.up.weight") for i in range(5)] == expected
    assert found("model.embed_tokens.weight") == values[0]
    assert found("model.norm.weight") == found("lm_head.weight") == values[0]


def test_the_only_layer_stands_at_the_end() -> None:
    assert weight(Rule((0.25, 0.75)), names=["h.0.w"])("h.0.w") == 0.75


def test_the_first_fitting_rule_decides() -> None:
    found = weight(Rule((0.0, 1.0), "mlp"), Rule((7.0,), "layers.3"), Rule((2.0,)))
    assert found("model.layers.3.mlp.up.weight") == 0.75  # of mlp, although it is in layer 3
    assert found("model.layers.3.norm.weight") == 7.0
    assert found("model.layers.2.norm.weight") == found("lm_head.weight") == 2.0


def test_where_no_rule_speaks_the_default_holds() -> None:
    found = weight(Rule((5.0,), "mlp"), Rule((6.0,), "norm"), default=0.5)
    assert found("model.layers.0.mlp.up.weight") == 5.0
    assert found("model.layers.0.norm.weight") == 6.0
    assert found("lm_head.weight") == 0.5


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("bert.embeddings.LayerNorm.weight", 0.0),
        ("transformer.wte.weight", 0.0),
        ("transformer.wpe.weight", 0.0),
        ("shared.weight", 0.0),
        ("embed_out.weight", 0.0),
        ("transformer.ln_f.bias", 0.0),
        ("classifier.out_proj.weight", 0.0),
        ("model.layers.2.embed.weight", 0.5),  # inside a layer, whatever it is called
        ("model.layers.1.experts.7.w1.weight", 0.25),
    ],
)
def test_what_stands_outside_the_layers_is_at_the_beginning_as_in_mergekit(
    name: str, depth: float
) -> None:
    assert depth_of(name, depths(LLAMA)) == depth


def test_each_stack_has_a_depth_of_its_own() -> None:
    names = [f"encoder.block.{i}.w" for i in range(3)] + [f"decoder.block.{i}.w" for i in range(5)]
    found = weight(Rule((0.0, 1.0)), names=names)
    assert found("encoder.block.1.w") == 0.5
    assert found("decoder.block.1.w") == 0.25


def test_numbers_with_gaps_are_no_layers() -> None:
    names = ["head.0.weight", "head.3.weight", "blocks.0.w", "blocks.1.w"]
    assert depths(names) == {"blocks": 2}
    assert depth_of("head.0.weight", depths(names)) == 0.0


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([Rule((0.5,))], 0.5),
        ([Rule((0.5, 0.5))], 0.5),
        ([], 0.25),
        ([Rule((0.5,), "mlp"), Rule((0.7,))], None),
        ([Rule((0.0, 1.0))], None),
    ],
)
def test_a_weight_is_a_number_where_no_name_matters(
    rules: list[Rule], expected: float | None
) -> None:
    assert varies(rules) == (expected is None)
    found = weight_by_layer(tuple(rules), {}, 0.25)
    assert callable(found) if expected is None else found == expected


def test_a_weight_shows_what_it_is() -> None:
    assert repr(weight(Rule((0.0, 1.0), "mlp"), Rule((2.0,)))) == "mlp: [0.0, 1.0]; 2.0"
    assert repr(weight(Rule((0.5,), "mlp"))) == "mlp: 0.5; 1.0"

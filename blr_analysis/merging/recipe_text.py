"""How a merge is written down: the keys of a YAML recipe, and their types.

Recipes have mergekit's keys. mergekit drops or overlooks some mistakes silently: unknown keys, for
example. They are errors here. No tag of the YAML is ever acted upon.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    ValidationError,
    model_validator,
)
from ruamel.yaml import YAML

from blr_analysis.checks import some
from blr_analysis.errors import InputError, StorageError, told_as
from blr_analysis.merging.methods import METHODS

AUTO = "auto"  # the method is chosen by the data
# Keys of mergekit's recipes for jobs that this package does not do.
KEYS_OF_MERGEKIT = {
    "align_weights": "neurons are not matched here; leave it out",
    "chat_template": "the chat template comes with the tokenizer; leave it out",
    "experts": "mixtures of experts are mergekit's (mergekit-moe)",
    "gate_mode": "mixtures of experts are mergekit's (mergekit-moe)",
    "genome": "evolution is mergekit's (mergekit-evolve)",
    "metric_method": "it compares models and merges none; write merge_method",
    "modules": "parts of a model with recipes of their own are mergekit's; write models",
    "name": "merges that follow each other are mergekit-multi's; leave it out",
    "out_path": "merges that follow each other are mergekit's; leave it out, and name OUT",
}
# What is said of methods that recipes name and this package has not.
METHODS_OF_OTHERS = {
    "encoder_decoder_weighted": "write linear, with weight: [{filter: encoder, value: 0.8}, ...]",
    "passthrough": "to stack layers, use mergekit",
}
# What is said of parameters and other keys of mergekit's that have no place here.
WHOLE_TENSORS = "whole tensors are merged here, no rows: leave it out, or use mergekit"
PARAMETERS_OF_MERGEKIT = {
    "filter_wise": WHOLE_TENSORS,
    "nuslerp_flatten": WHOLE_TENSORS,
    "nuslerp_row_wise": WHOLE_TENSORS,
    "normalize_weights": "weights are divided by their sum: leave it out, or use mergekit",
    "geodesic": "nuslerp has no other way: leave it out",
    "pad_to_multiple_of": "token tables are not padded here: leave it out",
    "tokens": "rows of single tokens are not chosen here: leave it out, or use mergekit",
}
MERGEKIT = "mergekit may support this"  # said of keys and methods that are unknown here
MAX_BYTES = 200_000  # a larger file is no recipe
COMPLAINTS_SHOWN = 5  # faults of a recipe that one error names
# Our words for some of pydantic's complaints.
COMPLAINTS = {
    "extra_forbidden": f"there is no such key ({MERGEKIT})",
    "model_type": "expected keys and values, such as model: ./ft1",
}


def _form(value: Any) -> str:
    """The form in which a weight is written: a tag of :data:`WrittenWeight`."""
    if isinstance(value, dict):
        return "rule"
    if isinstance(value, list) and value and all(isinstance(rule, dict) for rule in value):
        return "rules"
    return "values"


# A text that is not blank and holds no character 0, which no path may have.
Text = Annotated[str, Field(pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[Number, Field(ge=0, le=1)]


def _reference(written: Any) -> Any:
    """A model in mergekit's longer form, as text: ``MODEL@REVISION+ADAPTER``.

    >>> _reference({"model": {"path": "org/model", "revision": "v1"}, "lora": "./adapter"})
    'org/model@v1+./adapter'
    """
    if not isinstance(written, dict):
        return written
    text = written.get("model", written.get("path"))
    if isinstance(text, dict):
        text = _reference(text)
    for key, sign in (("revision", "@"), ("lora", "+")):
        value = _reference(written.get(key))
        if value is not None:
            text = f"{text}{sign}{value}"
    unknown = written.keys() - {"model", "path", "revision", "lora"}
    if unknown:
        raise ValueError(f"{some(sorted(unknown))}: leave it out")
    return text


def _with_adapter(written: Any) -> Any:
    """A model whose adapter is named beside it, ``lora: ADAPTER``, as ``model: MODEL+ADAPTER``."""
    if not isinstance(written, dict) or "lora" not in written:
        return written
    others = {key: value for key, value in written.items() if key != "lora"}
    model = {"model": written.get("model"), "lora": written["lora"]}
    return {**others, "model": _reference(model)}


def _with_filter(written: Any) -> Any:
    """A rule in which ``pattern``, an older word, is written for ``filter``."""
    if isinstance(written, dict) and "pattern" in written and "filter" not in written:
        others = {key: value for key, value in written.items() if key != "pattern"}
        return {**others, "filter": written["pattern"]}
    return written


def _dtype_name(value: Any) -> Any:
    """``torch.float32`` is written for ``float32`` too."""
    return value.removeprefix("torch.") if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    """A single number is a list of one."""
    return value if isinstance(value, list) else [value]


def _empty_section(value: Any) -> Any:
    """A key with nothing behind it is a section without keys."""
    return value or {}


ModelText = Annotated[Text, BeforeValidator(_reference)]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"], BeforeValidator(_dtype_name)
]
Values = Annotated[tuple[Number, ...], BeforeValidator(_as_list), Field(min_length=1)]


class Section(BaseModel):
    """A mapping of the recipe; a key that is not here is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WrittenRule(Section):
    """A value for the tensors whose name contains ``filter``."""

    _older_word = model_validator(mode="before")(_with_filter)

    value: Values
    filter: Annotated[str, Field(min_length=1)] | None = None


WrittenWeight = Annotated[
    Annotated[Values, Tag("values")]
    | Annotated[WrittenRule, Tag("rule")]
    | Annotated[list[WrittenRule], Tag("rules")],
    Discriminator(_form),
]


class ModelParameters(Section):
    """``parameters`` of one model."""

    weight: WrittenWeight | None = None
    lambda_: WrittenWeight | None = Field(default=None, alias="lambda")
    density: WrittenWeight | None = None
    epsilon: WrittenWeight | None = None
    gamma: WrittenWeight | None = None
    t: WrittenWeight | None = None
    normalize: bool | None = None
    rescale: bool | None = None
    int8_mask: Any = None  # accepted as in mergekit; it changes no number


class Parameters(ModelParameters):
    """``parameters`` of the whole recipe."""

    delta: Annotated[Number, Field(ge=0)] | None = None
    missing_precision: Literal["error", "base", "zero"] | None = None
    shrink: Share | None = None
    power: Share | None = None
    damping: Annotated[Number, Field(ge=0)] | None = None
    seed: Annotated[StrictInt, Field(ge=0)] | None = None
    select_topk: Share | None = None
    r: Annotated[Number, Field(ge=0)] | None = None
    alpha: Annotated[Number, Field(ge=0)] | None = None
    nuslerp_flatten: Literal[True] | None = None
    nuslerp_row_wise: Literal[False] | None = None
    filter_wise: Literal[False] | None = None
    normalize_weights: Literal[True] | None = None  # multislerp's
    eps: Any = None  # mergekit's multislerp and karcher have these; a note says that they are
    max_iter: Any = None  # without effect here
    tol: Any = None


class Entry(Section):
    """One of ``models``."""

    _adapter = model_validator(mode="before")(_with_adapter)

    model: ModelText
    precision: Text | None = None
    n_data: Annotated[StrictInt, Field(gt=0)] | None = None
    data: Text | None = None
    parameters: Annotated[ModelParameters, BeforeValidator(_empty_section)] = ModelParameters()


class SliceSource(Section):
    """One of the ``sources`` of a slice."""

    _adapter = model_validator(mode="before")(_with_adapter)

    model: ModelText
    layer_range: tuple[StrictInt, StrictInt]
    parameters: Annotated[ModelParameters, BeforeValidator(_empty_section)] = ModelParameters()


class Slice(Section):
    """Layers that are merged by themselves."""

    sources: Annotated[list[SliceSource], Field(min_length=1)]
    parameters: Annotated[Parameters, BeforeValidator(_empty_section)] = Parameters()


class Tokenizer(Section):
    """``tokenizer``, mergekit's longer form of ``tokenizer_source``."""

    source: ModelText = "base"


class OutAdapter(Section):
    """``out_adapter``: adapters are merged into an adapter."""

    rank: Annotated[StrictInt, Field(gt=0)] | None = None


def _rank_by_name(written: Any) -> Any:
    """``out_adapter`` as a section; a bare number or word says how to write it."""
    if written and not isinstance(written, dict):
        raise ValueError("write {rank: 16}, or {} to cut nothing")
    return _empty_section(written)


class RecipeText(Section):
    """A recipe as it is written."""

    merge_method: Text
    models: Annotated[list[Entry], Field(min_length=1)] | None = None
    slices: Annotated[list[Slice], Field(min_length=1)] | None = None
    base_model: ModelText | None = None
    base_precision: Text | None = None
    parameters: Annotated[Parameters, BeforeValidator(_empty_section)] = Parameters()
    dtype: Dtype | None = None
    out_dtype: Dtype | None = None
    tokenizer_source: ModelText | None = None
    tokenizer: Tokenizer | None = None
    out_adapter: Annotated[OutAdapter, BeforeValidator(_rank_by_name)] | None = None

    @property
    def all_models(self) -> list[str]:
        """What is written for the models, of all slices."""
        sources = [source for part in self.slices or () for source in part.sources]
        return [entry.model for entry in (*(self.models or ()), *sources)]


def read_text(place: Path) -> str:
    """The text of a recipe's file.

    Raises:
        StorageError: it cannot be read.
        InputError: it is too long for a recipe, or no UTF-8.
    """
    try:
        with open(place, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as fault:
        raise StorageError(f"the recipe {str(place)!r} cannot be read: {fault}.") from fault
    if len(content) > MAX_BYTES:
        raise InputError(f"{place.name} has more than {MAX_BYTES:,} bytes: no recipe is that long")
    with told_as(InputError, f"{place.name} is no readable YAML"):
        return content.decode("utf-8-sig")


def parsed_recipe(text: str, name: str) -> RecipeText:
    """A recipe's keys and values, of the right types.

    Args:
        name: of the file, for errors.

    Raises:
        InputError: no YAML, an unknown key or method, or a value of a wrong type.
    """
    with told_as(InputError, f"{name} is no readable YAML"):
        documents = list(YAML(typ="safe", pure=True).load_all(text))
    documents = [document for document in documents if document is not None]
    if len(documents) > 1:
        raise InputError(f"{name} has {len(documents)} recipes: write each into a file of its own")
    data = documents[0] if documents else None
    _refuse_what_mergekit_does(data, name)
    try:
        return RecipeText.model_validate(data)
    except ValidationError as fault:
        raise InputError(f"{name}: {_complaints(fault)}") from fault


def _refuse_what_mergekit_does(data: Any, name: str) -> None:
    """Raise where a recipe asks for something that mergekit does and this package does not."""
    if not isinstance(data, dict):
        return
    for key in data:
        if key in KEYS_OF_MERGEKIT:
            raise InputError(f"{name}: {key}: {KEYS_OF_MERGEKIT[key]}")
    if "models" in data and "slices" in data:
        raise InputError(f"{name}: write models: or slices:, not both ({MERGEKIT})")
    method = data.get("merge_method")
    methods = (*METHODS, AUTO)
    if isinstance(method, str) and method not in methods:
        reason = METHODS_OF_OTHERS.get(method, MERGEKIT)
        raise InputError(
            f"{name}: merge_method: there is no {method!r} here: {reason}; there are "
            f"{', '.join(methods)}"
        )


def _complaints(fault: ValidationError) -> str:
    """The first faults that pydantic has found, each with the key where it is."""
    sentences = []
    for error in fault.errors(include_url=False, include_input=False)[:COMPLAINTS_SHOWN]:
        key = ".".join(map(str, error["loc"])) or "the recipe"
        complaint = COMPLAINTS.get(error["type"], error["msg"])
        last = str(error["loc"][-1]) if error["loc"] else ""
        if error["type"] == "value_error":
            complaint = error["msg"].removeprefix("Value error, ")
        is_unsupported = error["type"] in ("extra_forbidden", "literal_error")
        if is_unsupported and last in PARAMETERS_OF_MERGEKIT:
            complaint = PARAMETERS_OF_MERGEKIT[last]
        sentences.append(f"{key}: {complaint}")
    return "; ".join(sentences)

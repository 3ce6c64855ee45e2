"""A Hugging Face folder as a model to analyse, in eval mode: no code that comes with it is run.

Two kinds are known, by the last words of the architecture in ``config.json`` or by ``task=``:

* "classification": ``…ForSequenceClassification``, one of C labels for a text (or a pair);
* "causal_lm": ``…ForCausalLM`` and ``…LMHeadModel``, the next token at every token.

Weights stay as the files hold them, in half precision or quantised, unless a dtype is asked for.
Nothing is fetched from the Hub unless ``online`` is asked for.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blr_analysis.adapters import CONFIG, is_adapter, open_adapter
from blr_analysis.checks import install, one_of, path_of, some
from blr_analysis.errors import InputError, ModelError, StorageError, told_as
from blr_analysis.files import Folder, Spec
from blr_analysis.files.headers import read_json
from blr_analysis.huggingface.file_layout import file_layout
from blr_analysis.models import find_device

AUTO = {"classification": "AutoModelForSequenceClassification", "causal_lm": "AutoModelForCausalLM"}
ENDINGS = {
    "classification": ("ForSequenceClassification",),
    "causal_lm": ("ForCausalLM", "LMHeadModel"),
}
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
FETCHED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # of a model on the Hub
UNBOUNDED = 10**6  # some tokenizers say 10³⁰ where they know no bound


@dataclass(frozen=True)
class Loading:
    """How the weights of a model come into memory.

    Attributes:
        device: where they are put.
        dtype: "auto", as the files hold them; or "float32", "bfloat16", "float16". Half precision
            takes half the memory; what is summed is float32 all the same.
        load_in_4bit: quantise an adapter's base by bitsandbytes, to 4 bits a weight.
        device_map: how accelerate spreads the layers over devices, "auto" for instance; None: all
            of them are on ``device``.
        online: fetch a model from the Hub where its name is no folder here.

    Raises:
        InputError: an unknown dtype, or a package that is missing.
    """

    device: str | torch.device = "cpu"
    dtype: str = "auto"
    load_in_4bit: bool = False
    device_map: str | None = None
    online: bool = False

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        if self.load_in_4bit and find_spec("bitsandbytes") is None:
            raise InputError("load_in_4bit needs bitsandbytes: pip install bitsandbytes")
        if self.device_map is not None and find_spec("accelerate") is None:
            raise InputError("device_map needs accelerate: pip install accelerate")

    def arguments(self) -> dict[str, Any]:
        """What ``from_pretrained`` is asked for."""
        dtype = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        arguments: dict[str, Any] = {"dtype": dtype}
        if self.device_map is not None:
            arguments["device_map"] = self.device_map
        if self.load_in_4bit:
            from transformers import BitsAndBytesConfig

            arguments["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
            arguments.setdefault("device_map", {"": find_device(self.device)})
        return arguments

    def folder_of(self, name: str | os.PathLike[str]) -> Path:
        """The folder of a model: one here, or what the Hub's cache holds, or (``online``) the Hub.

        Raises:
            StorageError: it is nowhere.
        """
        place = Path(path_of(name)).expanduser()
        text = str(name)
        could_be_on_the_hub = text.count("/") == 1 and not text.startswith((".", "/", "~"))
        if place.exists() or not could_be_on_the_hub or find_spec("huggingface_hub") is None:
            return place
        from huggingface_hub import snapshot_download

        if self.online:
            with told_as(StorageError, f"the Hub gives no {text!r}"):
                return Path(snapshot_download(text, allow_patterns=[*FETCHED]))
        try:
            return Path(snapshot_download(text, local_files_only=True))
        except (OSError, ValueError) as error:  # of the Hub's own classes
            raise StorageError(
                f"there is no folder {text!r} with a config.json or adapter_config.json, nor such "
                "a model in the Hub's cache: name a folder, or fetch it with online=True (--online)"
            ) from error


@dataclass(frozen=True)
class Pretrained:
    """A model with its tokenizer.

    Attributes:
        folder: where it was loaded from.
        task: "classification" or "causal_lm".
        specs: shapes and dtypes of the tensors in the folder, by their names there.
        pad_id: the token that fills up short rows of a batch.
        inputs: the tokenizer's outputs that the model takes.
        longest: tokens that the model can read of one text.
        closing: the end token, which is put behind texts and answers that do not end with it; "":
            nothing is put there.
    """

    folder: Path
    task: str
    model: nn.Module
    tokenizer: Any
    specs: Mapping[str, Spec]
    pad_id: int
    inputs: tuple[str, ...]
    longest: int
    closing: str = ""

    @property
    def likelihood(self) -> str:
        """What :class:`~blr_analysis.Task` calls the loss of this model."""
        return "categorical" if self.task == "classification" else "causal_lm"


def load_model(
    folder: str | os.PathLike[str],
    *,
    task: str | None = None,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
) -> Pretrained:
    """Load a sequence classifier or a causal language model with its tokenizer.

    Only the folder is read: no network, no pickle, no code that comes with the model.

    Args:
        folder: ``config.json``, safetensors, and the tokenizer's files.
        task: "classification" or "causal_lm"; None: what ``config.json`` says.
        device: where the weights are put.
        dtype: "auto", as the files hold them, or "float32", "bfloat16", "float16".

    Raises:
        InputError: transformers is not installed; an unknown task or dtype.
        StorageError: no such folder, no model in it, only pickles, damaged files.
        ModelError: an architecture that is neither, weights that are missing (a head that was
            never trained), quantised weights, no tokenizer.
    """
    loading = Loading(device, dtype)
    return _loaded(loading.folder_of(folder), task, loading)


def load_language_model(
    folder: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    load_in_4bit: bool = False,
    device_map: str | None = None,
    online: bool = False,
) -> Pretrained:
    """A causal language model with its tokenizer; or a LoRA adapter on its base, whose own weights
    alone are the parameters.

    An adapter's base stays as it is loaded, in half precision or quantised, and frozen; the
    adapter's weights are float32.

    Args:
        base: where the adapter's base is, unless its configuration names it.
        device, dtype, load_in_4bit, device_map, online: see :class:`Loading`.

    Raises:
        ModelError: a base that is not there, or is another than the adapter was made for; and as
            :func:`load_model`.
    """
    loading = Loading(device, dtype, load_in_4bit, device_map, online)
    place = loading.folder_of(folder)
    if not is_adapter(place):
        if load_in_4bit:
            raise InputError(
                f"load_in_4bit (--load-in-4bit) is for an adapter's base, but all of "
                f"{str(place)!r} is trained: leave it out"
            )
        return _loaded(place, None, loading)
    if find_spec("peft") is None:
        raise InputError(f"a LoRA adapter needs peft: {install('peft')}")
    place_of_base = _base_of(place, base, loading)
    loaded = _loaded(place_of_base, None, loading, is_frozen=True)
    loaded.model.requires_grad_(False)
    model = _adapted(loaded, place)
    return replace(loaded, folder=place, model=model.eval(), tokenizer=_tokenizer_of(place, loaded))


def _loaded(
    place: Path, task: str | None, loading: Loading, *, is_frozen: bool = False
) -> Pretrained:
    """A model of either kind, and its tokenizer; one that is frozen may be quantised."""
    if task is not None:
        one_of("task", task, tuple(AUTO))
    config = read_config(place)
    if getattr(config, "quantization_config", None) and not is_frozen:
        raise ModelError(
            f"the weights of {str(place)!r} are quantised, so they cannot be analysed: name an "
            "adapter of it, or the model before quantisation"
        )
    kind = task or _task_in(config, place)
    device = find_device(loading.device)
    specs = Folder.open(place).specs
    with _quiet():
        model = _load_weights(place, kind, loading)
        tokenizer = _load_tokenizer(place)
    is_placed = loading.device_map is not None or loading.load_in_4bit
    if not is_placed:
        model = model.to(device)
    model = model.eval()
    model.config.use_cache = False  # nothing is generated: keys and values need not be kept
    parameters_of_forward = inspect.signature(model.forward).parameters
    usual_inputs = dict.fromkeys(("input_ids", "attention_mask", *tokenizer.model_input_names))
    return Pretrained(
        folder=place,
        task=kind,
        model=model,
        tokenizer=tokenizer,
        specs=specs,
        pad_id=_pad_id(model.config, tokenizer, place),
        inputs=tuple(name for name in usual_inputs if name in parameters_of_forward),
        longest=min(int(tokenizer.model_max_length), _positions(model)),
    )


def load_tuned(
    folder: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    task: str | None = None,
    device: str | torch.device = "cpu",
) -> Pretrained:
    """:func:`load_model`; of the folder of an adapter its base in float32 with the adapter added,
    of which only the parameters that it changes have a gradient.

    Args:
        base: where the adapter's base is, unless its configuration names it.

    Raises:
        ModelError: an adapter that does not fit its base; and as :func:`load_model`.
    """
    place = Path(path_of(folder)).expanduser()
    if not is_adapter(place):
        if base is not None:
            raise InputError(f"{str(place)!r} is no adapter: leave base out")
        return load_model(place, task=task, device=device)
    place_of_base = _base_of(place, base, Loading(device))
    loaded = load_model(place_of_base, task=task, device=device, dtype="float32")
    source = open_adapter(place, Folder.open(loaded.folder), dtype=torch.float32)
    unplaced = set(source.changes)
    layout = file_layout(loaded.model, loaded.specs, loaded.folder)
    for name, parameter in loaded.model.named_parameters():
        stored_name = layout.names[name][0]
        is_changed = name in layout.renamed and stored_name in unplaced
        parameter.requires_grad_(is_changed)
        if is_changed:
            parameter.data.copy_(source.tensor(stored_name))
            unplaced.remove(stored_name)
    if unplaced:
        names = some(sorted(unplaced))
        raise ModelError(f"the adapter {str(place)!r} changes {names}, which is not trained here")
    return replace(loaded, tokenizer=_tokenizer_of(place, loaded))


def _tokenizer_of(place: Path, loaded: Pretrained) -> Any:
    """The tokenizer in an adapter's folder, or its base's where there is none."""
    files = ("tokenizer.json", "tokenizer_config.json")
    has_tokenizer = any((place / name).is_file() for name in files)
    return _load_tokenizer(place) if has_tokenizer else loaded.tokenizer


def _base_of(place: Path, base: str | os.PathLike[str] | None, loading: Loading) -> Path:
    """The folder of an adapter's base: as its configuration names it, from here or from there."""
    if base is None:
        base = read_json(place / CONFIG).get("base_model_name_or_path")
    name = str(path_of(base))
    is_beside_adapter = not Path(name).expanduser().is_dir() and (place / name).is_dir()
    if is_beside_adapter:
        return place / name
    try:
        folder = loading.folder_of(name)
    except StorageError as error:
        raise ModelError(f"{str(place)!r} is an adapter of {name!r}: {error}") from error
    if not folder.is_dir():
        raise ModelError(
            f"{str(place)!r} is an adapter of {name!r}, which is no folder here: name its base "
            "(--base)"
        )
    return folder


def _adapted(loaded: Pretrained, place: Path) -> Any:
    """The base with the adapter, all of whose tensors must find their place."""
    from peft import PeftModel, get_peft_model_state_dict

    stored = Folder.open(place, stem="adapter_model").specs
    misfit = f"the adapter {str(place)!r} does not fit {str(loaded.folder)!r}"
    with _quiet(), warnings.catch_warnings(), told_as(ModelError, misfit, "name its base (--base)"):
        warnings.simplefilter("ignore")  # what is missing is raised below
        model: Any = PeftModel.from_pretrained(loaded.model, str(place), is_trainable=True)  # type: ignore[arg-type]
    shapes = {name: tuple(t.shape) for name, t in get_peft_model_state_dict(model).items()}
    stored_shapes = {name: spec.shape for name, spec in stored.items()}
    if shapes != stored_shapes:
        odd_names = sorted(set(shapes) ^ set(stored_shapes)) or sorted(shapes)
        raise ModelError(f"{misfit}: {some(odd_names)}")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def read_config(folder: Path) -> Any:
    """The configuration in a folder, as transformers reads it; nothing is fetched or executed.

    Raises:
        InputError: transformers is not installed.
        StorageError: no such folder, or no ``config.json`` in it.
        ModelError: a broken one, or a model that transformers does not know.
    """
    if find_spec("transformers") is None:
        raise InputError(f"a Hugging Face model needs transformers: {install('hf')}")
    if not (folder / "config.json").is_file():
        remedy = "name one of save_pretrained, an adapter after merge_and_unload()"
        raise StorageError(f"there is no folder {str(folder)!r} with a config.json: {remedy}.")
    from transformers import AutoConfig

    with told_as(ModelError, f"transformers cannot load {str(folder)!r}"):
        return AutoConfig.from_pretrained(str(folder), **LOCAL)


def _task_in(config: Any, folder: Path) -> str:
    """The task that the configuration's architectures were built for."""
    architectures = [str(name) for name in config.architectures or []]
    tasks = {
        kind
        for kind, endings in ENDINGS.items()
        if any(name.endswith(endings) for name in architectures)
    }
    if len(tasks) == 1:
        return tasks.pop()
    names = ", ".join(architectures) or "no architecture"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{str(folder)!r} is {names}, an encoder with a decoder: give its "
            'blr.Task(model, data, likelihood="tokens")'
        )
    raise ModelError(f"{str(folder)!r} is {names}: say task='classification' or 'causal_lm'")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bars and reports: what matters in them is raised here."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    shows_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def _load_weights(folder: Path, kind: str, loading: Loading) -> Any:
    import transformers

    auto: Any = getattr(transformers, AUTO[kind])
    with told_as(ModelError, f"transformers cannot load {str(folder)!r} for {kind}"):
        model, report = auto.from_pretrained(
            str(folder),
            use_safetensors=True,
            output_loading_info=True,
            **loading.arguments(),
            **LOCAL,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{str(folder)!r} has no weights for {some(missing)}: train the model and save it again"
        )
    if kind == "classification":
        _check_classifier(model, folder)
    return model


def _check_classifier(model: Any, folder: Path) -> None:
    """Raise :class:`ModelError` of a regression, or of several labels at once."""
    problem = model.config.problem_type
    has_one_label = problem in (None, "single_label_classification")
    if model.config.num_labels < 2 or not has_one_label:
        name = problem or "regression"
        raise ModelError(f"{str(folder)!r} is a {name} model, no classifier: give its blr.Task")


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    remedy = "save it there: tokenizer.save_pretrained(folder)"
    with told_as(ModelError, f"no tokenizer can be loaded from {str(folder)!r}", remedy):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **LOCAL)
    files = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    if not any((folder / name).is_file() for name in files):  # transformers makes an empty one
        raise ModelError(f"{str(folder)!r} holds no tokenizer ({some(sorted(files))}); {remedy}")
    return tokenizer


def _pad_id(config: Any, tokenizer: Any, folder: Path) -> int:
    """The id that pads; a classifier of the decoder kind looks for it to find the last token."""
    candidates = (config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    ids = [int(i) for i in candidates if i is not None and int(i) >= 0]
    if not ids:
        raise ModelError(f"{str(folder)!r} names no padding token: set tokenizer.pad_token")
    config.pad_token_id = ids[0]
    return ids[0]


def _positions(model: Any) -> int:
    """Tokens that the model has positions for; RoBERTa's begin after its padding row."""
    positions = getattr(model.config, "max_position_embeddings", None) or UNBOUNDED
    if positions < 0:  # XLNet says -1 for no limit
        positions = UNBOUNDED
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            first = 0 if part.padding_idx is None else part.padding_idx + 1
            positions = min(positions, part.num_embeddings - first)
    return int(positions)

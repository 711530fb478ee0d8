"""Networks by name, with or without weights: ours, timm's, language models with adapters; and freezing."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import head_names
from fl_lightning.core.seeds import preserve_global_generators, seed_global_generators
from fl_lightning.models.cnn import LeNet, McMahanCNN

_OURS: dict[str, type[nn.Module]] = {"lenet": LeNet, "mcmahan_cnn": McMahanCNN}
_EMBEDDINGS = ("patch_embed", "cls_token", "reg_token", "dist_token", "pos_embed", "norm_pre")


def build_network(
    name: str, pretrained: bool, image_size: int | None, arguments: dict[str, Any]
) -> nn.Module:
    """Build an image network by its name: one of timm's, or one of this package's.

    Args:
        name: a name of timm, ``"lenet"`` or ``"mcmahan_cnn"``.
        pretrained: whether timm downloads the weights of this name.
        image_size: size in pixels, for networks that are built for one size; their default if None.
        arguments: arguments of the network's constructor.

    Raises:
        ConfigurationError: if there is no such network, its arguments are invalid, or its weights cannot
            be downloaded.
    """
    build = _build_ours if name in _OURS else _build_timm
    return build(name, pretrained, image_size, arguments)


def _build_ours(
    name: str, pretrained: bool, image_size: int | None, arguments: dict[str, Any]
) -> nn.Module:
    if pretrained:
        raise ConfigurationError(
            f"pretrained: there are no published weights of {name!r}. Leave it false, or give a "
            "checkpoint_path."
        )
    size = {} if image_size is None else {"image_size": image_size}
    try:
        return _OURS[name](**arguments, **size)
    except TypeError as error:
        raise ConfigurationError(
            f"network_kwargs: {name!r} does not have such an argument: {error}. Leave it out"
        ) from error


def _build_timm(
    name: str, pretrained: bool, image_size: int | None, arguments: dict[str, Any]
) -> nn.Module:
    _check_timm_name(name)
    try:  # without weights first, to tell a wrong argument from a lost connection
        network = _create(name, image_size, arguments)
    except Exception as error:  # timm raises any exception of its layers
        given = {"image_size": image_size, **arguments}
        raise ConfigurationError(
            f"network: timm cannot build {name!r} with {given} ({error}). Change network, "
            "image_size or network_kwargs."
        ) from error
    _check_patches(name, network, image_size)
    if not pretrained:
        return network
    try:
        return _create(name, image_size, {**arguments, "pretrained": True})
    except Exception as error:  # from timm, the hub's client or the network
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigurationError(
            f"pretrained: the weights of {name!r} could not be downloaded ({reason}). Fetch the "
            "file where there is a network, set pretrained to false and checkpoint_path to the file."
        ) from error


def _create(name: str, image_size: int | None, arguments: dict[str, Any]) -> nn.Module:
    import timm  # takes seconds to import, and our CNNs do without

    try:
        network: nn.Module = timm.create_model(name, img_size=image_size, **arguments)
    except TypeError as error:
        if "'img_size'" not in str(error):
            raise
        network = timm.create_model(name, **arguments)  # for images of any size
    return network


def _check_timm_name(name: str) -> None:
    import timm

    try:
        timm.get_pretrained_cfg(name)  # refuses a wrong tag, the part after the dot
        if ":" in name or timm.is_model(name):  # hf-hub:…, local-dir:… are looked up by timm
            return
    except (RuntimeError, ValueError):
        pass  # no such tag, or no name at all: see below
    known = [*_OURS, *timm.list_models(), *timm.list_models(pretrained=True)]
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    raise ConfigurationError(
        f"network: there is no {name!r} in timm. Close to it: {', '.join(close) or 'nothing'}; "
        "timm.list_models() lists all."
    )


def _check_patches(name: str, network: nn.Module, image_size: int | None) -> None:
    embedding = getattr(network, "patch_embed", None)
    patch = getattr(embedding, "patch_size", None)
    if image_size is None or patch is None or getattr(embedding, "dynamic_img_pad", False):
        return
    if any(image_size % side for side in patch):
        raise ConfigurationError(
            f"image_size must be a multiple of the patches of {name!r}, {patch[0]} pixels, got "
            f"{image_size}. Change it, or patch_size in network_kwargs."
        )


def freeze(network: nn.Module, freeze_blocks: int, freeze_backbone: bool) -> None:
    """Freeze the first blocks of a network, or all of it except its classifier.

    Args:
        network: the network.
        freeze_blocks: number of first blocks of a vision transformer to freeze; if above 0, embeddings too.
        freeze_backbone: whether to freeze all but the classifier.

    Raises:
        ConfigurationError: if the network has fewer blocks.
    """
    blocks = getattr(network, "blocks", None)
    is_transformer = blocks is not None and hasattr(network, "patch_embed")
    most = len(blocks) if blocks is not None and is_transformer else 0
    if not 0 <= freeze_blocks <= most:
        allowed = f"in 0 to {most}, its number of blocks" if most else "0: it has no blocks"
        raise ConfigurationError(
            f"freeze_blocks must be {allowed}, got {freeze_blocks} for a "
            f"{type(network).__name__}. To train the classifier alone, set freeze_backbone."
        )
    frozen = (*_EMBEDDINGS, *(f"blocks.{i}" for i in range(freeze_blocks))) if freeze_blocks else ()
    heads = head_names(network)
    for name, parameter in network.named_parameters():
        in_frozen = _is_inside(name, frozen) or (freeze_backbone and not _is_inside(name, heads))
        parameter.requires_grad_(parameter.requires_grad and not in_frozen)


def _is_inside(name: str, modules: tuple[str, ...] | list[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def build_causal_lm(
    network: str | dict[str, Any] | nn.Module,
    four_bit: bool,
    dtype: str,
    attention: str | None,
    seed: int,
) -> nn.Module:
    """Return a causal language model: pretrained by name, random by configuration, or a given module.

    Raises:
        ConfigurationError: if there is no such model or option.
    """
    if isinstance(network, nn.Module):
        return network
    transformers = _extra("transformers")
    numbers = "auto" if dtype == "auto" else getattr(torch, dtype)
    chosen = {} if attention is None else {"attn_implementation": attention}
    if isinstance(network, str):
        options = chosen | (_quantised(transformers) if four_bit else {})
        is_recent = int(transformers.__version__.split(".")[0]) >= 5
        options["dtype" if is_recent else "torch_dtype"] = numbers
        load = transformers.AutoModelForCausalLM.from_pretrained
        model: nn.Module = _explained(
            f"model.network: {network!r} is no folder or name on the hub that can be loaded",
            lambda: load(network, **options),
        )
        if four_bit:
            model = _extra("peft").prepare_model_for_kbit_training(model)
        return model
    if four_bit:
        raise ConfigurationError(
            "model.four_bit loads saved weights, and model.network is a configuration: give a name or a folder"
        )
    model = _random(transformers, network, chosen, seed)
    return model if dtype == "auto" else model.to(numbers)


def _random(
    transformers: Any, network: dict[str, Any], chosen: dict[str, str], seed: int
) -> nn.Module:
    """Return a causal language model with random weights, described by options of its configuration."""
    options = dict(network)
    kind = options.pop("model_type", None)
    known = transformers.CONFIG_MAPPING
    if kind not in known:
        close = difflib.get_close_matches(str(kind), list(known), n=3)
        raise ConfigurationError(
            f"model.network: model_type {kind!r} is not known to transformers: did you mean "
            f"{' or '.join(close) or 'llama'}?"
        )
    _check_options("model.network", options, known[kind])
    config = _explained("model.network", lambda: known[kind](**options))
    with preserve_global_generators():  # those of GPUs too
        seed_global_generators(seed)
        load = transformers.AutoModelForCausalLM.from_config
        model: nn.Module = _explained(f"model.network: {kind}", lambda: load(config, **chosen))
    return model


def _quantised(transformers: Any) -> dict[str, Any]:
    if find_spec("bitsandbytes") is None:
        raise ConfigurationError("model.four_bit needs bitsandbytes: pip install bitsandbytes")
    return {
        "quantization_config": transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    }


def add_adapters(base: nn.Module, adapter: Any) -> nn.Module:
    """Return a model to which peft has added adapters, such as LoRA.

    Raises:
        ConfigurationError: if peft rejects an option.
    """
    peft = _extra("peft")
    if isinstance(adapter, Mapping):
        options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **adapter}
        _check_options("model.adapter", options, peft.LoraConfig)
        adapter = _explained("model.adapter", lambda: peft.LoraConfig(**options))
    with warnings.catch_warnings():  # peft asks for what transformers is about to rename
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        network: nn.Module = _explained("model.adapter", lambda: peft.get_peft_model(base, adapter))
    return network


def _check_options(option: str, given: Mapping[str, Any], config: type) -> None:
    """Raise ConfigurationError if a library's configuration class does not have an option of a given name."""
    known = [*inspect.signature(config).parameters, *getattr(config, "attribute_map", {})]
    for name in given:
        if name not in known and not hasattr(config, name):
            library = config.__module__.split(".")[0]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"see the documentation of {library}"
            raise ConfigurationError(
                f"{option}: {name!r} is not accepted by {config.__name__}: {hint}"
            )


def freeze_a_factors(network: nn.Module) -> None:
    """Freeze the factors A of LoRA adapters, so that only the factors B train.

    Raises:
        ConfigurationError: if the adapters have no factor A.
    """
    a_of_layers = "lora_A.", "lora_embedding_A."
    parameters = network.named_parameters()
    frozen = [p for name, p in parameters if any(part in name for part in a_of_layers)]
    if not frozen:
        raise ConfigurationError(
            "model.freeze_a is for LoRA adapters, and model.adapter makes others: leave freeze_a out"
        )
    for parameter in frozen:
        parameter.requires_grad_(False)


def _extra(package: str) -> Any:
    try:
        return __import__(package)
    except ImportError as error:
        raise ConfigurationError(
            f"CausalLM needs {package}: pip install 'fl-lightning[llm]'"
        ) from error


def _explained(option: str, make: Callable[[], Any]) -> Any:
    """Call another library; turn any of its errors into a ConfigurationError that names our option."""
    try:
        return make()
    except Exception as error:  # both libraries have errors of many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"{option}: {reason}") from error

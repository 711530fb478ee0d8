"""Networks by name, ours or timm's, with or without weights, and freezing of their parts."""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import head_names
from fl_lightning.models.cnn import LeNet, McMahanCNN

_OURS: dict[str, type[nn.Module]] = {"lenet": LeNet, "mcmahan_cnn": McMahanCNN}
_EMBEDDINGS = ("patch_embed", "cls_token", "reg_token", "dist_token", "pos_embed", "norm_pre")


def build_network(
    name: str, pretrained: bool, image_size: int | None, arguments: dict[str, Any]
) -> nn.Module:
    """Build a network by its name.

    Args:
        name: a name of timm, ``"lenet"`` or ``"mcmahan_cnn"``.
        pretrained: whether timm downloads the weights of the name.
        image_size: size in pixels, for networks built for one size; None for their default.
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
        raise ConfigurationError(f"network_kwargs: {error}. {name!r} has none.") from error


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
    """Freeze parameters of a network.

    Args:
        network: the network; changed in place.
        freeze_blocks: freeze the embeddings and this many first blocks of a vision transformer.
        freeze_backbone: freeze everything but the classifier.

    Raises:
        ConfigurationError: if there are no such blocks.
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

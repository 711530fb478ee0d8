"""Zero-cost proxies: scores of untrained networks on a batch.

    synflow   log(1 + Σ_θ |θ · ∂R/∂θ|), R the sum of the outputs for an image of ones, of the network
              with |θ| and without norms                            Tanaka et al. 2020, NeurIPS
    naswot    log |det K|, K_ij the number of activations that are on for both examples i and j, or
              off for both                                          Mellor et al. 2021, ICML
    jacov     -Σ_i (log(v_i + k) + 1 / (v_i + k)), v the eigenvalues of the correlations between
              the input gradients of examples, k = 1e-5             Mellor et al. 2020, version 1
    snip      Σ_θ |θ · ∂L/∂θ|, L the cross entropy of a batch       Lee et al. 2019, ICLR
    grad_norm Σ_layers ‖∂L/∂θ‖                                      Abdelfattah et al. 2021, ICLR
    l2_norm   Σ_layers ‖θ‖                                          the same
    plain     Σ_θ θ · ∂L/∂θ                                         Mozer, Smolensky 1989
    fisher    Σ_channels mean_i (Σ_pixels a · ∂L/∂a)² / 2, a the outputs of layers;
              of a transformer, tokens are the pixels
                                                                    Turner et al. 2020, ICLR
    grasp     -Σ_θ θ · H g, g = ∂L/∂θ, H the Hessian                Wang et al. 2020, ICLR
    epe       Σ_classes |Σ_ij log(|c_ij| + k)|, c the correlations between the input gradients of
              a class's examples; of over 100 classes the mean over classes of differences of pairs,
              Σ_ij being divided by the number of examples          Lopes et al. 2021, ICANN, its code
    zen       log E‖f(x + 0.01 ε) - f(x)‖ + Σ_norms log σ, f the features before the global pool, x, ε
              and weights Gaussian, σ² a batch norm's mean variance Lin et al. 2021, ICCV

θ are the weights of convolutions and linear layers. The number of parameters and FLOPs are proxies as well;
a proxy that does not beat them is useless. All networks are scored on the same batch: noise, or images of a folder.
Source of the proxies as scores of architectures: Abdelfattah et al. 2021, ICLR, and its code.
Differs: the logarithm of synflow, which keeps the order and fits a plot; `zen` leaves shortcuts in place.
A network whose output does not depend on its input scores -∞ (synflow and sums of gradients: 0).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator

# network, images (batch, channels, side, side), labels (batch,) -> score of the network
Proxy = Callable[[nn.Module, Tensor, Tensor], float]
Batch = tuple[Tensor, Tensor]  # images, labels

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.GELU, nn.SiLU)
_K = 1e-5


def synflow(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the log of a network's synaptic flow (SynFlow score); images matter only by their shape.

    Example:
        >>> network = nn.Linear(2, 1, bias=False)
        >>> with torch.no_grad():
        ...     _ = network.weight.copy_(torch.tensor([[3.0, -4.0]]))
        >>> round(math.exp(synflow(network, torch.zeros(1, 2), torch.zeros(1))) - 1)
        7
    """
    linear = copy.deepcopy(network).double().eval()
    _remove_norms(linear)
    for parameter in linear.parameters():
        parameter.data.abs_()
    flow = linear(torch.ones_like(images[:1], dtype=torch.float64)).sum()
    return math.log1p(_saliency(_weights_and_gradients(linear, flow)))


def snip(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the SNIP score Σ |θ · ∂L/∂θ|: changes of the loss, in first order, as weights are removed one by one.

    Raises:
        ConfigurationError: for a batch of one image, if a batch norm needs several.
    """
    return _saliency(_weights_and_gradients(*_loss("snip", network, images, labels)))


def grad_norm(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the norm of the loss's gradient, summed over layers; arguments and errors as for `snip`.

    Example:
        >>> network = nn.Linear(1, 2, bias=False)
        >>> with torch.no_grad():
        ...     _ = network.weight.zero_()
        >>> round(grad_norm(network, torch.ones(1, 1), torch.tensor([0])), 4)  # ‖(-1/2, 1/2)‖
        0.7071
    """
    pairs = _weights_and_gradients(*_loss("grad_norm", network, images, labels))
    return sum(float(gradient.double().norm()) for _, gradient in pairs)


def l2_norm(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the L2 norm of the weights, summed over layers; images and labels are ignored."""
    return sum(float(weight.detach().double().norm()) for weight in _weights(network))


def plain(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return Σ θ · ∂L/∂θ, like `snip` without absolute values; arguments and errors as for `snip`."""
    pairs = _weights_and_gradients(*_loss("plain", network, images, labels))
    return sum(float((weight * gradient).double().sum()) for weight, gradient in pairs)


def grasp(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the GraSP score -Σ θ · H g: first-order changes of ‖∂L/∂θ‖² / 2 as weights are removed one by one.

    Raises:
        ConfigurationError: as for `snip`, and if a layer has no second derivative.
    """
    copied, loss = _loss("grasp", network, images, labels)
    weights = _weights(copied)
    options: Any = {"allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad(loss, weights, create_graph=True, **options)
    norm = torch.stack([(own * own.detach()).sum() for own in gradients]).sum()
    try:
        products = torch.autograd.grad(norm, weights, **options)
    except RuntimeError as error:
        raise ConfigurationError(
            f"score grasp needs second derivatives of all layers, and PyTorch lacks one: {error}. Use another score"
        ) from None
    pairs = zip(weights, products, strict=True)
    return -sum(float((weight.detach() * own).double().sum()) for weight, own in pairs)


def fisher(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the Fisher score: Fisher information of output channels, summed over layers; errors as for `snip`."""
    outputs: list[Tensor] = []
    channels: list[int] = []  # dimension of the channels in each output; the last one of tokens

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        outputs.append(output)
        channels.append(-1 if isinstance(module, nn.Linear) else 1)
        return output.clone()  # an activation may overwrite it in place

    copied = copy.deepcopy(network)
    for module in copied.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(keep)
    loss = _loss("fisher", copied, images, labels)[1]
    gradients = torch.autograd.grad(loss, outputs, allow_unused=True, materialize_grads=True)
    total = 0.0
    for own, gradient, dimension in zip(outputs, gradients, channels, strict=True):
        product = (own.detach() * gradient).double().movedim(dimension, 1)
        total += float(product.reshape(*product.shape[:2], -1).sum(2).square().mean(0).sum() / 2)
    return total


# weights of a layer, and their gradient
Pairs = list[tuple[Tensor, Tensor]]


def _loss(
    name: str, network: nn.Module, images: Tensor, labels: Tensor
) -> tuple[nn.Module, Tensor]:
    """Copy a network in training mode, and return the copy with its loss on a batch."""
    copied = copy.deepcopy(network).train()
    try:
        logits = copied(images)
    except ValueError:  # batch norm's
        _check_batch(name, images)
        raise
    return copied, cross_entropy(logits, labels)


def _weights(network: nn.Module) -> list[Tensor]:
    return [m.weight for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def _weights_and_gradients(network: nn.Module, loss: Tensor) -> Pairs:
    """Return each convolution's and linear layer's weight with its gradient; omit weights the loss does not use."""
    weights = _weights(network)
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    pairs = zip(weights, gradients, strict=True)
    return [(weight.detach(), gradient) for weight, gradient in pairs if gradient is not None]


def _saliency(pairs: Pairs) -> float:
    return sum(float((weight * gradient).double().abs().sum()) for weight, gradient in pairs)


def naswot(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the NASWOT score: log-determinant of similarities between the examples' activation patterns.

    Activations must be modules of the network; labels are ignored.

    Raises:
        ConfigurationError: for a batch of one.
    """
    _check_batch("naswot", images)
    copied, size = copy.deepcopy(network).train(), len(images)
    agreement = torch.zeros(size, size, dtype=torch.float64)

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if len(x) == size:
            on = (x.detach().flatten(1) > 0).double().cpu()
            agreement.add_(on @ on.T + (1 - on) @ (1 - on).T)

    for module in copied.modules():
        if isinstance(
            module, _ACTIVATIONS
        ):  # in-place activations overwrite their input, so before
            module.register_forward_pre_hook(count)
    with torch.no_grad():
        copied(images)
    return float(torch.linalg.slogdet(agreement).logabsdet)


def jacov(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the Jacobian covariance score, higher if examples' input gradients correlate less; ignores labels.

    Raises:
        ConfigurationError: for a batch of one.
    """
    _check_batch("jacov", images)
    correlations = _correlations(network, images)
    if correlations is None:
        return -math.inf
    values = torch.linalg.eigvalsh(correlations).clamp(min=0) + _K
    return float(-(values.log() + 1 / values).sum())


def epe(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the EPE-NAS score, higher if input gradients correlate less between examples of the same class.

    Raises:
        ConfigurationError: for a batch of one.
    """
    _check_batch("epe", images)
    correlations = _correlations(network, images)
    if correlations is None:
        return -math.inf
    logs = (correlations.abs() + _K).log()
    members = [labels == label for label in labels.unique()]
    of_classes = torch.stack([logs[own][:, own].sum() for own in members])
    if len(members) <= 100:
        return float(of_classes.abs().sum())
    means = of_classes / torch.stack([own.sum() for own in members])
    return float((means[:, None] - means).abs().sum() / len(members))


def _correlations(network: nn.Module, images: Tensor) -> Tensor | None:
    """Return correlations between examples' input gradients, (B, B) in float64; None if there is no gradient."""
    inputs = images.detach().clone().requires_grad_()
    outputs = copy.deepcopy(network).train()(inputs).sum()
    if not outputs.requires_grad:
        return None
    (gradients,) = torch.autograd.grad(outputs, inputs, allow_unused=True)
    if gradients is None:
        return None
    found = torch.corrcoef(gradients.flatten(1).double())
    return found if found.isfinite().all() else None


def zen(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the Zen-score: how far input noise moves the features; images matter only by their shape.

    Raises:
        ConfigurationError: for a batch of one.
    """
    _check_batch("zen", images)
    generator, copied = torch_generator(0, "zen"), copy.deepcopy(network).train()
    seen: dict[nn.Module, Tensor] = {}

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    for weight in _weights(copied):
        weight.data = normal(weight)
    norms, pools = (
        [module for module in copied.modules() if isinstance(module, kind)]
        for kind in (nn.modules.batchnorm._BatchNorm, nn.AdaptiveAvgPool2d)
    )
    for module in (*norms, *pools):
        module.register_forward_pre_hook(lambda own, x: seen.update({own: x[0].double()}))
    with torch.no_grad():
        x = normal(images)
        features = []
        for inputs in (x + 0.01 * normal(x), x):  # norms keep the second ones
            logits = copied(inputs).double()
            features.append(next((seen[pool] for pool in reversed(pools) if pool in seen), logits))
    distance = (features[0] - features[1]).flatten(1).norm(dim=1).mean()
    inputs_of = [seen[norm] for norm in norms if norm in seen]
    spreads = [own.transpose(0, 1).flatten(1).var(1, correction=0).mean() for own in inputs_of]
    # a norm that does not run, or whose inputs are all zero, does not scale the features
    logs = [0.5 * spread.log() for spread in spreads if spread > 0]
    return float(distance.log() + sum(logs))


PROXIES: dict[str, Proxy] = {
    "synflow": synflow,
    "naswot": naswot,
    "jacov": jacov,
    "snip": snip,
    "grad_norm": grad_norm,
    "l2_norm": l2_norm,
    "plain": plain,
    "fisher": fisher,
    "grasp": grasp,
    "epe": epe,
    "zen": zen,
}


def _check_batch(name: str, images: Tensor) -> None:
    if len(images) < 2:
        raise ConfigurationError(
            f"score {name} needs a batch of at least 2 images, got {len(images)}: raise --batch_size, or add "
            "images to the folder"
        )


def _remove_norms(network: nn.Module) -> None:
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, _NORMS):
                setattr(module, name, nn.Identity())

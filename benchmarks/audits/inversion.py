"""What an update tells of the examples behind it: attacks by whoever has both model and update.

    one example, first layer W x + b:     W' = b' xᵀ,  x = Σ_i b'_i W'_i / Σ_i b'_i² = c v_1(W')
    one example, cross-entropy:           ∂L/∂b of the last layer = softmax - onehot(y)
    several examples:                     min_x  1 - cos(∇L(x, y), Δ) + α TV(x)

W' and b' are what the update moved the layer by. The first two are exact: a client that takes one
step on one example sends it. Source: Phong et al. 2018, Section III-A, Geiping et al. 2020
(2003.14053), Proposition 3.1; labels by Zhao et al. 2020 (2001.02610), Equation 4; the search is
Geiping et al.'s, Equation 4, with Adam on signs. An attack that fails proves nothing: another one
may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.core.seeds import torch_generator


def first_layer_input(weight: Tensor, bias: Tensor) -> Tensor:
    """Return what a linear layer with a bias has seen, from an update of one step on one example.

    Every row of the weight gives it, noise or not; they are weighed by least squares. Of several
    examples it is a mixture.

    Args:
        weight: the update of W, shape (m, n).
        bias: the update of b, shape (m,).

    Returns:
        x, shape (n,); zeros where the bias did not move.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> example = torch.tensor([0.5, -1.0, 2.0])
        >>> layer(example).square().sum().backward()
        >>> read = first_layer_input(0.1 * layer.weight.grad, 0.1 * layer.bias.grad)
        >>> torch.allclose(read, example, atol=1e-5)
        True
    """
    length = bias.square().sum()
    return (bias @ weight) / torch.where(length > 0, length, 1.0)


def first_layer_direction(weight: Tensor) -> Tensor:
    """Return the same up to a positive factor, without the bias: the first right singular vector.

    All of the weight has a part in it, so that it stands more noise and rounding.

    Args:
        weight: the update of W, shape (m, n); of inputs that are positive on the whole.

    Returns:
        A vector of length 1 whose sum is not negative, shape (n,).

    Example:
        >>> first_layer_direction(torch.outer(torch.tensor([-1.0, 5.0]), torch.tensor([3.0, 4.0])))
        tensor([0.6000, 0.8000])
    """
    first = torch.linalg.svd(weight, full_matrices=False).Vh[0]
    return torch.where(first.sum() < 0, -first, first)


def label_of(last_bias: Tensor) -> int:
    """Return the class of the one example, from the update of the last layer's bias.

    With cross-entropy it is the only entry below 0.

    Example:
        >>> label_of(torch.tensor([0.02, -0.09, 0.07]))
        1
    """
    return int(last_bias.argmin())


@dataclass(frozen=True)
class GradientSearch:
    """Looks for images whose gradient points where an update points.

    Args:
        steps: of Adam.
        lr: its first rate, a tenth of which is left for the last steps.
        total_variation: α ≥ 0, of differences between neighbouring pixels.

    Example:
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> seen = [torch.ones(3, 4), torch.tensor([0.5, 0.5, -1.0])]
        >>> GradientSearch(steps=2)(network, seen, torch.tensor([2]), (1, 2, 2), seed=0).shape
        torch.Size([1, 1, 2, 2])
    """

    steps: int = 400
    lr: float = 0.1
    total_variation: float = 1e-3

    def __call__(
        self,
        network: nn.Module,
        seen: Sequence[Tensor],
        labels: Tensor,
        shape: tuple[int, ...],
        seed: int,
    ) -> Tensor:
        """Return the images.

        Args:
            network: as the client got it, from images to logits.
            seen: the update of each of its parameters, in order.
            labels: of the examples, which the attacker knows, shape (m,).
            shape: of one image, (channels, height, width).
            seed: of the images from which the search starts.

        Returns:
            Pixels in [0, 1], shape (m, *shape).
        """
        generator = torch_generator(seed, "gradient search")
        images = torch.rand(len(labels), *shape, generator=generator).requires_grad_()
        optimizer = torch.optim.Adam([images], lr=self.lr)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, max(1, self.steps // 3), 0.3)
        for _ in range(self.steps):
            loss = functional.cross_entropy(network(images), labels)
            gradients = torch.autograd.grad(loss, list(network.parameters()), create_graph=True)
            objective = 1 - cosine(gradients, seen) + self.total_variation * variation(images)
            (images.grad,) = torch.autograd.grad(objective, [images])
            images.grad.sign_()
            optimizer.step()
            decay.step()
            with torch.no_grad():
                images.clamp_(0, 1)
        return images.detach()


def cosine(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Return the cosine of the angle between two lists of tensors, as one vector each.

    Example:
        >>> cosine([torch.tensor([3.0]), torch.tensor([4.0])], [torch.ones(1), torch.zeros(1)])
        tensor(0.6000)
    """
    first, second = (torch.cat([t.flatten() for t in tensors]) for tensors in (one, other))
    return functional.cosine_similarity(first, second, dim=0)


def variation(images: Tensor) -> Tensor:
    """Return the mean difference between neighbouring pixels, of shape (…, height, width).

    Example:
        >>> variation(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
        tensor(1.)
    """
    return images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean()

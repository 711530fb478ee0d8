"""What the attacks promise, on networks where the answer is known."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.audits.inversion import (
    GradientSearch,
    cosine,
    first_layer_direction,
    first_layer_input,
    label_of,
)


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 5))


def gradients(net, images, labels):
    loss = functional.cross_entropy(net(images), labels)
    return [g.detach() for g in torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize("seed", range(5))
def test_one_example_and_its_label_are_exact(seed):
    image = torch.rand(1, 1, 3, 4, generator=torch.Generator().manual_seed(seed))
    weight, bias, _, last = gradients(network(seed), image, torch.tensor([seed]))
    assert torch.allclose(first_layer_input(weight, bias), image.flatten(), atol=1e-5)
    flat = image.flatten()
    assert torch.allclose(first_layer_direction(weight), flat / flat.norm(), atol=1e-5)
    assert label_of(last) == seed


def test_of_noise_rows_are_weighed_by_least_squares():
    generator = torch.Generator().manual_seed(0)
    example, bias = torch.rand(12, generator=generator), torch.randn(9, generator=generator)
    weight = torch.outer(bias, example) + 0.01 * torch.randn(9, 12, generator=generator)
    expected = torch.linalg.lstsq(bias[:, None], weight).solution[0]
    assert torch.allclose(first_layer_input(weight, bias), expected, atol=1e-6)


def test_a_bias_that_did_not_move_gives_nothing():
    assert not first_layer_input(torch.ones(2, 3), torch.zeros(2)).any()


def test_the_search_finds_images_with_the_gradient_and_repeats():
    net = network()
    images = torch.rand(2, 1, 3, 4, generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([0, 4])
    seen = gradients(net, images, labels)
    search = GradientSearch(steps=200, total_variation=0.0)
    found = search(net, seen, labels, (1, 3, 4), seed=1)
    assert float(cosine(gradients(net, found, labels), seen)) > 0.995
    assert torch.equal(found, search(net, seen, labels, (1, 3, 4), seed=1))
    assert 0 <= found.min() <= found.max() <= 1

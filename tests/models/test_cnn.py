import pytest
import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.models import LeNet, McMahanCNN


def count(network):
    return sum(p.numel() for p in network.parameters())


def test_mcmahan_cnn_has_the_parameters_of_the_paper():
    assert count(McMahanCNN()) == 1_663_370


def test_lenet_has_the_parameters_of_the_benchmark():
    network = LeNet()
    assert count(network) == 62_006
    widths = [
        (m.in_features, m.out_features) for m in network.modules() if hasattr(m, "in_features")
    ]
    assert widths == [(400, 120), (120, 84), (84, 10)]


@pytest.mark.parametrize("network", [McMahanCNN, LeNet])
@pytest.mark.parametrize(("num_classes", "in_chans", "image_size"), [(7, 1, 28), (3, 4, 33)])
def test_every_size_gives_logits(network, num_classes, in_chans, image_size):
    made = network(num_classes, in_chans, image_size)
    logits = made(torch.rand(2, in_chans, image_size, image_size))
    assert logits.shape == (2, num_classes)
    assert logits.min() < 0 or logits.max() > 0
    assert made.get_classifier() is made.head


@pytest.mark.parametrize(("network", "smallest"), [(McMahanCNN, 4), (LeNet, 16)])
def test_the_smallest_image_works_and_a_smaller_one_is_refused(network, smallest):
    made = network(10, 1, smallest)
    assert made(torch.rand(1, 1, smallest, smallest)).shape == (1, 10)
    with pytest.raises(ConfigurationError, match=f"at least {smallest} .* got {smallest - 1}"):
        network(10, 1, smallest - 1)


@pytest.mark.parametrize(("network", "chans"), [(McMahanCNN, 1), (LeNet, 3)])
def test_dropout_acts_in_training_only(network, chans):
    made = network(drop_rate=0.5)
    images = torch.rand(1, chans, 28, 28) if chans == 1 else torch.rand(1, chans, 32, 32)
    assert not torch.equal(made(images), made(images))
    made.eval()
    assert torch.equal(made(images), made(images))

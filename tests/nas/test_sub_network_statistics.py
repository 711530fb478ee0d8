"""Batch norm statistics of sub-networks from sums."""

import pytest
import torch
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.resnet import small_resnet
from fl_lightning.nas.sub_networks.evaluation import (
    add_sums,
    apply_sums,
    collect_sums,
)

SPACE = small_resnet()


def supernet():
    torch.manual_seed(0)
    return SPACE.supernet(num_classes=5).double()


def batches(sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, 9, 9, generator=generator, dtype=torch.float64) + 1 for n in sizes]


def sums_of(network, architecture, data):
    return collect_sums(network, lambda x: network(x, architecture), data)


def test_one_batch_gives_what_pytorch_would_remember():
    network = supernet()
    part = SPACE.sample(torch.Generator().manual_seed(2))
    plain = SPACE.extract(network, part).train()
    for layer in plain.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    (x,) = batches([16])
    plain(x)
    apply_sums(network, sums_of(network, part, [x]))
    network.eval()
    torch.testing.assert_close(network(x, part), plain.eval()(x), rtol=1e-10, atol=1e-12)


def test_clients_sums_add_up_to_the_pooled_ones():
    network, part = supernet(), SPACE.smallest
    first, second, third = batches([4, 7, 5])
    pooled = sums_of(network, part, [first, second, third])
    added = add_sums(sums_of(network, part, [first, third]), sums_of(network, part, [second]))
    assert pooled.keys() == added.keys()
    for name, own in pooled.items():
        torch.testing.assert_close(own, added[name], rtol=1e-12, atol=1e-12)


def test_the_first_layers_statistics_do_not_depend_on_how_batches_are_cut():
    network = supernet()
    data = batches([4, 7, 5])
    name = "stem.1"
    cut, whole = (
        sums_of(network, SPACE.largest, given)[name] for given in (data, [torch.cat(data)])
    )
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)
    apply_sums(network, {name: cut})
    x = network.stem[0](torch.cat(data))
    torch.testing.assert_close(network.stem[1].running_mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(network.stem[1].running_var, x.var((0, 2, 3)))


def test_collecting_leaves_the_network_as_it_was():
    network = supernet()
    network.stages[0].eval()
    before = {name: own.clone() for name, own in network.state_dict().items()}
    modes = [layer.training for layer in network.modules()]
    sums_of(network, SPACE.smallest, batches([4, 4]))
    assert all(torch.equal(own, before[name]) for name, own in network.state_dict().items())
    assert [layer.training for layer in network.modules()] == modes
    assert not any(layer._forward_pre_hooks for layer in network.modules())


def test_recalibration_mends_an_evaluation_with_anothers_statistics():
    """Statistics of the largest are wrong for the smallest; its own give what training gives."""
    network = supernet()
    (x,) = batches([64])
    apply_sums(network, sums_of(network, SPACE.largest, [x]))
    trained = network.train()(x, SPACE.smallest).detach()
    apply_sums(network, sums_of(network, SPACE.largest, [x]))
    wrong = (network.eval()(x, SPACE.smallest) - trained).abs().max()
    apply_sums(network, sums_of(network, SPACE.smallest, [x]))
    right = (network.eval()(x, SPACE.smallest) - trained).abs().max()
    assert right < 0.05 * wrong


def test_sums_of_different_sub_networks_do_not_add():
    network = supernet()
    left, right = (sums_of(network, part, batches([4])) for part in (SPACE.smallest, SPACE.largest))
    with pytest.raises(ConfigurationError, match="they are of different sub-networks"):
        add_sums(left, right)


def test_one_number_has_no_variance():
    with pytest.raises(
        ConfigurationError, match=r"stem\.1 needs at least 2 numbers .*, and saw 1: raise"
    ):
        apply_sums(supernet(), {"stem.1": torch.ones(3, 16, dtype=torch.float64)})

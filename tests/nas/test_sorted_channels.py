"""Channels are sorted before a narrower width joins; nothing that trains already changes."""

from functools import partial

import pytest
import torch
from test_one_shot import RESNET, data, images, one_shot, weights
from toys import toy_trainer

from fl_lightning import ConfigurationError, Federation, FedProx, Scaffold
from fl_lightning.nas import ResNet, Shrinking
from fl_lightning.server import FedAdam

ORDER = ("depth", "expansion", "width")
THREE = ResNet(
    stem=8, channels=(16, 32), strides=(1, 2), stem_strides=(1, 1), widths=(1.0,),
    depths=((1,), (1,)), expansions=(0.5, 1.0, 2.0),
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
still = partial(torch.optim.SGD, lr=1e-9)


def fit(method, space=RESNET, rounds=4, optimizer=still, federation=None, **options):
    module = one_shot(space, method, optimizer=optimizer)
    clients = [] if federation is False else [federation or Federation(local_steps=1)]
    trainer = toy_trainer(*clients, max_epochs=rounds, **options)
    trainer.fit(module, datamodule=data(3))
    return module


def hidden(module):
    """Return the importance of each channel, of every block's first group."""
    found = []
    for block in module.network.modules():
        if hasattr(block, "hidden_channels"):
            found.append(block.hidden_channels()[0].importance)
    assert found
    return found


def falls(importance):
    return bool((importance.diff() <= 1e-6).all())


@pytest.mark.parametrize("federation", [None, False], ids=["clients", "central"])
def test_channels_are_sorted_when_a_width_joins_and_not_before(federation):
    method = Shrinking(rounds=(1, 1, 5, 5), order=ORDER, sort=True)
    fresh = one_shot(RESNET, method)
    early = fit(method, rounds=2, federation=federation)
    torch.testing.assert_close(weights(early), weights(fresh), atol=1e-5, rtol=0)
    assert not all(falls(each) for each in hidden(early))
    late = fit(method, rounds=3, federation=federation)
    assert all(falls(each) for each in hidden(late))
    x = images(6).tensors[0]
    for one in (early, late):  # the largest computes the same, by the batch's statistics
        one.train()
    torch.testing.assert_close(early(x), late(x), atol=1e-3, rtol=1e-3)


def test_off_is_off():
    options = {"rounds": 3, "optimizer": partial(torch.optim.SGD, lr=0.05)}
    plain = fit(Shrinking(rounds=(1, 1, 5, 5), order=ORDER), **options)
    never = fit(Shrinking(rounds=(1, 9, 5, 5), order=ORDER, sort=True), **options)
    again = fit(Shrinking(rounds=(1, 9, 5, 5), order=ORDER), **options)
    assert torch.equal(weights(never), weights(again))
    assert not torch.equal(weights(never), weights(plain))


def test_a_second_width_leaves_the_networks_of_the_first_alone():
    method = Shrinking(rounds=(0, 1, 5), order=("expansion",), sort=True)
    x = images(6).tensors[0]
    middle = THREE.architecture([min(1, len(d.options) - 1) for d in THREE.decisions])
    before, after = (fit(method, THREE, rounds=rounds).train() for rounds in (1, 2))
    torch.testing.assert_close(before(x, middle), after(x, middle), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(before(x), after(x), atol=1e-3, rtol=1e-3)
    smallest = [one(x, THREE.smallest) for one in (before, after)]
    assert not torch.allclose(*smallest, atol=1e-2)


def test_a_run_that_goes_on_is_the_same(tmp_path):
    method = Shrinking(rounds=(1, 1, 5, 5), order=ORDER, sort=True)
    options = {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}
    clients = lambda: Federation(local_steps=1, server_optimizer=lambda p: FedAdam(p, lr=0.01))
    whole = fit(method, rounds=4, federation=clients(), **options)
    for done in (2, 3):  # before the round in which they are sorted, and after it
        module = one_shot(RESNET, method, **options)
        trainer = toy_trainer(clients(), max_epochs=4)
        first = one_shot(RESNET, method, **options)
        stopped = toy_trainer(clients(), max_epochs=4, max_steps=done)
        stopped.fit(first, datamodule=data(3))
        stopped.save_checkpoint(tmp_path / f"{done}.ckpt")
        trainer.fit(module, datamodule=data(3), ckpt_path=str(tmp_path / f"{done}.ckpt"))
        assert trainer.current_epoch == 4
        assert torch.equal(weights(module), weights(whole))


@pytest.mark.parametrize("correction", [Scaffold(), FedProx(0.1)])
def test_what_remembers_coordinates_is_refused(correction):
    with pytest.raises(
        ConfigurationError, match=r"federation\.correction has a state in the old order"
    ):
        fit(Shrinking(sort=True), federation=Federation(local_steps=1, correction=correction))

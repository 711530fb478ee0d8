"""Sub-networks of a trained supernet: their statistics, their scores, their weights."""

import pytest
import torch
from test_one_shot import RESNET, SPACES, VIT, data, fitted, images, one_shot
from toys import toy_trainer

from fl_lightning import ConfigurationError, Federation
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas import NASBench201, Network, Sandwich
from fl_lightning.nas.sub_networks.evaluation import (
    SubNetworkScore,
    TrainingExamples,
    apply_sums,
    collect_sums,
    recalibrated,
    training_accuracies,
)


def batches():
    return [(x, y) for x, y in zip(*(t.split(24) for t in images().tensors), strict=True)]


def test_a_score_is_the_accuracy_of_the_extracted_network_with_its_statistics():
    net = fitted(one_shot(RESNET), data(1)).network
    score = SubNetworkScore(net, batches, batches)
    found = score(RESNET.smallest)
    plain = RESNET.extract(net, RESNET.smallest)
    sums = collect_sums(plain, lambda batch: plain(batch[0]), batches())
    apply_sums(plain, sums)
    plain.eval()
    with torch.no_grad():
        right = sum(int((plain(x).argmax(1) == y).sum()) for x, y in batches())
    assert found == right / 48
    score(RESNET.largest)
    assert score(RESNET.smallest) == found


@pytest.mark.parametrize(
    ("space", "federated"),
    [(SPACES["mobilenet"], True), (SPACES["resnet"], False), (SPACES["vit"], True)],
    ids=SPACES,
)
def test_scores_are_the_share_of_training_examples_that_are_right(space, federated):
    """Clients' counts add up to what one who has all examples counts, with statistics of all."""
    module, trainer = (
        one_shot(space, Sandwich(1)),
        toy_trainer(*[Federation(local_steps=2)] * federated, max_epochs=1),
    )
    trainer.fit(module, datamodule=data(3))
    generator = torch_generator(4, "test")  # of a head that tells images apart
    head = module.network.get_classifier().weight.data
    head.copy_(torch.randn(head.shape, generator=generator))
    drawn = [space.smallest, space.largest, *(space.sample(generator) for _ in range(4))]
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    examples = TrainingExamples.of(trainer, max_examples=None, seed=0)
    found = training_accuracies(trainer, module.network, drawn, examples)
    assert all(torch.equal(own, before[name]) for name, own in module.state_dict().items())
    source, clients = trainer.datamodule, trainer.datamodule.clients
    owners = (
        [clients[i] for i in range(3)]
        if federated
        else [torch.cat([*map(clients.__getitem__, range(3))])]
    )
    batches = [source.evaluation_batch(indices) for indices in owners]
    score = SubNetworkScore(module.network, lambda: batches, lambda: batches)
    assert found == pytest.approx([score(architecture) for architecture in drawn])
    assert len(set(found)) > 1


def test_sums_of_clients_are_those_of_all_examples():
    """A network whose first batch norm sees the images: its sums do not depend on batches."""
    found = {}
    for name, callbacks in (("central", []), ("clients", [Federation(local_steps=1)])):
        module = one_shot(RESNET)
        trainer = toy_trainer(*callbacks, max_epochs=1)
        trainer.fit(module, datamodule=data(3))
        fresh = one_shot(RESNET).network
        examples = TrainingExamples.of(trainer, max_examples=None, seed=0)
        found[name] = recalibrated(trainer, fresh, [RESNET.smallest, RESNET.largest], examples)
    for ours, theirs in zip(found["central"][0], found["clients"][0], strict=True):
        first = next(iter(ours))
        torch.testing.assert_close(ours[first], theirs[first])
    assert found["clients"][1] == 3 * found["central"][1]


def test_the_checkpoint_has_the_largest_networks_statistics():
    module = fitted(one_shot(RESNET), data(3), Federation(local_steps=1))
    norm = next(m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d))
    assert norm.running_mean.abs().sum() > 0
    trainer = toy_trainer(Federation(local_steps=1))
    [tested] = trainer.test(module, datamodule=data(3), verbose=False)
    assert {"test/accuracy", "test/smallest_accuracy", "test/middle_accuracy"} <= tested.keys()


@pytest.mark.parametrize("space", [RESNET, VIT], ids=["resnet", "vit"])
def test_a_network_begins_with_the_supernets_weights(tmp_path, space):
    module = one_shot(space)
    trainer = toy_trainer(max_epochs=1)
    trainer.fit(module, datamodule=data(1))
    trainer.save_checkpoint(tmp_path / "supernet.ckpt")
    drawn = space.sample(torch.Generator().manual_seed(3))
    path = str(tmp_path / "supernet.ckpt")
    network = Network(space, str(drawn), num_classes=4, in_channels=1, weights=path).eval()
    module.eval()
    x = images(4).tensors[0]
    with torch.no_grad():
        torch.testing.assert_close(network(x), module(x, drawn))
    torch.save(network.network.state_dict(), tmp_path / "own.pt")
    own = Network(
        space, str(drawn), num_classes=4, in_channels=1, weights=str(tmp_path / "own.pt")
    ).eval()
    with torch.no_grad():
        assert torch.equal(own(x), network(x))
    with pytest.raises(ConfigurationError, match="neither of a supernet of"):
        Network(space, str(drawn), num_classes=5, in_channels=1, weights=path)


def test_refusals():
    cell = "|none~0|+|none~0|none~1|+|none~0|none~1|none~2|"
    with pytest.raises(ConfigurationError, match="weights: there is no file 'x"):
        Network(NASBench201(), cell, num_classes=4, weights="x.ckpt")
    with pytest.raises(ConfigurationError, match="new_head: without weights the whole network is"):
        Network(NASBench201(), cell, num_classes=4, new_head=True)
    with pytest.raises(
        ConfigurationError, match="cells is for spaces of cells, and resnet is a space"
    ):
        Network(RESNET, str(RESNET.smallest), num_classes=4, cells=2)

"""What was found on one half of the classes, on the other half: its weights, and a new classifier."""

from pathlib import Path

import pytest
import torch
import yaml
from readme import ROOT
from small_sets import write_folder
from test_one_shot import RESNET, VIT, data, one_shot
from toys import SHORT_FIT, toy_trainer

from fl_lightning import ConfigurationError, ImageClassifier
from fl_lightning.cli import main
from fl_lightning.nas import NASBench201, Network

CELL = "|nor_conv_3x3~0|+|skip_connect~0|nor_conv_1x1~1|+|none~0|skip_connect~1|nor_conv_3x3~2|"
TRANSFER = str(ROOT / "configs/nas/transfer.yaml")
OLD = "--data.init_args.source.init_args.classes=[0,1,2,3,4]"


def body_and_head(network):
    state = network.network.state_dict()
    head = network.network.get_classifier()
    names = {name for name, p in network.network.named_parameters() if p in set(head.parameters())}
    assert len(names) == 2
    return {n: t for n, t in state.items() if n not in names}, {n: state[n] for n in names}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(("space", "num_classes"), [(RESNET, 4), (VIT, 7)])
def test_a_new_head_is_fresh_and_the_rest_is_the_supernets_part(tmp_path, space, num_classes):
    module = one_shot(space)
    trainer = toy_trainer(max_epochs=1)
    trainer.fit(module, datamodule=data(1))
    trainer.save_checkpoint(tmp_path / "supernet.ckpt")
    drawn = space.sample(torch.Generator().manual_seed(5))
    options = {"in_channels": 1, "weights": str(tmp_path / "supernet.ckpt")}
    kept = Network(space, str(drawn), num_classes=4, **options)
    torch.manual_seed(3)
    new = Network(space, str(drawn), num_classes=num_classes, new_head=True, **options)
    torch.manual_seed(3)
    fresh = Network(space, str(drawn), num_classes=num_classes, in_channels=1)
    assert_same(body_and_head(new)[0], body_and_head(kept)[0])
    assert_same(body_and_head(new)[1], body_and_head(fresh)[1])


def test_a_cells_own_weights_with_another_number_of_classes(tmp_path):
    shape = {"in_channels": 1, "channels": 4, "cells": 1}
    trained = Network(NASBench201(), CELL, num_classes=5, **shape)
    module = ImageClassifier(trained, num_classes=5, in_chans=1)
    torch.save({"state_dict": module.state_dict()}, tmp_path / "run.ckpt")
    path = str(tmp_path / "run.ckpt")
    for num_classes in (5, 3):
        new = Network(
            NASBench201(), CELL, num_classes=num_classes, weights=path, new_head=True, **shape
        )
        assert_same(body_and_head(new)[0], body_and_head(trained)[0])
    assert_same(
        Network(NASBench201(), CELL, num_classes=5, weights=path, **shape).state_dict(),
        trained.state_dict(),
    )
    with pytest.raises(ConfigurationError, match=r"not of a trained network of.*set new_head"):
        Network(NASBench201(), CELL, num_classes=3, weights=path, **shape)


def fit(name, rounds, *words, tests=False):
    small = ["--data.init_args.num_clients=4", f"--trainer.logger.init_args.name={name}"]
    small += [f"--trainer.max_epochs={rounds}", f"--test_after_fit={str(tests).lower()}"]
    main(["fit", *words, *SHORT_FIT, *small])
    return f"runs/{name}/version_0/checkpoints/last.ckpt"


def accuracy(capsys):
    """Return what the fit before says of the test set."""
    lines = capsys.readouterr().out.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith("test/accuracy ")]
    return float(value)


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_supernet_of_half_of_the_digits_helps_with_the_other_half(capsys):
    """Federated: after as few rounds, better than the same network from scratch."""
    supernet = fit("old", 12, "--config", str(ROOT / "configs/nas/one_shot_quickstart.yaml"), OLD)
    main(
        [
            *("search", "--ckpt_path", supernet, "--constraint=params<=8000", "--budget=10"),
            "--export=best.yaml",
        ]
    )
    capsys.readouterr()
    fit("new", 4, "--config", "best.yaml", "--config", TRANSFER, tests=True)
    transferred = accuracy(capsys)
    best = yaml.safe_load(Path("best.yaml").read_text())
    del best["model"]["init_args"]["network"]["init_args"]["weights"]
    Path("best.yaml").write_text(yaml.safe_dump(best))
    halves = "--data.init_args.source.init_args.classes=[5,6,7,8,9]"
    fit("scratch", 4, "--config", "best.yaml", halves, tests=True)
    assert transferred > accuracy(capsys) + 0.05


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_folder_of_images_from_the_network_of_all_sizes_to_another_folder():
    """The commands of configs/nas/imagenet.yaml on small images."""
    write_folder(Path("images"), "train", ["a", "b"], 16, size=(24, 24))
    write_folder(Path("flowers"), "train", ["x", "y", "z"], 10, size=(24, 24))
    source, space = "--data.init_args.source.init_args", "--model.init_args.space.init_args"
    small = [
        *(f"{space}.resolutions=[16, 24]", f"{space}.widths=[8, 8, 8, 16, 16, 16]"),
        *(f"{space}.strides=[1, 2, 2]", f"{space}.squeeze=[false, false, true]"),
        *(
            f"{space}.swish=[false, true, true]",
            f"{space}.depths=[1, 2]",
            f"{space}.kernels=[3, 5]",
        ),
        *("--model.init_args.num_classes=2", "--model.init_args.image_size=24"),
        *(f"{source}.root=images", f"{source}.image_size=24", f"{source}.batch_size=4"),
        *(f"{source}.val_fraction=0.25", "--trainer.precision=32-true"),
        *("--federation.cohort.init_args.fraction=0.5", "--trainer.accelerator=cpu"),
    ]
    supernet = fit("all", 1, "--config", str(ROOT / "configs/nas/imagenet.yaml"), *small)
    wanted = ["--constraint=flops<=2e6", "--budget=4", "--export=best.yaml"]
    main(["search", "--ckpt_path", supernet, *wanted])
    network = yaml.safe_load(Path("best.yaml").read_text())["model"]["init_args"]["network"]
    assert network["init_args"]["architecture"].startswith(("r16:", "r24:"))
    tuned = fit(
        "tuned", 1, "--config", "best.yaml", "--model.init_args.optimizer.init_args.lr=0.01"
    )
    other = [
        *(f"{source}.classes=null", f"{source}.root=flowers", "--model.init_args.num_classes=3"),
        "--model.init_args.network.init_args.num_classes=3",
        f"--model.init_args.network.init_args.weights={tuned}",
    ]
    moved = fit("moved", 1, "--config", "best.yaml", "--config", TRANSFER, *other)
    before, after = (torch.load(p, weights_only=True)["state_dict"] for p in (tuned, moved))
    head = [name for name in after if after[name].shape != before[name].shape]
    assert [after[name].shape[0] for name in head] == [3, 3]  # weight and bias of the classifier

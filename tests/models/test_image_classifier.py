import ast
from pathlib import Path

import huggingface_hub
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset
from toys import validating_trainer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.models import ImageClassifier, LeNet, McMahanCNN, Schedule, image_classifier

TINY = {"embed_dim": 12, "depth": 3, "num_heads": 3}


def tiny_vit(**arguments):
    arguments = {"num_classes": 5, "image_size": 32, "network_kwargs": TINY, **arguments}
    return ImageClassifier(**arguments)


def batch(size=4, image_size=32, chans=3, num_classes=5):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(size, chans, image_size, image_size, generator=generator)
    return images, torch.arange(size) % num_classes


class Images(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*batch(6)), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def trainer(*callbacks, **options):
    return validating_trainer(*callbacks, **{"max_epochs": 1, "accelerator": "cpu"} | options)


def trainable(model):
    return {name for name, p in model.network.named_parameters() if p.requires_grad}


# --- the network -------------------------------------------------------------------------------


def test_our_cnns_come_before_timm():
    assert type(ImageClassifier("lenet", num_classes=10).network) is LeNet
    model = ImageClassifier("mcmahan_cnn", num_classes=10, in_chans=1)
    assert type(model.network) is McMahanCNN
    assert sum(p.numel() for p in model.parameters()) == 1_663_370


def test_the_default_is_the_vit_of_dino():
    network = ImageClassifier(num_classes=100).network
    assert network.pos_embed.shape == (1, 197, 384)
    assert len(network.blocks) == 12
    assert network.head.out_features == 100


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_224.dino", "resnet10t", "lenet", "mcmahan_cnn"]
)
def test_channels_and_image_size_reach_every_network(name):
    kwargs = TINY if name.startswith("vit") else None
    model = ImageClassifier(name, num_classes=3, in_chans=2, image_size=48, network_kwargs=kwargs)
    assert model.eval()(torch.rand(2, 2, 48, 48)).shape == (2, 3)


@pytest.mark.parametrize("name", ["vit_small_patch16_224.dino", "resnet10t", "lenet"])
def test_dropout_acts_before_the_classifier_in_training_only(name):
    kwargs = TINY if name.startswith("vit") else None
    arguments = {"num_classes": 5, "image_size": 32, "network_kwargs": kwargs}
    images, _ = batch(2)
    off, on = (ImageClassifier(name, **arguments, drop_rate=rate) for rate in (0.0, 0.5))
    on.load_state_dict(off.state_dict())
    on.train(), off.train()
    assert torch.equal(off(images), off(images))
    assert not torch.equal(on(images), on(images))
    on.load_state_dict(off.state_dict())
    assert torch.equal(on.eval()(images), off.eval()(images))


# --- weights -----------------------------------------------------------------------------------


def test_weights_that_cannot_be_downloaded(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = {"cache_dir": str(tmp_path)}
    with pytest.raises(ConfigurationError, match=r"could not be downloaded.*checkpoint_path"):
        ImageClassifier("resnet10t", num_classes=2, pretrained=True, network_kwargs=folder)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pretrained": True, "checkpoint_path": "a.pth"}, "two sources"),
        ({"network": "vit_smal_patch16_224"}, "Close to it: .*vit_small_patch16_224"),
        ({"network": "vit_small_patch16_224.din"}, r"Close to it: .*vit_small_patch16_224\.dino"),
        ({"network": "le_net"}, "Close to it: lenet"),
        ({"network": "a/b"}, "no 'a/b' in timm"),
        (
            {"network": "lenet", "network_kwargs": {"depth": 3}},
            "network_kwargs: 'lenet' does not have such an argument: .*'depth'",
        ),
        ({"network": "lenet", "network_kwargs": None, "pretrained": True}, "checkpoint_path"),
        ({"network": "lenet", "network_kwargs": None, "image_size": 8}, "image_size .* got 8"),
        ({"image_size": 40}, "multiple of the patches .* 16 pixels, got 40"),
        ({"network_kwargs": {"dept": 3}}, "cannot build .*dept"),
        ({"network_kwargs": {"embed_dim": 10}}, "cannot build .*embed_dim"),
        ({"network_kwargs": {"img_size": 32, "drop_rate": 0.1}}, "not hold drop_rate, img_size"),
        ({"freeze_blocks": 4}, "in 0 to 3, its number of blocks, got 4"),
        (
            {"network": "resnet10t", "network_kwargs": None, "freeze_blocks": 1},
            "must be 0: it has no blocks, got 1 for a ResNet.*freeze_backbone",
        ),
    ],
)
def test_what_cannot_work_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        tiny_vit(**arguments)


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigurationError, match=r"(?s)num_classes.*drop_rate.*label_smoothing"):
        tiny_vit(num_classes=0, drop_rate=2.0, label_smoothing=2.0)


# --- freezing ----------------------------------------------------------------------------------


def test_freeze_blocks_freezes_the_embeddings_and_the_first_blocks():
    depth = 12  # block 1 is not mistaken for 10
    model = tiny_vit(freeze_blocks=2, network_kwargs={**TINY, "depth": depth})
    everything = {name for name, _ in model.network.named_parameters()}
    last = {n for n in everything if n.startswith("blocks") and int(n.split(".")[1]) >= 2}
    assert len(last) == 12 * (depth - 2)
    assert trainable(model) == last | {"norm.weight", "norm.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize(("name", "head"), [(None, "head"), ("resnet10t", "fc"), ("lenet", "head")])
def test_freeze_backbone_leaves_the_classifier(name, head):
    arguments = {"network": name, "network_kwargs": None} if name else {}
    model = tiny_vit(freeze_backbone=True, **arguments)
    assert trainable(model) == {f"{head}.weight", f"{head}.bias"}


def test_only_what_trains_is_optimized():
    model = tiny_vit(freeze_backbone=True)
    groups = model.configure_optimizers().param_groups
    assert [p.shape for group in groups for p in group["params"]] == [(5, 12), (5,)]


# --- the steps ---------------------------------------------------------------------------------


def test_label_smoothing_is_of_the_training_loss_only(monkeypatch):
    images, labels = batch()
    model = tiny_vit(label_smoothing=0.3)
    logged = {}
    monkeypatch.setattr(model, "log", lambda *_, **__: None)
    monkeypatch.setattr(model, "log_dict", lambda values, **_: logged.update(values))
    logits = model(images)
    smoothed = functional.cross_entropy(logits, labels, label_smoothing=0.3)
    assert torch.equal(model.training_step((images, labels), 0), smoothed)
    model.validation_step((images, labels), 0)
    assert torch.equal(logged["val/loss"], functional.cross_entropy(logits, labels))
    assert not torch.equal(logged["val/loss"], smoothed)


def test_every_stage_runs_under_the_trainer():
    model = tiny_vit()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = trainer(max_epochs=2)
    run.fit(model, datamodule=Images())
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == before.keys()
    assert {"train/accuracy", "val/loss", "val/accuracy"} <= run.callback_metrics.keys()

    (measured,) = run.test(model, datamodule=Images(), verbose=False)
    probabilities = torch.cat(run.predict(model, datamodule=Images()))
    labels = batch(6)[1]
    assert torch.allclose(probabilities.sum(dim=1), torch.ones(6))
    # Over all six examples, although the batches hold four and two.
    assert measured["test/loss"] == pytest.approx(
        functional.nll_loss(probabilities.log(), labels).item(), rel=1e-5
    )
    accuracy = (probabilities.argmax(dim=1) == labels).float().mean().item()
    assert measured["test/accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("name", ["vit_small_patch16_224.dino", "lenet"])
def test_the_training_step_runs_under_vmap_of_grad(name, monkeypatch):
    kwargs = TINY if name.startswith("vit") else None
    model = ImageClassifier(name, num_classes=5, image_size=32, network_kwargs=kwargs)
    monkeypatch.setattr(model, "log", lambda *_, **__: None)

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *batch):
            return self.model.training_step(batch, 0)

    step = Step()
    params = {name: p.detach() for name, p in step.named_parameters()}
    buffers = dict(step.named_buffers())

    def loss(params, images, labels):
        return functional_call(step, {**params, **buffers}, (images, labels))

    images, labels = batch(6)
    groups = images.view(3, 2, *images.shape[1:]), labels.view(3, 2)
    with sdpa_kernel(SDPBackend.MATH):  # of attention, only this form has a rule for vmap
        together = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(params, *groups)
    alone = grad(loss)(params, groups[0][1], groups[1][1])
    for key, gradient in alone.items():
        assert torch.allclose(together[key][1], gradient, atol=1e-5)


# --- optimizer and schedule --------------------------------------------------------------------


class Rates(Callback):
    def __init__(self):
        self.rates = []

    def on_train_batch_start(self, trainer, *_):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_the_schedule_acts_once_a_round():
    schedule = Schedule("cosine", warmup_rounds=1)
    model = tiny_vit(schedule=schedule, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    seen = Rates()
    trainer(seen, max_epochs=4).fit(model, datamodule=Images())
    expected = [0.5 * schedule.factor(round, 4) for round in range(4) for _ in range(2)]
    assert seen.rates == pytest.approx(expected)


def test_a_cosine_in_a_run_without_end_is_refused():
    model = tiny_vit(schedule=Schedule("cosine"))
    with pytest.raises(ConfigurationError, match="max_epochs"):
        trainer(max_epochs=-1, max_steps=1).fit(model, datamodule=Images())


def test_checkpoints_load_without_running_code(tmp_path):
    run = trainer()
    model = tiny_vit(schedule=Schedule("step"))
    run.fit(model, datamodule=Images())
    run.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert "hyper_parameters" not in checkpoint
    again = tiny_vit(checkpoint_path=str(tmp_path / "last.ckpt"))
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


# --- the command line --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_parser_makes_the_defaults_and_refuses_a_bad_schedule():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(ImageClassifier, "model")
    arguments = {"network": "lenet", "num_classes": 5}
    model = parser.instantiate_classes(parser.parse_object({"model": arguments})).model
    optimizer = model.configure_optimizers()
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.01, 0.9)
    schedule = {"kind": "cosine", "final_factor": 3.0}
    with pytest.raises(ValueError, match="final_factor must be"):
        parser.instantiate_classes(
            parser.parse_object({"model": {**arguments, "schedule": schedule}})
        )


def test_importing_the_models_does_not_import_timm():
    folder = Path(image_classifier.__file__).parent
    at_import = [
        alias.name if isinstance(node, ast.Import) else node.module
        for file in folder.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    assert "torch" in at_import
    assert not [module for module in at_import if module.split(".")[0] in ("timm", "safetensors")]


def test_networks_that_take_any_size_are_asked_for_none():
    images, labels = torch.zeros(2, 3, 24, 24), torch.tensor([0, 1])
    options = {"num_classes": 2, "image_size": 32}
    ImageClassifier("resnet10t", **options).check_batch((images, labels))
    with pytest.raises(ConfigurationError, match="the images are 24 x 24"):
        ImageClassifier("lenet", **options).check_batch((images, labels))

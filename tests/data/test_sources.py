"""Data modules of images, on real digits and on files written here in the real formats."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from lightning.pytorch import LightningModule
from PIL import Image
from small_sets import write_folder, write_idx, write_pickles
from toys import validating_trainer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data import FederatedDataModule, NaturalPartition
from fl_lightning.data.sources.image_folder import ImageFolder
from fl_lightning.data.sources.image_source import ImageTensors
from fl_lightning.data.sources.known_sets import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    FEMNIST,
    MNIST,
    Digits,
    FashionMNIST,
)


def ready(source):
    source.prepare_data()
    source.setup("fit")
    return source


def all_batches(loader):
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def class_counts(images):
    return torch.bincount(images.targets).tolist()


# --- Digits: the splits and loaders that all sources share


def test_splits_keep_the_proportions_of_the_classes():
    digits = ready(Digits(val_fraction=0.25))
    sets = [digits.train_set, digits.val_set, digits.test_set]
    total = torch.tensor([class_counts(images) for images in sets]).sum(0)
    assert total.sum() == 1797
    test, val = (torch.tensor(class_counts(images)) for images in sets[:0:-1])
    assert ((test - total * 0.2).abs() < 1).all()
    assert ((val - (total - test) * 0.25).abs() < 1).all()


def test_chosen_classes_are_what_remains_of_the_same_splits():
    every, some = ready(Digits(seed=1)), ready(Digits(seed=1, classes=[7, 2]))
    assert some.num_classes == 10
    for name in ("train_set", "val_set", "test_set"):
        all_images, chosen = getattr(every, name), getattr(some, name)
        kept = (all_images.targets == 2) | (all_images.targets == 7)
        assert 0 < len(chosen) < len(all_images)
        assert torch.equal(chosen.targets, all_images.targets[kept])
        assert torch.equal(chosen.images, all_images.images[kept])


def test_splits_and_training_order_are_seeded_and_the_order_is_new_each_pass(monkeypatch):
    def passes(seed):
        loader = ready(Digits(seed=seed)).train_dataloader()
        return [all_batches(loader)[1] for _ in range(2)]

    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    first, same = passes(1), passes(None)
    assert not torch.equal(passes(2)[0], first[0])
    assert all(map(torch.equal, first, same))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(torch.bincount(first[0]), torch.bincount(first[1]))


def test_training_is_augmented_and_evaluation_is_not():
    digits = ready(Digits(augment=True))
    assert digits.train_set.pipeline == Digits.pipeline
    plain = Digits.pipeline.evaluation()
    assert digits.val_set.pipeline == digits.test_set.pipeline == plain
    assert ready(Digits()).train_set.pipeline == plain
    for loader in (digits.val_dataloader, digits.test_dataloader, digits.predict_dataloader):
        first, second = all_batches(loader()), all_batches(loader())
        assert all(map(torch.equal, first, second))
    assert torch.equal(all_batches(digits.val_dataloader())[1], digits.val_set.targets)


def test_batches_have_their_shapes_types_and_scale():
    digits = ready(Digits(batch_size=100, image_size=12))
    batches = list(digits.train_dataloader())
    assert [len(labels) for _, labels in batches] == [100] * 12 + [94]
    images, labels = batches[0]
    assert (images.shape, images.dtype) == ((100, 1, 12, 12), torch.float32)
    assert (labels.shape, labels.dtype) == ((100,), torch.int64)
    plain = ready(Digits())
    everything, _ = all_batches(plain.train_dataloader())
    assert abs(everything.mean()) < 0.02
    assert abs(everything.std() - 1) < 0.02
    assert plain.train_set.images.max() == 255
    assert (plain.num_classes, plain.class_names) == (10, tuple("0123456789"))


def test_out_of_range_settings_are_named_at_once_and_classes_that_there_are_not():
    with pytest.raises(ConfigurationError) as error:
        Digits(batch_size=0, image_size=0, val_fraction=1.0)
    for name in ("batch_size", "image_size", "val_fraction"):
        assert name in str(error.value)
    for classes in ([], [3, 10], [-1]):
        with pytest.raises(ConfigurationError, match="classes must be"):
            ready(Digits(classes=classes))


class Linear(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def validation_step(self, batch):
        self.log("val/loss", self.training_step(batch))

    def predict_step(self, batch):
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# Lightning asks whether no validation images were meant, which val_fraction=0 says.
@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
@pytest.mark.parametrize("val_fraction", [0.0, 0.1])
def test_a_trainer_fits_validates_and_predicts(val_fraction):
    trainer = validating_trainer(max_epochs=1)
    digits, model = Digits(val_fraction=val_fraction), Linear()
    trainer.fit(model, datamodule=digits)
    assert trainer.global_step == len(digits.train_dataloader())
    assert ("val/loss" in trainer.callback_metrics) == (val_fraction > 0)
    predicted = torch.cat(trainer.predict(model, datamodule=digits))
    assert torch.equal(predicted, digits.test_set.targets)


# --- torchvision's formats


@pytest.fixture
def unchecked(monkeypatch):
    """Let torchvision read files whose checksums are not the published ones."""

    def exists(path, md5=None):
        return Path(path).is_file()

    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", exists)


@pytest.mark.parametrize("source_class", [MNIST, FashionMNIST])
def test_grey_sets_read_idx_files(source_class, tmp_path):
    stored = write_idx(tmp_path / source_class.__name__ / "raw")
    source = ready(source_class(str(tmp_path), val_fraction=0.25, batch_size=7))
    sizes = [len(images) for images in (source.train_set, source.val_set, source.test_set)]
    assert sizes == [30, 10, 20]
    assert class_counts(source.val_set) == [1] * 10
    assert (source.num_classes, len(source.class_names)) == (10, 10)
    assert torch.equal(source.test_set.images[:, 0], torch.from_numpy(stored["t10k"]))
    images, labels = next(iter(source.train_dataloader()))
    assert (images.shape, labels.dtype) == ((7, 1, 28, 28), torch.int64)


def test_emnist_is_upright(tmp_path):
    names = ("emnist-digits-train", "emnist-digits-test")
    stored = write_idx(tmp_path / "EMNIST" / "raw", names=names)
    source = ready(EMNIST(str(tmp_path), split="digits", val_fraction=0.25))
    upright = torch.from_numpy(stored[names[1]]).transpose(1, 2)  # NIST's files hold columns first
    assert torch.equal(source.test_set.images[:, 0], upright)
    assert source.num_classes == 10
    with pytest.raises(
        ConfigurationError, match=r"split must be one of balanced, .*, got .capitals"
    ):
        EMNIST(split="capitals")


def write_leaf(folder, **writers):
    """A file of LEAF: each writer has images of one grey, and the labels given."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        name: {"x": [[grey] * 784] * len(labels), "y": labels}
        for name, (grey, labels) in writers.items()
    }
    text = json.dumps({"users": list(data), "user_data": data})
    (folder / f"all_data_{'_'.join(writers)}.json").write_text(text)


class TestFEMNIST:
    def test_writers_are_clients(self, tmp_path):
        write_leaf(tmp_path / "train", al=(0.0, [0, 61]), bo=(1.0, [10] * 6))
        write_leaf(tmp_path / "train", cy=(0.5, [36, 36, 1]))
        write_leaf(tmp_path / "test", di=(0.25, [3]))
        data = FederatedDataModule(
            FEMNIST(str(tmp_path), val_fraction=0.0), partition=NaturalPartition("writers")
        )
        assert data.clients.num_examples.tolist() == [2, 6, 3]
        images, labels = data.train_batch(data.clients[2])
        torch.testing.assert_close(images, torch.full((3, 1, 28, 28), 128 / 255))
        assert labels.tolist() == [36, 36, 1]
        assert len(data.source.test_set) == 1
        assert (data.source.num_classes, data.source.class_names[36]) == (62, "a")

    def test_files_that_are_not_there_or_not_leafs_are_named(self, tmp_path):
        with pytest.raises(
            ConfigurationError, match=r"no file .*train/\*\.json: create the files with LEAF"
        ):
            ready(FEMNIST(str(tmp_path)))
        (tmp_path / "train").mkdir()
        for text in ("{}", "[]", "no", '{"user_data": {"al": {"x": [[1, 2]], "y": [0]}}}'):
            (tmp_path / "train" / "a.json").write_text(text)
            with pytest.raises(ConfigurationError, match=r"a\.json is no file of LEAF"):
                ready(FEMNIST(str(tmp_path)))


@pytest.mark.parametrize("fraction", [0.5, 0.1])
def test_a_fraction_of_the_training_examples_is_of_every_class_equally(fraction):
    every, some = ready(Digits(seed=0)), ready(Digits(seed=0, fraction=fraction))
    for name in ("val_set", "test_set"):
        assert torch.equal(getattr(every, name).images, getattr(some, name).images)
    whole, kept = class_counts(every.train_set), class_counts(some.train_set)
    assert all(abs(k - fraction * w) < 1 for k, w in zip(kept, whole, strict=True))
    assert torch.equal(every.train_set.images, ready(Digits(seed=0, fraction=1.0)).train_set.images)
    with pytest.raises(ConfigurationError, match=r"fraction must be in \(0, 1\], got 0"):
        Digits(fraction=0.0)


@pytest.mark.usefixtures("unchecked")
def test_cifar10_reads_its_batches(tmp_path):
    files = {f"data_batch_{i}": 20 for i in range(1, 6)} | {"test_batch": 20}
    names = [f"class {i}" for i in range(10)]
    folder = tmp_path / "cifar-10-batches-py"
    stored = write_pickles(folder, files, "labels", ("batches.meta", "label_names"), names)
    source = ready(CIFAR10(str(tmp_path), val_fraction=0, image_size=40))
    assert source.class_names == tuple(names)
    assert torch.equal(source.test_set.images, torch.from_numpy(stored["test_batch"]))
    assert torch.equal(source.train_set.images[:20], torch.from_numpy(stored["data_batch_1"]))
    assert len(source.val_set) == 0
    images, _ = next(iter(source.train_dataloader()))
    assert images.shape == (64, 3, 40, 40)


@pytest.mark.usefixtures("unchecked")
def test_cifar100_takes_the_fine_labels(tmp_path):
    names = [f"class {i}" for i in range(100)]
    meta = ("meta", "fine_label_names")
    folder = tmp_path / "cifar-100-python"
    write_pickles(folder, {"train": 200, "test": 100}, "fine_labels", meta, names)
    source = ready(CIFAR100(str(tmp_path), val_fraction=0.5))
    assert source.num_classes == 100
    assert class_counts(source.val_set) == class_counts(source.train_set) == [1] * 100


@pytest.mark.parametrize("source_class", [CIFAR10, CIFAR100, MNIST, FashionMNIST])
def test_missing_files_say_what_to_do(source_class, tmp_path):
    with pytest.raises(ConfigurationError) as error:
        ready(source_class(str(tmp_path)))
    for part in (source_class.__name__, f"root='{tmp_path}'", "download: true", source_class.files):
        assert part in str(error.value)


def test_a_failed_download_says_so(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", no_network)
    with pytest.raises(ConfigurationError, match=r"could not be downloaded.*no route to host"):
        CIFAR10(str(tmp_path), download=True).prepare_data()


# --- ImageFolder


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path, "train", ("dog", "cat"), 10)
    write_folder(tmp_path, "test", ("cat", "dog"), 3, size=(12, 9), extension="jpg")
    return tmp_path


def test_image_folder_reads_every_pixel(folder):
    (folder / "train" / ".cache").mkdir()
    (folder / "train" / "cat" / "notes.txt").write_text("not an image")
    source = ready(ImageFolder(str(folder), image_size=8, val_fraction=0.2, seed=0))
    assert (source.class_names, source.num_classes) == (("cat", "dog"), 2)
    assert class_counts(source.train_set) == [8, 8]
    assert class_counts(source.val_set) == [2, 2]
    assert isinstance(source.train_set, ImageTensors)
    assert source.train_set.pipeline.crop_padding == 1
    whole = ready(ImageFolder(str(folder), image_size=8, val_fraction=0, seed=0)).train_set
    with Image.open(folder / "train" / "dog" / "004.png") as image:
        assert torch.equal(whole.images[14], torch.from_numpy(np.array(image)).permute(2, 0, 1))


def test_of_other_shapes_the_shorter_side_is_resized_and_the_centre_kept(tmp_path):
    write_folder(tmp_path, "train", ("only",), 1, size=(24, 8))
    source = ready(ImageFolder(str(tmp_path), image_size=4, val_fraction=0, test=None))
    with Image.open(tmp_path / "train" / "only" / "000.png") as image:
        resized = image.resize((12, 4), Image.Resampling.BILINEAR).crop((4, 0, 8, 4))
    assert torch.equal(source.train_set.images[0].permute(1, 2, 0), torch.tensor(np.array(resized)))


def test_grey_files_become_rgb(tmp_path):
    (tmp_path / "train" / "only").mkdir(parents=True)
    Image.new("L", (4, 4), 7).save(tmp_path / "train" / "only" / "grey.BMP")
    source = ready(ImageFolder(str(tmp_path), image_size=4, val_fraction=0, test=None))
    assert torch.equal(source.train_set.images, torch.full((1, 3, 4, 4), 7, dtype=torch.uint8))


def test_decoding_lazily_gives_the_same_batches(folder):
    kept, lazy = (
        ready(ImageFolder(str(folder), image_size=6, in_memory=in_memory, seed=1))
        for in_memory in (True, False)
    )
    assert not isinstance(lazy.train_set, ImageTensors)
    for name in ("val_dataloader", "test_dataloader", "train_dataloader"):
        batches = []
        for source in (kept, lazy):
            torch.manual_seed(0)
            batches.append(all_batches(getattr(source, name)()))
        assert all(map(torch.equal, *batches))
    assert torch.equal(kept.test_set[2][0], lazy.test_set[2][0])
    assert len(lazy.train_set) == len(kept.train_set)


def test_only_files_of_the_chosen_classes_are_decoded(folder):
    (min((folder / "train").iterdir()) / "broken.png").write_text("of the first class")
    with pytest.raises(ConfigurationError, match=r"broken.png cannot be read"):
        ready(ImageFolder(str(folder), image_size=8))
    source = ready(ImageFolder(str(folder), image_size=8, classes=[1]))
    assert set(source.train_set.targets.tolist()) == {1}


def test_a_validation_folder_is_taken_and_a_missing_test_folder_held_out(folder):
    write_folder(folder, "valid", ("cat", "dog"), 2)
    source = ready(ImageFolder(str(folder), image_size=8, val="valid", test=None))
    sets = (source.train_set, source.val_set, source.test_set)
    assert [class_counts(images) for images in sets] == [[8, 8], [2, 2], [2, 2]]
    assert not source.val_set.pipeline.horizontal_flip


def test_normalisation_can_be_given(folder):
    settings = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    source = ready(ImageFolder(str(folder), image_size=8, augment=False, **settings))
    images, _ = all_batches(source.train_dataloader())
    assert 0 <= images.min() < images.max() <= 1


def test_other_classes_in_the_test_folder_are_listed(folder):
    (folder / "test" / "cat").rename(folder / "test" / "bird")
    with pytest.raises(
        ConfigurationError, match=r"add the folders \['cat'\], remove the folders \['bird'\]"
    ):
        ready(ImageFolder(str(folder), image_size=8))


def test_an_empty_class_and_a_broken_file_are_named(folder):
    broken = folder / "train" / "cat" / "000.png"
    broken.write_bytes(b"no image")
    with pytest.raises(ConfigurationError, match=r"000\.png cannot be read as an image"):
        ready(ImageFolder(str(folder), image_size=8))
    (folder / "train" / "eel").mkdir()
    (folder / "test" / "eel").mkdir()
    with pytest.raises(ConfigurationError, match="eel has no image"):
        ready(ImageFolder(str(folder), image_size=8))

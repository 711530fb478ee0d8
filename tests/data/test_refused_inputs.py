"""Files, data sets and arguments that cannot be meant: each is refused, with what is wrong and where.

Rows are built here, not written down: files are cut off and overwritten at many places, and every argument
of every exported class is given kinds of values that it does not take.
"""

import gzip
import inspect
import io
import struct
import zipfile
import zlib
from functools import partial
from typing import Any, get_type_hints

import numpy as np
import pandas as pd
import pytest
import torch
from families import TABLE
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from toys import LoaderData

from fl_lightning import BackdoorSuccess, ConfigurationError, FederatedDataModule, Federation
from fl_lightning.data import (
    CIFAR100,
    IID,
    Arrays,
    Digits,
    ImageFolder,
    LabelShards,
    NaturalPartition,
    Table,
    Trigger,
)
from fl_lightning.nas import NASBench201, OneShot, Supernet
from fl_lightning.nas.spaces.named import named_space

RNG = np.random.default_rng(0)
ROWS = 40
FRAME = pd.DataFrame(
    {"a": RNG.normal(size=ROWS), "kind": list("uv") * (ROWS // 2), "y": np.arange(ROWS) % 2}
)


# Damaged files: written whole, then cut off or overwritten.


def packed_csv():
    return gzip.compress(FRAME.to_csv(index=False).encode())


def npz(save=np.savez, **arrays):
    buffer = io.BytesIO()
    save(buffer, **(arrays or {"x": RNG.normal(size=(ROWS, 3)), "y": np.arange(ROWS) % 2}))
    return buffer.getvalue()


def parquet():
    buffer = io.BytesIO()
    FRAME.to_parquet(buffer)
    return buffer.getvalue()


def picture(kind="PNG", pixels=None):
    buffer = io.BytesIO()
    pixels = RNG.integers(0, 256, (16, 16, 3), np.uint8) if pixels is None else pixels
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def huge_picture():
    """A PNG of 100 bytes whose header says 100,000 x 100,000 pixels."""
    data = bytearray(picture())
    data[16:24] = struct.pack(">II", 100_000, 100_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def lying_npz(shape):
    """Arrays whose headers say this shape."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(800)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as stored:
        for name in ("x.npy", "y.npy"):
            stored.writestr(name, array)
    return buffer.getvalue()


def arrays(file):
    return lambda: Arrays("x", "y", file=str(file)).setup()


def table(file):
    return lambda: Table(str(file), "y").setup()


def images(file):
    """The file as one of two pictures of a class."""
    folder = file.parent / "root" / "train" / "cat"
    folder.mkdir(parents=True)
    (folder / f"0{file.suffix}").write_bytes(file.read_bytes())
    (folder / "1.png").write_bytes(picture())
    return lambda: ImageFolder(str(file.parent / "root"), image_size=8, test=None).setup()


KINDS = {
    "arrays.npz": (npz, arrays),
    "packed.npz": (lambda: npz(np.savez_compressed), arrays),
    "rows.csv.gz": (packed_csv, table),
    "rows.parquet": (parquet, table),
    "picture.png": (picture, images),
    "picture.jpg": (lambda: picture("JPEG"), images),
}
PARTS = (0.0, 0.1, 0.5, 0.9)
DAMAGED = [
    *((name, f"cut at {part}", lambda data, at: data[:at], part) for name in KINDS for part in PARTS),
    *((name, "cut at 0.98", lambda data, at: data[:at], 0.98) for name in KINDS if name != "picture.png"),
    *((name, f"text at {part}", lambda data, at: b"{" * 40 + data, part) for name in ("rows.csv.gz", "rows.parquet", "picture.png", "picture.jpg") for part in (0,)),
    *(
        (name, f"overwritten at {part}", lambda data, at: data[:at] + b"\xff" * 24 + data[at + 24 :], part)
        for name, part in (("packed.npz", 0.2), ("packed.npz", 0.3), ("rows.csv.gz", 0.3))
    ),
]  # fmt: skip
WHOLE = {
    **{
        f"{name}.npz": (partial(lying_npz, shape), arrays, "is no .npz file of plain arrays")
        for name, shape in {"80 TB": "(10000000000000,)", "more": f"({10**30},)", "open": "((2,)"}.items()
    },
    "lone array.npz": (lambda: npz()[:0] + b"\x93NUMPY\x01\x00v\x00" + bytes(200), arrays, "is no .npz file of plain arrays"),
    "objects.npz": (lambda: npz(x=np.array([{}, {}]), y=np.arange(2)), arrays, "Object arrays cannot be loaded"),
    "other names.npz": (lambda: npz(u=np.eye(2), y=np.arange(2)), arrays, "has no array 'x' for inputs: its arrays are 'u', 'y'"),
    "empty.npz": (lambda: npz(x=np.zeros((0, 3)), y=np.zeros(0)), arrays, r"inputs must have one row per example, and at least one row, got shape \(0, 3\)"),
    "one number.npz": (lambda: npz(x=np.float64(3), y=np.float64(3)), arrays, r"at least one row, got shape \(\)"),
    "one target.npz": (lambda: npz(x=np.eye(2), y=np.float64(3)), arrays, "targets must have 2 rows, one per row of inputs, got a single value"),
    "bomb.csv.gz": (lambda: gzip.compress(bytes(110_000_000), 1), table, "bytes unpack to more than 100000000: unpack and inspect it"),
    "twice.csv": (lambda: b"a,a,y\n1,2,0\n3,4,1\n", table, "columns must have different names, but 'a' occurs twice"),
    "twice.tsv": (lambda: b"y\ta\ty\n1\t2\t0\n3\t4\t1\n", table, "'y' occurs twice"),
    "only names.csv": (lambda: b"a,y\n", table, "no training examples"),
    "nothing.csv": (lambda: b"", table, "cannot be read"),
    "utf-16.csv": (lambda: "a,y\n1,0\n".encode("utf-16"), table, "cannot be read"),
    "rows.xlsx": (lambda: b"PK", table, "a file must be .csv, .tsv or .parquet, got 'rows.xlsx'"),
    "ragged.csv": (lambda: b"a,y\n1,0\n1,2,3,4\n", table, "cannot be read"),
    "huge.png": (huge_picture, images, "0.png cannot be read as an image .*decompression bomb"),
    "16 bits.png": (lambda: picture(pixels=np.full((16, 16), 40_000, np.uint16)), images, r"0.png has pixels of more than 8 bits \(mode I;16"),
    "text.png": (lambda: b"a picture", images, "0.png cannot be read as an image"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [(n, c, p) for n, _, c, p in DAMAGED],
    ids=[f"{n} {i}" for n, i, *_ in DAMAGED],
)
def test_a_damaged_file_is_named(name, change, part, tmp_path):
    write, read = KINDS[name]
    data, file = write(), tmp_path / name
    file.write_bytes(data)
    if name not in ("picture.png", "picture.jpg"):
        read(file)()  # whole, it is read
    file.write_bytes(change(data, int(part * len(data))))
    shown = name if "picture" not in name else f"0{file.suffix}"
    with pytest.raises(ConfigurationError, match=rf"{shown}.*(cannot be read|is no \.npz)"):
        read(file)()


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_that_cannot_be_meant_is_refused(name, tmp_path):
    write, read, says = WHOLE[name]
    file = tmp_path / name
    file.write_bytes(write())
    with pytest.raises(ConfigurationError, match=says):
        read(file)()


# Data sets.


def frame(**columns):
    return lambda: Table(FRAME.assign(**columns), "y").setup()


def divided(partition=None, *, dataset=None, **options):
    if dataset is None:
        dataset = TensorDataset(torch.arange(12.0)[:, None], torch.arange(12) % 2)
    given = {"num_clients": 2, **options}

    def divide():
        data = FederatedDataModule(
            LoaderData(DataLoader(dataset)), partition=partition, seed=0, **given
        )
        return data.clients.num_examples

    return divide


class Mine(CIFAR100):
    """A class of a user, with another name than torchvision's."""


def batch_of(*labels):
    return torch.zeros(len(labels), 1, 8, 8), torch.tensor(labels)


SPACE = {"in_channels": 1, "image_size": 8, "seed": 0}
CELLS = {**SPACE, "channels": 4, "cells": 1}
SETS = {
    "two columns of a name": (lambda: Table(FRAME.rename(columns={"kind": "a"}), "y").setup(), "'a' occurs twice"),
    "no target": (lambda: Table(FRAME, "z").setup(), "has no column 'z': its columns are 'a', 'kind', 'y'"),
    "target as feature": (lambda: Table(FRAME, "y", features=["y"]).setup(), "none of them the target 'y'"),
    "a feature twice": (lambda: Table(FRAME, "y", features=["a", "a"]).setup(), "at least one column, all different"),
    "unknown feature": (lambda: Table(FRAME, "y", features=["b"]).setup(), "has no column 'b'"),
    "all ignored": (lambda: Table(FRAME, "y", ignore=["a", "kind"]).setup(), "at least one column.*got \\[\\]"),
    "a gap": (frame(a=[np.nan, *range(ROWS - 1)]), "has no finite number in 1 of 40 rows: set missing"),
    "infinite": (frame(a=[np.inf, *range(ROWS - 1)]), "has no finite number in 1 of 40 rows"),
    "a gap in the target": (frame(y=[None, *range(ROWS - 1)]), "have no finite target"),
    "times": (frame(a=pd.date_range("2020", periods=ROWS)), "column 'a' has times"),
    "names": (lambda: Table(pd.DataFrame({"a": [f"n{i}" for i in range(1200)], "y": 0}), "y").setup(), "1200 different values"),
    "many whole numbers": (lambda: Table(pd.DataFrame({"a": 0.5, "y": range(200)}), "y").setup(), "could be classes or quantities"),
    "other classes in the test": (lambda: Table(FRAME, "y", test=FRAME.assign(y=7)).setup(), "has the class 7, which no training example has"),
    "text for numbers in val": (lambda: Table(FRAME, "y", val=FRAME.assign(a="x")).setup(), "has numbers in data, but .* in val"),
    "a list": (lambda: Table([1, 2], "y").setup(), "data must be a pandas.DataFrame or the path of a file, got list"),
    "ignored in vain": (lambda: Table(FRAME, "y", ignore=["x"]).setup(), "has no column 'x'"),
    "no feature in the test": (lambda: Table(FRAME, "y", test=FRAME[["y"]]).setup(), "test has no column 'a'"),
    "a target that is missing": (lambda: Arrays(np.eye(3), [0.0, np.nan, 1.0]).setup(), "no finite target"),
    "nothing to train on": (lambda: Arrays(np.eye(2), [0, 1], test_fraction=0.99).setup(), "no training examples"),
    "no such .npz": (lambda: Arrays("x", "y", file="no.npz").setup(), "there is no file 'no.npz'"),
    "no file": (lambda: Table("no.csv", "y").setup(), "there is no file 'no.csv'"),
    "missing is nan": (lambda: Table(FRAME, "y", missing=float("nan")).setup(), "missing must be a finite number, got nan"),
    "numbers of text": (lambda: Arrays(["a", "b"], [0, 1]).setup(), "inputs must be an array of numbers"),
    "unequal lengths": (lambda: Arrays(np.eye(3), [0, 1]).setup(), "targets must have 3 rows, one per row of inputs, got 2"),
    "owners of others": (lambda: Arrays(np.eye(2), [0, 1], clients=["al"]).setup(), "clients must have 2 rows, one per row of inputs, got 1"),
    "names without a file": (lambda: Arrays("x", "y").setup(), "set file to an .npz"),
    "no such class": (lambda: Digits(classes=[99]).setup(), r"classes must be numbers from 0 to 9, got \[99\]"),
    "a class twice": (lambda: Digits(classes=[1, 1]), "classes must be at least one number, all different"),
    "large images": (lambda: Digits(image_size=100_000), "image_size must be from 1 to 16384 pixels, got 100000"),
    "large pictures": (lambda: ImageFolder("root", image_size=100_000), "image_size must be from 1 to 16384 pixels, got 100000"),
    "no folder": (lambda: ImageFolder("nowhere", image_size=8).setup(), "there is no folder nowhere/train"),
    "a subclass": (lambda: Mine("nowhere").setup(), "CIFAR100: the files under root='nowhere' are missing or damaged"),
    "twice federated": (lambda: FederatedDataModule(FederatedDataModule(Digits(), num_clients=2), num_clients=2), "source must be a data module whose examples have no clients yet"),
    "a class as source": (lambda: FederatedDataModule(Digits, num_clients=2), r"source must be a LightningDataModule, got the class Digits: write source=Digits\(…\)"),
    "a data set as source": (lambda: FederatedDataModule([1, 2], num_clients=2), "source must be a LightningDataModule"),
    "a torch data set as source": (lambda: FederatedDataModule(TensorDataset(torch.eye(4)), num_clients=2), r"source must be a LightningDataModule.*, got a TensorDataset: .*from_datasets"),
    "owners that are real numbers": (divided(NaturalPartition(np.linspace(0, 1, 12))), "must name owners, by text or whole number, .* real numbers such as 0.09"),

    "no owners of that name": (divided(NaturalPartition("writer")), "no attribute 'writer'"),
    "an owner too few": (divided(NaturalPartition([1, 2])), "12 examples, got 2 values"),
    "more clients than examples": (divided(IID(), num_clients=13), "at most the number of examples, 12, got 13"),
    "half a class": (lambda: LabelShards(classes_per_client=1.5), "classes_per_client must be a whole number, got 1.5"),
    "classes of real numbers": (divided(LabelShards(classes_per_client=1), labels=[n / 7 for n in range(12)]), "set data.bins"),
    "all held out": (divided(client_test_fraction=1.0), r"client_test_fraction must be in \[0, 1\), got 1"),
    "nothing left": (divided(client_val_fraction=0.5, client_test_fraction=0.5), "at most 0.9 together, got 0"),
    "one bin": (divided(bins=1), "bins must be at least 2, got 1"),


    "labels of no name": (divided(LabelShards(classes_per_client=1), labels="colour"), "no attribute 'colour'"),

    "an empty set": (divided(dataset=TensorDataset(torch.zeros(0, 1), torch.zeros(0))), "the source has no training examples: there is nothing to divide"),
    "a target of 99": (lambda: BackdoorSuccess(Trigger(target=99, size=1)).count(lambda x: torch.zeros(len(x), 10), batch_of(1)), "target must be a class from 0 to 9, as the module scores, got 99"),
    "a label too many in cells": (lambda: Supernet(NASBench201(), num_classes=5, **CELLS).check_batch({"train": batch_of(0, 9), "search": batch_of(0, 9)}), "num_classes is 5, but the data have the label 9"),
    "a label too many in one shot": (lambda: OneShot(named_space("resnet"), num_classes=5, **SPACE).check_batch(batch_of(0, 9)), "num_classes is 5, but the data have the label 9"),
    "no channels": (lambda: Supernet(NASBench201(), num_classes=5, **{**CELLS, "channels": 0}), "channels must be at least 1, got 0"),
    "a cohort without its size": (lambda: Federation(cohort=IID), r"cohort must be .*, got the class IID: write cohort=IID\(…\)"),
    "an object as cohort": (lambda: Federation(cohort=object()), "cohort must be .*, got an object of the class object"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_data_that_cannot_be_meant_is_refused(name):
    make, says = SETS[name]
    with pytest.raises(ConfigurationError, match=says):
        make()


# Arguments of every exported class of a family.

WRONG = {"a class": dict, "an object": object(), "bytes": b"x", "a complex number": 1j}


def arguments():
    for members in TABLE.values():
        for kind, options in members.items():
            if not kind.__module__.startswith("fl_lightning."):
                continue
            for parameter in inspect.signature(kind).parameters.values():
                hint = str(get_type_hints(kind.__init__).get(parameter.name, Any))
                given = options
                if issubclass(kind, torch.optim.Optimizer):
                    given = {"params": [torch.nn.Parameter(torch.zeros(1))], **options}
                for wrong in WRONG if hint != str(Any) else ():
                    if not (wrong == "a class" and "Callable" in hint):  # it is a function too
                        yield kind, given, parameter.name, wrong


ARGUMENTS = list(arguments())


def test_there_are_many():
    assert len(DAMAGED) + len(WHOLE) + len(SETS) > 100
    assert len(ARGUMENTS) > 300


@pytest.mark.parametrize(
    "kind", {kind: None for kind, *_ in ARGUMENTS}, ids=lambda kind: kind.__name__
)
def test_an_argument_of_another_kind_is_named(kind):
    accepted = []
    for _, options, name, wrong in filter(lambda row: row[0] is kind, ARGUMENTS):
        try:
            kind(**{**options, name: WRONG[wrong]})
        except ConfigurationError as error:
            told = str(error)
        else:
            told = "accepted"
        if not told.startswith(f"{name} must be "):
            accepted.append((name, wrong, told))
    assert not accepted

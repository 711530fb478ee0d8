"""Arrays, tables and data sets of Hugging Face: what goes in comes out, and wrong data is refused."""

import numpy as np
import pytest
import torch

from fl_lightning import ConfigurationError, FederatedDataModule
from fl_lightning.data import Arrays, HuggingFace, NaturalPartition, Table
from fl_lightning.data.columns import column_of, read_column
from fl_lightning.data.sources.rows import Targets, TensorRows


def ready(source):
    source.prepare_data()
    source.setup("fit")
    return source


def refused(make, *words):
    with pytest.raises(ConfigurationError) as caught:
        ready(make())
    for word in words:
        assert word in str(caught.value)


def all_rows(source):
    """Return inputs and targets of all three sets, in the order of the first input."""
    sets = source.train_set, source.val_set, source.test_set
    parts = [rows.gather(torch.arange(len(rows))) for rows in sets]
    inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
    order = inputs.flatten(1)[:, 0].argsort()
    return inputs[order], targets[order]


class TestRows:
    def test_a_selection_of_a_selection_keeps_columns_beside_their_rows(self):
        rows = TensorRows(
            [torch.arange(6)[:, None], torch.arange(6)], {"who": lambda: np.arange(6) * 10}
        )
        some = rows.select(torch.tensor([5, 3, 1])).select(torch.tensor([2, 0]))
        assert some["who"].tolist() == [10, 50]
        assert some.targets.tolist() == [1, 5]

    def test_one_example_is_a_row_of_a_batch(self):
        rows = TensorRows({"x": torch.eye(3), "labels": torch.arange(3)})
        assert rows[-1]["labels"] == 2
        assert torch.equal(rows[[0, 2]]["x"], torch.eye(3)[[0, 2]])
        with pytest.raises(IndexError):
            rows[3]

    def test_a_column_called_targets_does_not_hide_the_targets(self):
        rows = TensorRows(
            [torch.eye(2), torch.arange(2)], {"targets": lambda: np.array(["x", "y"])}
        )
        assert rows.column_names == []
        assert read_column(rows, None).tolist() == [0, 1]


class TestArrays:
    def test_every_example_is_in_one_set_as_it_was(self):
        inputs = np.arange(60, dtype=np.float64).reshape(20, 3)
        labels = np.arange(20) % 2
        source = ready(Arrays(inputs, labels, seed=3, batch_size=4))
        found, targets = all_rows(source)
        assert torch.equal(found, torch.from_numpy(inputs).float())
        assert targets.tolist() == labels.tolist()
        assert [len(rows) for rows in (source.train_set, source.val_set, source.test_set)] == [
            14,
            2,
            4,
        ]
        assert sorted(source.test_set.targets.tolist()) == [0, 0, 1, 1]  # of every class alike

    @pytest.mark.parametrize(
        ("values", "dtype", "num_classes"),
        [
            (["yes", "no"] * 5, torch.int64, 2),
            ([3, 7] * 5, torch.int64, 2),
            ([True, False] * 5, torch.int64, 2),
            ([0.5, 1.5] * 5, torch.float32, 0),
            (torch.arange(10) % 2, torch.int64, 2),
        ],
    )
    def test_targets_are_classes_or_numbers(self, values, dtype, num_classes):
        source = ready(Arrays(np.eye(10), values))
        assert (source.train_set.targets.dtype, source.num_classes) == (dtype, num_classes)

    def test_whole_numbers_of_many_values_are_not_guessed(self):
        prices = np.arange(300)
        source = ready(Arrays(np.ones((300, 1)), prices, target_type="number"))
        assert source.train_set.targets.dtype == torch.float32

    def test_targets_of_several_numbers_stay(self):
        masks = torch.arange(10 * 4).view(10, 2, 2)
        source = ready(
            Arrays(torch.zeros(10, 1, 2, 2), masks, seed=0, test_fraction=0, val_fraction=0)
        )
        assert torch.equal(source.train_set.targets, masks)
        assert source.test_dataloader() == []

    def test_an_npz_file_is_read_by_names(self, tmp_path):
        path = tmp_path / "all.npz"
        np.savez(path, x=np.eye(10), y=np.arange(10) % 2, who=np.repeat(["al", "bo"], 5))
        source = Arrays("x", "y", clients="who", file=str(path), seed=0)
        data = FederatedDataModule(source, partition=NaturalPartition("clients"))
        data.setup("fit")
        owners = data.train_dataset["clients"]
        assert len(data.clients) == 2
        for client, name in enumerate(["al", "bo"]):
            assert set(owners[data.clients[client].numpy()]) == {name}

    def test_clients_read_what_a_loader_reads(self):
        source = Arrays(np.arange(100.0)[:, None], np.arange(100) % 3, seed=0)
        data = FederatedDataModule(source, num_clients=4, seed=0)
        data.setup("fit")
        assert data.reads_by_index
        shard = data.clients[2]
        inputs, labels = data.train_batch(shard)
        assert torch.equal(inputs, source.train_set.gather(shard)[0])
        assert labels.tolist() == data.labels[shard.numpy()].tolist()


class TestTargets:
    def test_missing_values_never_become_a_class(self):
        for missing in (None, float("nan")):
            values = column_of(np.array(["a", missing, "b"], dtype=object))
            with pytest.raises(ConfigurationError, match="1 of 3 examples"):
                Targets.of(values, None, "x")
            with pytest.raises(ConfigurationError, match="1 of 3 examples"):
                Targets.of(column_of(["a", missing, "b"]), None, "x")


@pytest.fixture
def pandas():
    return pytest.importorskip("pandas")


@pytest.fixture
def flats(pandas):
    return pandas.DataFrame(
        {
            "area": [30.0, 50.0, 70.0, 90.0] * 5,
            "rooms": [1, 2, 3, 4] * 5,
            "view": ["sea", "yard"] * 10,
            "lift": [True, False, False, True] * 5,
            "city": ["Bari"] * 12 + ["Como"] * 8,
            "rent": np.arange(20) / 2,
        }
    )


class TestTable:
    def test_columns_become_the_features_by_hand(self, flats):
        source = ready(Table(flats, "rent", ignore=["city"], val_fraction=0, test_fraction=0))
        names = ("area", "rooms", "view=sea", "view=yard", "lift=False", "lift=True")
        assert source.feature_names == names
        assert source.num_features == 6
        features, rents = source.train_set.gather(torch.tensor([0, 1]))
        assert features.tolist() == [[30, 1, 1, 0, 0, 1], [50, 2, 0, 1, 1, 0]]
        assert rents.tolist() == [0.0, 0.5]

    def test_any_column_tells_whose_a_row_is(self, flats):
        source = Table(flats, "rent", features=["area"], seed=0)
        data = FederatedDataModule(source, partition=NaturalPartition("city"))
        data.setup("fit")
        cities = data.train_dataset["city"]
        assert [set(cities[shard.numpy()]) for shard in data.clients] == [{"Bari"}, {"Como"}]

    @pytest.mark.parametrize("kind", ["csv", "tsv", "csv.gz", "parquet"])
    def test_files_are_frames(self, flats, tmp_path, kind):
        path = tmp_path / f"flats.{kind}"
        if kind == "parquet":
            pytest.importorskip("pyarrow")
            flats.to_parquet(path)
        else:
            flats.to_csv(path, index=False, sep="\t" if kind == "tsv" else ",")
        one, other = (ready(Table(given, "rent", seed=0)) for given in (str(path), flats))
        assert all(map(torch.equal, all_rows(one), all_rows(other)))

    def test_categories_that_training_lacks_are_zero(self, flats, pandas):
        abroad = flats.assign(city="Nice").head(3)
        source = ready(Table(flats, "rent", features=["city"], test=abroad))
        assert source.test_set.gather(torch.arange(3))[0].tolist() == [[0.0, 0.0]] * 3
        assert len(source.train_set) + len(source.val_set) == 20

    def test_categories_of_pandas_are_strings(self, flats, pandas):
        views = pandas.CategoricalDtype(["yard", "sea", *map(str, range(1500))], ordered=True)
        one, other = (
            ready(Table(table, "rent", features=["view"], seed=0))
            for table in (flats, flats.astype({"view": views}))
        )
        assert other.feature_names == one.feature_names == ("view=sea", "view=yard")
        assert all(map(torch.equal, all_rows(one), all_rows(other)))

    def test_only_training_rows_limit_the_categories(self, flats, pandas):
        many = pandas.DataFrame({"city": [*map(str, range(1500)), "Como"], "rent": 0.5})
        times = pandas.DataFrame({"city": pandas.to_datetime(["2020-01-01"]), "rent": 0.5})
        source = ready(Table(flats, "rent", features=["city"], val=many, test=times))
        assert source.val_set.gather(torch.tensor([0, 1500]))[0].tolist() == [[0, 0], [0, 1]]
        assert source.test_set.gather(torch.tensor([0]))[0].tolist() == [[0, 0]]

    def test_missing_numbers_are_refused_or_replaced(self, flats, pandas):
        holes = flats.assign(area=[None, *flats["area"][1:]], view=[None, *flats["view"][1:]])
        refused(lambda: Table(holes, "rent"), "'area'", "1 of 20", "set missing")
        options = {"missing": -1.0, "val_fraction": 0, "test_fraction": 0}
        source = ready(Table(holes, "rent", features=["area", "view"], **options))
        assert source.feature_names[1] == "view=missing"
        assert source.train_set.gather(torch.tensor([0]))[0].tolist() == [[-1, 1, 0, 0]]


def words_to_numbers(*columns, max_length, **_):
    """Tokenize: the length of every word, up to three words, padded with 0."""
    texts = [" ".join(parts).split()[:max_length] for parts in zip(*columns, strict=True)]
    lengths = [[len(word) for word in text] for text in texts]
    padded = [text + [0] * (max_length - len(text)) for text in lengths]
    return {
        "input_ids": padded,
        "attention_mask": [[int(number > 0) for number in text] for text in padded],
    }


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


@pytest.fixture
def reviews(datasets):
    rows = {
        "text": ["so good", "bad", "a very good one", "no"] * 5,
        "other": ["x"] * 20,
        "label": [1, 0, 1, 0] * 5,
        "user": ["al", "bo"] * 10,
        "score": [0.5, 1.0, 2.0, 4.0] * 5,
    }
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "other": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["con", "pro", "none"]),
            "user": datasets.Value("string"),
            "score": datasets.Value("float32"),
        }
    )
    return datasets.Dataset.from_dict(rows, features=features)


class TestHuggingFace:
    def test_texts_are_dicts_as_long_as_the_longest(self, reviews):
        options = {"text": "text", "tokenizer": words_to_numbers, "max_length": 6}
        source = ready(HuggingFace(reviews, val_fraction=0, test_fraction=0, **options))
        batch = source.train_set.gather(torch.tensor([0, 2]))
        assert batch["input_ids"].tolist() == [[2, 4, 0, 0], [1, 4, 4, 3]]
        assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
        assert batch["labels"].tolist() == [1, 1]
        assert (source.class_names, source.num_classes) == (("con", "pro", "none"), 3)

    def test_class_labels_are_numbers_if_the_user_says_so(self, reviews):
        source = ready(HuggingFace(reviews, inputs=["score"], target_type="number"))
        assert (source.train_set.targets.dtype, source.num_classes) == (torch.float32, 0)

    def test_pairs_of_texts(self, reviews):
        options = {"text": ["other", "text"], "tokenizer": words_to_numbers, "test_fraction": 0}
        source = ready(HuggingFace(reviews, val_fraction=0, max_length=2, **options))
        assert source.train_set.gather(torch.tensor([1]))["input_ids"].tolist() == [[1, 3]]

    def test_a_column_divides(self, reviews):
        source = HuggingFace(reviews, text="text", tokenizer=words_to_numbers, seed=0)
        data = FederatedDataModule(source, partition=NaturalPartition("user"))
        data.setup("fit")
        users = data.train_dataset["user"]
        assert [set(users[shard.numpy()]) for shard in data.clients] == [{"al"}, {"bo"}]

    def test_numbers_and_real_targets(self, datasets):
        rows = datasets.Dataset.from_dict({"a": [1, 2], "b": [[3.0, 4.0]] * 2, "y": [0.5, 1.5]})
        source = HuggingFace(rows, "y", inputs=["a", "b"], val_fraction=0, test_fraction=0)
        inputs, targets = ready(source).train_set.gather(torch.tensor([1]))
        assert inputs.tolist() == [[2, 3, 4]]
        assert targets.tolist() == [1.5]
        assert source.num_classes == 0

    @pytest.mark.parametrize(("channels", "size"), [(1, None), (3, None), (3, 2)])
    def test_images_are_pixels_in_zero_to_one(self, datasets, channels, size):
        image = pytest.importorskip("PIL.Image")
        pictures = [image.fromarray(np.full((4, 4), 51 * k, np.uint8)) for k in range(6)]
        rows = datasets.Dataset.from_dict({"picture": pictures, "label": [0, 1] * 3})
        rows = rows.cast_column("picture", datasets.Image())
        options = {"image": "picture", "channels": channels, "image_size": size}
        source = ready(HuggingFace(rows, val_fraction=0, test_fraction=0, **options))
        images, labels = source.train_set.gather(torch.tensor([5, 1]))
        assert images.shape == (2, channels, size or 4, size or 4)
        torch.testing.assert_close(images[:, 0, 0, 0], torch.tensor([1.0, 0.2]))
        assert labels.tolist() == [1, 1]

    def test_a_stream_is_read_as_far_as_it_is_used(self, reviews, datasets, tmp_path):
        def stream():
            yield from reviews.select(range(5))  # datasets reads one ahead
            raise AssertionError("more was read")

        reviews.to_json(tmp_path / "reviews.jsonl")
        streams = datasets.IterableDataset.from_generator(stream, features=reviews.features)
        options = {"inputs": ["score"], "val_fraction": 0, "test_fraction": 0}
        expected = ready(HuggingFace(reviews.select(range(4)), **options)).train_set
        for given in (reviews, streams, str(tmp_path / "reviews.jsonl")):
            rows = ready(HuggingFace(given, max_examples=4, **options)).train_set
            assert len(rows) == 4
            everything = torch.arange(4)
            assert all(map(torch.equal, rows.gather(everything), expected.gather(everything)))
        refused(lambda: HuggingFace(streams, **options), "has no length: set max_examples")
        refused(lambda: HuggingFace(reviews, max_examples=0, **options), "at least 1, got 0")

    def test_the_usual_splits_are_found(self, reviews, datasets, tmp_path):
        parts = {
            "train": reviews,
            "validation": reviews.select(range(3)),
            "test": reviews.select([5]),
        }
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "kept"))
        source = ready(HuggingFace(str(tmp_path / "kept"), inputs=["score"]))
        sizes = [len(part) for part in (source.train_set, source.val_set, source.test_set)]
        assert sizes == [20, 3, 1]
        other = ready(HuggingFace(str(tmp_path / "kept"), inputs=["score"], test="validation"))
        assert [len(part) for part in (other.train_set, other.val_set, other.test_set)] == [
            18,
            2,
            3,
        ]

    def test_wrong_data_is_refused(self, reviews, datasets, monkeypatch):
        both = datasets.DatasetDict({"train": reviews, "test": reviews})
        refused(
            lambda: HuggingFace(both, inputs=["score"], train="fit"), "'fit'", "'train', 'test'"
        )
        refused(lambda: HuggingFace(both, inputs=["score"], val="test", test="test"), "different")
        refused(lambda: HuggingFace(reviews, "mood", inputs=["score"]), "'mood'", "'score'")
        refused(
            lambda: HuggingFace(reviews, inputs=["text"]), "'text' must have one number per example"
        )
        refused(lambda: HuggingFace(reviews, image="text"), "must have images, got")
        refused(lambda: HuggingFace(reviews, inputs=["score"], text="text"), "one of text, image")
        refused(lambda: HuggingFace(reviews, text="text"), "needs a tokenizer")
        refused(lambda: HuggingFace([1], inputs=["score"]), "got list")
        unknown = reviews.map(lambda row: {"label": -1})
        refused(
            lambda: HuggingFace(
                datasets.DatasetDict({"train": reviews, "test": unknown}), inputs=["score"]
            ),
            "test has the class",
            "-1",
        )

    def test_without_a_network_the_hub_is_refused_in_a_sentence(self, datasets, monkeypatch):
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        refused(
            lambda: HuggingFace("nobody/nothing_at_all", inputs=["x"]),
            "neither from the disk nor from the hub",
        )

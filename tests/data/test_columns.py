"""Labels and owners, wherever a data set has them: against the values that were put there."""

import json
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from toys import LoaderData

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.columns import Topics, read_column
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.partitions.label_shards import LabelShards
from fl_lightning.data.partitions.partition import NaturalPartition

X, Y = torch.arange(24.0).view(12, 2), torch.arange(12) % 5
WRITERS = ["bo", "al", "cy", "al"] * 3


class Pairs(Dataset):
    """Examples one by one, (x, y), without an attribute that holds the labels."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], int(Y[index])


class Table:
    """Columns and rows as the data sets of Hugging Face have them, with a format that wants images."""

    def __init__(self, columns, formatted=True):
        self._columns, self._formatted = columns, formatted
        self.column_names = list(columns)

    def with_format(self, kind):
        return Table(self._columns, formatted=kind is not None)

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            if self._formatted:
                raise KeyError("image")
            return self._columns[key]
        return {name: values[key] for name, values in self._columns.items()}


class Items(Dataset):
    """Whatever a function makes of an index."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.make(index)


class Row(Mapping):
    """A mapping that is no dict, as tokenizers return them."""

    def __init__(self, index):
        self._row = {"x": X[index], "label": Y[index]}

    def __getitem__(self, key):
        return self._row[key]

    def __iter__(self):
        return iter(self._row)

    def __len__(self):
        return len(self._row)


@dataclass
class Example:
    x: torch.Tensor
    label: int
    writer: str


Named = namedtuple("Named", ["x", "label", "writer"])


class TestStored:
    @pytest.mark.parametrize("of", [list, tuple, np.array, torch.tensor])
    def test_the_usual_names_are_found(self, of):
        for name in ("targets", "labels", "y", "target", "label"):
            dataset = Pairs()
            setattr(dataset, name, of(list(range(12))))
            assert read_column(dataset, None).tolist() == list(range(12))
            assert read_column(Pairs(), of(list(range(12)))).tolist() == list(range(12))

    def test_names_of_classes_are_no_labels(self):
        dataset = Pairs()
        dataset.labels = ["zero", "one", "two", "three", "four"]
        assert read_column(dataset, None).tolist() == Y.tolist()

    def test_the_last_tensor(self):
        assert read_column(TensorDataset(X, X, Y), None).tolist() == Y.tolist()

    def test_a_name_goes_first(self):
        dataset = Pairs()
        dataset.targets, dataset.writer = [0] * 12, WRITERS
        assert read_column(dataset, "writer").tolist() == WRITERS

    def test_a_column_of_a_table(self):
        table = Table({"image": ["…"] * 12, "label": Y.tolist(), "writer": WRITERS})
        assert read_column(table, None).tolist() == Y.tolist()
        assert read_column(table, "writer").tolist() == WRITERS


class TestWrapped:
    @pytest.mark.parametrize("indices", [[2, 0], torch.tensor([2, 0]), np.array([2, 0])])
    def test_subsets_of_subsets(self, indices):
        dataset = Pairs()
        dataset.writer = np.arange(12) * 10
        nested = Subset(Subset(dataset, [5, 6, 7]), indices)
        assert read_column(nested, "writer").tolist() == [70, 50]
        assert read_column(nested, None).tolist() == Y[[7, 5]].tolist()

    def test_subsets_of_concatenated_subsets(self):
        one, other = TensorDataset(X, Y), Table({"label": [9, 8, 7]})
        both = ConcatDataset([Subset(one, [11, 3]), other])
        assert read_column(both, None).tolist() == [1, 3, 9, 8, 7]
        assert read_column(Subset(Subset(both, [4, 2, 0]), [2, 1]), None).tolist() == [1, 9]

    def test_a_subset_may_have_labels_of_its_own(self):
        subset = Subset(TensorDataset(X, Y), [3, 1])
        subset.targets = [30, 10]
        assert read_column(subset, None).tolist() == [30, 10]

    def test_what_a_subset_hands_on_of_the_whole_set_is_not_its_own(self):
        class Forwarding(Subset):
            def __getattr__(self, name):
                return getattr(self.dataset, name)

        dataset = Pairs()
        dataset.targets = list(range(12))
        assert read_column(Forwarding(dataset, [3, 1]), None).tolist() == [3, 1]

    def test_only_items_of_the_subset_are_read(self):
        seen = []
        items = Items(lambda i: seen.append(i) or (X[i], i))
        assert read_column(Subset(items, [4, 2]), None).tolist() == [4, 2]
        assert seen == [4, 2]

    def test_refuses_parts_of_different_kinds(self):
        both = ConcatDataset([TensorDataset(X, Y), Table({"label": ["cat"]})])
        with pytest.raises(ConfigurationError, match="ConcatDataset have different kinds"):
            read_column(both, None)


class TestItems:
    @pytest.mark.parametrize(
        "make",
        [
            lambda i: {"x": X[i], "label": Y[i], "writer": WRITERS[i]},
            lambda i: Example(X[i], int(Y[i]), WRITERS[i]),
            lambda i: Named(X[i], int(Y[i]), WRITERS[i]),
        ],
        ids=["dict", "dataclass", "named tuple"],
    )
    @pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(12))])
    def test_a_key(self, make, wrap):
        dataset = wrap(Items(make))
        assert read_column(dataset, None).tolist() == Y.tolist()
        assert read_column(dataset, "writer").tolist() == WRITERS

    def test_the_second_part(self):
        assert read_column(Pairs(), None).tolist() == Y.tolist()
        assert read_column([("a", "cat"), ("b", "ant")], None).tolist() == ["cat", "ant"]

    def test_rows(self):
        rows = read_column(Items(lambda i: (X[i], torch.eye(3)[i % 3])), None)
        assert rows.tolist() == (np.eye(3)[np.arange(12) % 3]).tolist()


class TestGiven:
    def test_a_function_by_itself_or_its_import_path(self):
        dataset = Subset(Pairs(), [1, 2])
        assert read_column(dataset, lambda d: [len(d), 7]).tolist() == [2, 7]
        assert read_column(Pairs(), "toys.reversed_labels").tolist() == [*range(11, -1, -1)]

    @pytest.mark.parametrize(
        "name", ["toys.nothing", "no_such_module.labels", "..labels", "labels."]
    )
    def test_refuses_an_import_path_of_nothing(self, name):
        with pytest.raises(ConfigurationError, match="Pairs has no attribute"):
            read_column(Pairs(), name)

    @pytest.mark.parametrize("column", [[1, 2], lambda d: [1, 2]])
    def test_refuses_another_number_of_values(self, column):
        with pytest.raises(ConfigurationError, match=r"data.labels: Pairs has 12 examples, got 2"):
            read_column(Pairs(), column)


class TestRefuses:
    def test_a_name_that_is_not_there(self):
        with pytest.raises(
            ConfigurationError, match=r"partition.attribute: Pairs has no attribute 'w"
        ):
            read_column(Pairs(), "writer", "partition.attribute")

    def test_and_says_what_is_there(self):
        with pytest.raises(
            ConfigurationError, match=r"\(there are 'image', 'fine'\): set it to the"
        ):
            read_column(Table({"image": [1], "fine": [2]}), None)
        with pytest.raises(ConfigurationError, match=r"\(there are 'x', 'label'\): give another"):
            read_column(Items(Row), "writer")

    @pytest.mark.parametrize(
        "item",
        [
            torch.tensor(1.0),
            {"x": 1, "z": 2},
            (1,),
            (1, None),
            (1, torch.zeros(3, 3)),
            (1, {"boxes": 2}),
        ],
        ids=["number", "dict", "one part", "None", "a mask", "boxes"],
    )
    def test_items_without_a_label(self, item):
        with pytest.raises(
            ConfigurationError,
            match=r"no labels were found in Items|numbers or strings, one per|12 of 12 values are missing",
        ):
            read_column(Items(lambda _: item), None)

    def test_labels_of_different_lengths(self):
        with pytest.raises(ConfigurationError, match="values must all have the same shape"):
            read_column(Items(lambda i: (X[i], torch.ones(i))), None)

    @pytest.mark.parametrize("missing", [None, float("nan"), np.datetime64("NaT"), "pandas"])
    def test_missing_values(self, missing):
        if missing == "pandas":
            missing = pytest.importorskip("pandas").NA
        names = np.array(["bo", missing, missing] * 4, dtype=object)
        # "nan" would be an owner like any other
        refusal = r"^data\.labels: 8 of 12 values are missing"
        for values in (names, list(names), tuple(names), lambda dataset: names):
            with pytest.raises(ConfigurationError, match=refusal):
                read_column(Pairs(), values)
        with pytest.raises(ConfigurationError, match=refusal):
            read_column(Table({"who": list(names)}), "who")
        with pytest.raises(ConfigurationError, match=refusal):
            read_column(Items(lambda i: {"who": names[i]}), "who")


class TestInAFederation:
    """By hand: who owns what, through whatever the labels and owners are found in."""

    def owned(self, dataset, partition, **options):
        options = {"num_clients": 3, "seed": 0} | options
        data = FederatedDataModule(LoaderData(DataLoader(dataset)), partition=partition, **options)
        return sorted(sorted(shard.tolist()) for shard in data.clients)

    @pytest.mark.parametrize(
        "column",
        ["writer", lambda dataset: WRITERS, WRITERS, np.array(WRITERS)],
        ids=["name", "function", "list", "array"],
    )
    def test_by_owner_and_by_label(self, column):
        table = Table({"image": [0] * 12, "label": Y.tolist(), "writer": WRITERS})
        wanted = [[0, 4, 8], [1, 3, 5, 7, 9, 11], [2, 6, 10]]
        natural = NaturalPartition(attribute=column)
        assert self.owned(table, natural, num_clients=None) == wanted
        assert self.owned(table, LabelShards(classes_per_client=1), labels=column) == wanted

    @pytest.mark.parametrize(
        "owners", [["bo", None] * 6, np.array(["2026-01-01", "NaT"] * 6, "M8[D]"), [1, np.nan] * 6]
    )
    def test_a_missing_owner_is_no_client(self, owners):
        with pytest.raises(ConfigurationError, match=r"attribute: 6 of 12 values are missing"):
            self.owned(Pairs(), NaturalPartition(owners), num_clients=None)

    def test_owners_through_subsets_of_concatenated_sets(self):
        both = ConcatDataset([Table({"writer": ["bo", "al"]}), Table({"writer": ["al", "cy"]})])
        natural = NaturalPartition(attribute="writer")
        assert self.owned(Subset(both, [3, 1, 2]), natural, num_clients=None) == [[0], [1, 2]]


def test_the_command_line_takes_and_keeps_them(capsys):
    from fl_lightning.cli import main

    by = {"attribute": "toys.reversed_labels"}
    owner = {"class_path": "fl_lightning.data.NaturalPartition", "init_args": by}
    data = ["fit", "--config", str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")]
    data += ["--data.init_args.labels", "[1, 0]", "--data.init_args.partition", json.dumps(owner)]
    data += ["--data.init_args.bins", "4", "--data.init_args.ignore_sampler", "true"]
    with pytest.raises(SystemExit):
        main([*data, "--print_config"])
    options = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
    assert (options["labels"], options["bins"], options["ignore_sampler"]) == ([1, 0], 4, True)
    assert options["partition"] == owner


class TestTopics:
    WORDS = (
        ("sea", "boat", "sail", "wave"),
        ("oven", "bread", "flour", "salt"),
        ("goal", "ball", "team", "cup"),
    )

    def texts(self):
        """Return sixty texts of three topics in turn, each of three words of its topic."""
        draw = np.random.default_rng(0)
        return [" ".join(draw.permutation(self.WORDS[number % 3])[:3]) for number in range(60)]

    def test_planted_topics_are_found_and_are_a_function_of_the_seed(self):
        data = Table({"text": self.texts()})
        found = Topics("text", 3, seed=1)(data)
        assert [len(set(found[topic::3])) for topic in range(3)] == [1, 1, 1]
        assert set(found) == {0, 1, 2}
        assert np.array_equal(found, Topics("text", 3, seed=1)(data))

    def test_every_text_is_of_the_topic_with_the_nearest_mean(self):
        texts = self.texts()
        found = Topics("text", 4)(Table({"text": texts}))
        words = sorted(set(" ".join(texts).split()))
        counts = np.array([[text.split().count(word) for word in words] for text in texts])
        frequency = (counts > 0).sum(axis=0)
        logs = np.log(counts, out=np.zeros(counts.shape), where=counts > 0)
        vectors = (counts > 0) * (1 + logs) * (1 + np.log(61 / (1 + frequency)))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        means = np.stack([vectors[found == topic].mean(axis=0) for topic in range(4)])
        distances = np.square(vectors[:, None] - means).sum(axis=2)
        np.testing.assert_allclose(distances[range(60), found], distances.min(axis=1), atol=1e-9)

    @pytest.mark.parametrize("how", ["owners", "labels"])
    def test_clients_are_topics_as_owners_and_mixes_of_topics_as_labels(self, how):
        rows = [{"text": text, "x": float(n)} for n, text in enumerate(self.texts())]
        topics = Topics("text", 3)
        options = {"partition": NaturalPartition(topics)}
        if how == "labels":
            rule = LabelShards(classes_per_client=2)
            options = {"labels": topics, "partition": rule, "num_clients": 6}
        data = FederatedDataModule(LoaderData(DataLoader(rows, batch_size=4)), **options, seed=0)
        mixes = [{int(index) % 3 for index in shard} for shard in data.clients]
        assert [len(mix) for mix in mixes] == ([1] * 3 if how == "owners" else [2] * 6)

    @pytest.mark.parametrize(
        ("texts", "number", "message"),
        [
            (["a b", "c d"], 1, "num_topics must be at least 2"),
            (["sea boat", "sail"], 3, "no 3 topics can be found in the 2 texts of 'text'"),
            (["?", "!", "1"], 2, "no 2 topics can be found"),
        ],
    )
    def test_the_impossible_is_refused(self, texts, number, message):
        with pytest.raises(ConfigurationError, match=message):
            Topics("text", number)(Table({"text": texts}))

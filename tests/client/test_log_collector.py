"""`self.log` while clients train: reductions, names, and no trace afterwards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.client.log_collector import LogCollector
from fl_lightning.core.errors import ConfigurationError

steps = st.lists(
    st.tuples(st.floats(-100, 100, width=32), st.integers(1, 64)), min_size=1, max_size=9
)


def collected(entries, **options):
    collector = LogCollector()
    for value, size in entries:
        collector.batch_size = size
        collector.log("x", value, **options)
    return collector.collect()


@given(entries=steps)
def test_a_mean_is_weighted_by_batch_size(entries):
    expected = sum(v * n for v, n in entries) / sum(n for _, n in entries)
    assert float(collected(entries)["x"]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        *((reduce_fx, 3.125) for reduce_fx in ("mean", "avg", torch.mean)),
        *((reduce_fx, 7.0) for reduce_fx in ("sum", sum, torch.sum)),
        *((reduce_fx, 1.0) for reduce_fx in ("min", min, torch.min)),
        *((reduce_fx, 4.0) for reduce_fx in ("max", max, torch.max)),
    ],
)
def test_reductions_by_hand(reduce_fx, expected):
    for of in (float, torch.tensor):
        found = collected([(of(1.0), 1), (of(4.0), 5), (of(2.0), 2)], reduce_fx=reduce_fx)["x"]
        assert found.shape == ()
        assert float(found) == expected


def test_a_batch_size_given_to_log_counts():
    collector = LogCollector()
    collector.batch_size = 100
    collector.log("x", 1.0, batch_size=1)
    collector.log("x", 5.0, batch_size=3)
    per_example = torch.tensor(4 / 200)
    assert collector.collect() == {"x": torch.tensor(4.0), "x per example": per_example}


def test_values_are_detached_and_half_precision_is_widened():
    collector = LogCollector()
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    for _ in range(300):  # more than bfloat16 can count
        collector.log("x", weight * 1, reduce_fx="sum")
    found = collector.collect()["x"]
    assert (found.dtype, found.requires_grad, float(found)) == (torch.float32, False, 300.0)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "x"),
        ({"on_step": True}, "x"),
        ({"on_step": False, "on_epoch": True}, "x"),
        ({"on_step": True, "on_epoch": True}, "x_epoch"),
    ],
)
def test_names_are_lightnings_and_each_has_its_own_weights(options, name):
    collector = LogCollector()
    for size, value in ((1, 1.0), (3, 5.0)):
        collector.batch_size = size
        collector.log("x", value, prog_bar=True, **options)
    collector.log("seldom", 7.0)
    assert collector.prog_bar == {name}
    assert collector.collect() == {name: torch.tensor(4.0), "seldom": torch.tensor(7.0)}


@pytest.mark.parametrize("reduce_fx", ["median", torch.median, lambda values: values[0], None])
def test_another_reduction_is_refused(reduce_fx):
    with pytest.raises(ConfigurationError, match=r"self\.log\('x', .* must be one of"):
        LogCollector().log("x", 1.0, reduce_fx=reduce_fx)


def test_every_client_starts_anew():
    collector = LogCollector()
    collector.log("x", 1.0)
    assert collector.collect() == {"x": torch.tensor(1.0)}
    assert collector.collect() == {}
    collector.log("x", 5.0)
    collector.discard()
    collector.log("x", 3.0)
    assert collector.collect() == {"x": torch.tensor(3.0)}


class TestListening:
    class Logging(LightningModule):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(3, average="micro")

    def test_to_log_and_log_dict(self):
        module, collector = self.Logging(), LogCollector()
        collector.batch_size = 2
        with collector.listening_to(module):
            module.log("x", torch.tensor(1.0), on_step=True, on_epoch=True)
            module.log_dict({"y": 2.0, "z": 3.0}, prog_bar=True)
        found = {name: float(value) for name, value in collector.collect().items()}
        assert found == {"x_epoch": 1.0, "y": 2.0, "z": 3.0}
        assert collector.prog_bar == {"y", "z"}

    def test_ends_with_the_block_or_with_an_exception(self):
        module = self.Logging()
        original = module.log
        with pytest.raises(ConfigurationError), LogCollector().listening_to(module):
            module.log("x", 1.0, reduce_fx="median")
        assert module.log == original
        assert "log" not in vars(module)


class TestMetricObjects:
    def test_are_pooled_over_clients_and_reset(self):
        module, collector = TestListening.Logging(), LogCollector()
        for predicted, true in (([0, 1, 2], [0, 1, 1]), ([2], [0])):  # two clients
            module.accuracy(torch.tensor(predicted), torch.tensor(true))
            collector.log("accuracy", module.accuracy, on_step=True, on_epoch=True)
            assert collector.collect() == {}
        assert collector.collect_metrics() == {"accuracy_epoch": 0.5}
        assert module.accuracy.tp.sum() == 0
        assert collector.collect_metrics() == {}

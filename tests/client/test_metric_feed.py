"""torchmetrics objects in slots are given what they would be given in sequence."""

import pytest
import torch
import torchmetrics
from torch import nn

from fl_lightning.engines.functional import CannotStack
from fl_lightning.engines.functional.metrics import GivenStep, MetricFeed, StandIns

LOGITS = torch.randn(2, 4, 1, 3, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 1]]).unsqueeze(2)
VALID = torch.tensor([[True, True, True, False], [True, False, False, False]])


def feed_of(metric, call, batch_size=4):
    module = nn.ModuleDict({"metric": metric})
    stand_ins = StandIns(module)
    seen = []
    with stand_ins.in_place():
        for count in (batch_size, 1):
            calls = stand_ins.listen()
            call(module["metric"], torch.zeros(count, 3), torch.zeros(count, dtype=torch.long))
            seen.append(calls)
    return MetricFeed(*seen, batch_size)


CLASSES = {"task": "multiclass", "num_classes": 3}
METRICS = {
    "macro accuracy": lambda: torchmetrics.Accuracy(**CLASSES, average="macro"),
    "micro accuracy": lambda: torchmetrics.Accuracy(**CLASSES, average="micro"),
    "area under the curve": lambda: torchmetrics.AUROC(**CLASSES),
    "confusions": lambda: torchmetrics.ConfusionMatrix(**CLASSES),
}


@pytest.mark.parametrize("name", METRICS)
def test_only_examples_that_count_are_counted(name):
    found, expected = METRICS[name](), METRICS[name]()
    step = GivenStep([LOGITS, LABELS], VALID)
    feed_of(found, lambda metric, logits, labels: metric(logits, target=labels)).feed([step, step])
    for _ in range(2):
        expected.update(LOGITS[0, :3, 0], LABELS[0, :3, 0])
        expected.update(LOGITS[1, :1, 0], LABELS[1, :1, 0])
    torch.testing.assert_close(found.compute(), expected.compute())


@pytest.mark.parametrize("window", [False, True])
def test_a_mean_over_the_batch_is_that_of_the_examples_that_count(window):
    found = torchmetrics.MeanMetric()
    if window:  # holds no states that add up
        found = torchmetrics.wrappers.Running(found, window=5)
    losses = torch.arange(8.0).view(2, 4)
    feed = feed_of(found, lambda metric, logits, _: metric.update(logits.mean()))
    feed.feed([GivenStep([losses], VALID)])
    assert float(found.compute()) == pytest.approx((1 + 4) / 2)  # of 0, 1, 2 and of 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, x, y: m.update(x.mean(), weight=len(x)), "depend on the size of the batch"),
        (lambda m, x, y: m.update(x.mean(0)), r"a tensor of shape \(3,\)"),
        (lambda m, x, y: m.compute(), "training_step uses compute of MeanMetric 'metric'"),
        (lambda m, x, y: [m.update(x) for _ in x], "which metrics training_step updates"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(call, words):
    with pytest.raises(CannotStack, match=words):
        feed_of(torchmetrics.MeanMetric(), call)

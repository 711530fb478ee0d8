"""Robust rules against other implementations, on fresh random rounds: extra ``oracles``.

byzfl's Krum and Multi-Krum sum over n - f - 1 neighbours, the paper's and ours over n - f - 2: its
answer for f is ours for f - 1, but for the number that Multi-Krum keeps. Its geometric median needs a
small ν and many steps. Flower trims a fraction and weighs Multi-Krum by examples.
"""

import warnings

import numpy as np
import pytest
import torch
from rounds_of_updates import aggregate
from scipy.optimize import minimize

from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.means.fair_means import QFedAvg
from fl_lightning.server.robust.krum import Bulyan, Krum, MultiKrum
from fl_lightning.server.robust.reweighted import CentredClipping, GeometricMedian
from fl_lightning.server.robust.rule import Median, NearestNeighbourMixing, TrimmedMean

SHAPES = [(11, 5, 2), (13, 30, 2), (16, 3, 3)]


def round_of(shape, seed=0):
    count, size, f = shape
    generator = np.random.default_rng([seed, *shape])
    rows = generator.standard_normal((count, size))
    rows[:f] += 5
    return rows, f


@pytest.mark.parametrize("shape", SHAPES)
def test_scipys_least_sum_of_distances(shape):
    rows, _ = round_of(shape)
    best = minimize(
        lambda z: np.linalg.norm(rows - z, axis=1).sum(), np.median(rows, 0), options={"gtol": 1e-9}
    )
    np.testing.assert_allclose(aggregate(GeometricMedian(), rows), best.x, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_byzfls_rules(shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        byzfl = pytest.importorskip("byzfl")
    rows, f = round_of(shape)
    pairs = [
        (Median(), byzfl.Median()),
        (TrimmedMean(f), byzfl.TrMean(f)),
        (Krum(f - 1), byzfl.Krum(f)),
        (MultiKrum(f - 1, num_kept=len(rows) - f), byzfl.MultiKrum(f)),
        (GeometricMedian(), byzfl.GeometricMedian(nu=1e-6, T=2000)),
        (CentredClipping(1.5, 4), byzfl.CenteredClipping(L=4, tau=1.5)),
    ]
    for rule, theirs in pairs:
        np.testing.assert_allclose(
            aggregate(rule, rows), theirs(rows), atol=1e-6, err_msg=str(rule)
        )
    mixed = byzfl.TrMean(f)(byzfl.NNM(f)(rows))
    np.testing.assert_allclose(
        aggregate(NearestNeighbourMixing(TrimmedMean(f), f), rows), mixed, atol=1e-6
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_flowers_rules(shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flower = pytest.importorskip("flwr.server.strategy.aggregate")
    rows, f = round_of(shape)
    results = [([row], 10) for row in rows]
    pairs = [
        (Median(), flower.aggregate_median(results)),
        (Krum(f), flower.aggregate_krum(results, f, 0)),
        (MultiKrum(f, num_kept=4), flower.aggregate_krum(results, f, 4)),
        (TrimmedMean(f), flower.aggregate_trimmed_avg(results, (f + 0.5) / len(rows))),
    ]
    if len(rows) >= 4 * f + 3:
        pairs.append(
            (Bulyan(f), flower.aggregate_bulyan(results, f, flower.aggregate_krum, to_keep=0))
        )
    for rule, [theirs] in pairs:
        np.testing.assert_allclose(aggregate(rule, rows), theirs, atol=1e-6, err_msg=str(rule))


def test_flowers_q_fedavg():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flower = pytest.importorskip("flwr.server.strategy.aggregate")
    rows, _ = round_of((5, 4, 0))
    losses, q, lr = np.array([0.5, 1.0, 2.0, 0.1, 3.0]), 1.5, 0.2
    steps = rows / lr
    weighted = [[loss**q * step] for loss, step in zip(losses, steps, strict=True)]
    curvatures = q * losses ** (q - 1) * (steps**2).sum(1) + losses**q / lr
    [theirs] = flower.aggregate_qffl([np.zeros(4)], weighted, list(curvatures))
    ours = QFedAvg(q, lr)
    ours.open(torch.empty(4, dtype=torch.float64))
    for client, (row, loss) in enumerate(zip(rows, losses, strict=True)):
        metrics = {"train/loss": torch.tensor(loss)}
        ours.add(ClientUpdate(client, torch.tensor(row), torch.empty(0), 1, 1, metrics))
    np.testing.assert_allclose(ours.close(), -theirs, rtol=1e-6)

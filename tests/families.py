"""Every exported member of every family, a row each; a member without a row fails a test.

A row is a class and small arguments. Families are found by their bases: by descent from a class, by
the methods of a protocol. What a test asks of a member it learns from what its base says.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import pkgutil
from importlib import import_module

import pytest
import torch
from torch.optim import Optimizer

import fl_lightning as fl
from fl_lightning import client, data, server, sparsity, updates
from fl_lightning.client import Correction, Speeds
from fl_lightning.client.personal import Personalisation
from fl_lightning.data import Availability, Cohort, Partition, Poison
from fl_lightning.privacy.mechanism import Budgeted
from fl_lightning.server import Aggregator, Forgery, Staleness
from fl_lightning.server.staleness import AsyncRule
from fl_lightning.sparsity import HeadFit, Rule, Sensitivity
from fl_lightning.updates.transform import UpdateStep

for extra in ("cryptography", "tenseal"):
    pytest.importorskip(extra, reason="means of hidden updates are members as well")
secure = fl.secure

FAMILIES = {
    "aggregator": Aggregator,
    "correction": Correction,
    "personalisation": Personalisation,
    "transform": UpdateStep,
    "cohort": Cohort,
    "partition": Partition,
    "privacy": Budgeted,
    "optimizer": Optimizer,
    "sensitivity": Sensitivity,
    "order of entries": Rule,
    "fit of a head": HeadFit,
    "availability": Availability,
    "speeds": Speeds,
    "staleness": Staleness,
    "asynchrony": AsyncRule,
    "forgery": Forgery,
    "poison": Poison,
}
NOISE = {"clip_norm": 1.0, "noise_multiplier": 2.0}
TABLE = {
    "aggregator": {
        fl.Mean: {},
        fl.NormalisedMean: {},
        fl.OverlapMean: {},
        server.AFL: {"step": 0.2},
        server.ClusterFedAvg: {"num_clusters": 2},
        server.FLoRA: {"ranks": [2, 4]},
        server.FedExLoRA: {},
        server.FlexLoRA: {"ranks": [2, 4]},
        server.HetLoRA: {"ranks": [2, 4], "prune": 0.5},
        server.Bucketing: {"rule": server.TrimmedMean(1), "seed": 3},
        server.Bulyan: {"num_attackers": 1},
        server.CentredClipping: {"radius": 0.5, "num_iterations": 2},
        server.FLTrust: {"trusted_client": 4},
        server.GeometricMedian: {},
        server.Krum: {"num_attackers": 2},
        server.Median: {"memory_gb": 1e-7},  # most of it in a file
        server.MultiKrum: {"num_attackers": 2},
        server.NearestNeighbourMixing: {"rule": server.Median(), "num_attackers": 2},
        server.NormBounding: {},
        server.TrimmedMean: {"num_attackers": 2},
        server.QFedAvg: {"q": 0.5, "local_lr": 0.1},
        server.TiltedMean: {"tilt": 0.5},
        secure.EncryptedMean: {"fraction": 0.5},
        secure.SecureMean: {"clip": 4.0, "levels": 1 << 20},
    },
    "correction": {
        fl.FedDyn: {"alpha": 0.1},
        fl.FedLC: {"tau": 0.5},
        fl.FedProx: {"mu": 0.1},
        fl.Moon: {"mu": 0.5},
        fl.Scaffold: {},
    },
    "personalisation": {
        fl.APFL: {},
        fl.Ditto: {"pull": 0.5},
        fl.FineTuned: {"local_steps": 2},
        fl.Personal: {"parameters": ["net.4.*"]},
    },
    "transform": {
        updates.Affine: {"bits": 4, "block": 8},
        updates.Cast: {},
        updates.Chain: {"transforms": (updates.TopK(0.5), updates.Sign())},
        updates.ErrorFeedback: {"transforms": (updates.TopK(0.5),)},
        updates.PowerSGD: {"rank": 1},
        updates.QSGD: {"bits": 4},
        updates.RandomK: {"fraction": 0.5},
        updates.Sign: {"block": "tensor"},
        updates.TopK: {"fraction": 0.3},
    },
    "cohort": {
        fl.AllClients: {},
        fl.PoissonCohort: {"fraction": 0.4},
        fl.UniformCohort: {"size": 4},
        data.AvailableCohort: {"sampler": fl.UniformCohort(size=4), "availability": data.Diurnal()},
        data.ByLossCohort: {"size": 4, "losses": "fresh"},
        data.BySizeCohort: {"size": 4},
        data.LeastRecentCohort: {"size": 4},
        data.OortCohort: {"size": 4},
        data.PowerOfChoiceCohort: {"size": 4, "num_candidates": 8},
        data.RoundRobinCohort: {"size": 4},
    },
    "partition": {
        data.DirichletPerClass: {"alpha": 1.0},
        data.DirichletPerClient: {"alpha": 0.5},
        data.DirichletSizes: {"alpha": 0.5},
        data.IID: {},
        data.LabelShards: {"classes_per_client": 2},
        data.McMahanShards: {"shards_per_client": 2},
        data.NaturalPartition: {"attribute": "writer"},
        data.PowerLawSizes: {"exponent": 1.2},
    },
    "privacy": {
        fl.BandedMatrixDP: {**NOISE, "bands": 2},
        fl.CentralDP: {**NOISE, "accountant": "rdp"},
        fl.DistributedDP: NOISE,
        fl.ExampleDP: {**NOISE, "accountant": "rdp"},
        fl.LocalDP: NOISE,
    },
    "optimizer": {
        fl.SparseAdamW: {"lr": 0.1},
        fl.SparseSGDM: {"lr": 0.1, "momentum": 0.9},
        server.FedAdagrad: {},
        server.FedAdam: {},
        server.FedLion: {},
        server.FedYogi: {},
    },
    "sensitivity": {
        sparsity.EmpiricalFisher: {},
        sparsity.ExactFisher: {},
        sparsity.SampledFisher: {"num_samples": 2},
        sparsity.SquaredMeanGradient: {},
    },
    "order of entries": {
        sparsity.HighestMagnitude: {},
        sparsity.LeastSensitive: {},
        sparsity.LowestMagnitude: {},
        sparsity.MostSensitive: {},
        sparsity.RandomEntries: {},
    },
    "fit of a head": {
        sparsity.LinearHead: {},
        sparsity.RidgeHead: {},
    },
    "availability": {
        data.Diurnal: {"spread": 0.5},
        data.Stretches: {"fraction": 0.4, "length": 3},
    },
    "speeds": {
        client.GivenSpeeds: {"seconds": [1.0, 2.0, 4.0]},
        client.LogNormalSpeeds: {},
        client.SpeedTiers: {"seconds": [1.0, 3.0], "shares": [2.0, 1.0]},
    },
    "staleness": {
        server.HingeStaleness: {"grace": 2},
        server.PolynomialStaleness: {},
    },
    "asynchrony": {
        server.FedAsync: {"concurrency": 3},
        server.FedBuff: {"concurrency": 3, "buffer_size": 2},
    },
    "forgery": {
        server.ALIE: {},
        server.GaussianNoise: {},
        server.InnerProductManipulation: {},
        server.MinMax: {},
        server.Scaling: {},
        server.SignFlip: {},
    },
    "poison": {
        data.LabelFlip: {"num_classes": 3},
        data.Trigger: {"target": 1, "size": 1},
    },
}
ROWS = [(family, cls) for family, rows in TABLE.items() for cls in rows]


def made(cls, **others):
    """Return a new member from its row, with other options where they are given."""
    [row] = (rows[cls] for rows in TABLE.values() if cls in rows)
    if issubclass(cls, Optimizer):
        others = {"params": [torch.nn.Parameter(torch.linspace(-1, 1, 6))], **others}
    return cls(**row | others)


def of(*families):
    """Parametrise a test by the members of some families."""
    rows = [cls for family, cls in ROWS if family in families]
    return pytest.mark.parametrize("cls", rows, ids=lambda cls: cls.__name__)


def every_member():
    """Parametrise a test by all members."""
    return of(*FAMILIES)


def exported():
    """Return all classes that a package of ours exports, by themselves."""
    packages = [fl]
    for found in pkgutil.walk_packages(fl.__path__, "fl_lightning."):
        if found.ispkg:
            packages.append(import_module(found.name))
    things = [
        getattr(package, name) for package in packages for name in getattr(package, "__all__", ())
    ]
    return {thing for thing in things if inspect.isclass(thing)}


def is_member(cls, base):
    """Tell whether a class is a concrete one of a family."""
    if inspect.isabstract(cls) or is_protocol(cls) or cls is base:
        return False
    if not is_protocol(base):
        return issubclass(cls, base)
    parts = {name: part for one in base.__mro__ if is_protocol(one) for name, part in public(one)}
    return all(answers(cls, name, part) for name, part in parts.items())


def is_protocol(cls):
    return getattr(cls, "_is_protocol", False)


def public(protocol):
    """Yield the methods and properties that a protocol asks for."""
    for name, part in vars(protocol).items():
        is_asked_for = name == "__call__" or not name.startswith("_")
        if is_asked_for and (inspect.isfunction(part) or isinstance(part, property)):
            yield name, part


def answers(cls, name, part):
    """Tell whether a class has a protocol's part: a method with the same parameters, an attribute."""
    own = inspect.getattr_static(cls, name, None)
    if inspect.isfunction(part):
        return inspect.isfunction(own) and parameters(own) == parameters(part)
    is_field = dataclasses.is_dataclass(cls) and name in cls.__dataclass_fields__
    return is_field or (own is not None and not inspect.isfunction(own))


def parameters(function):
    return list(inspect.signature(function).parameters)


def vector(size=12, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def through_a_file(state):
    """Return a state as a checkpoint brings it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)

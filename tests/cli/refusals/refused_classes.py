"""Malformed options of every public class that a configuration can name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from refused_rows import (
    ABOVE_ZERO,
    AT_LEAST_ZERO,
    CHOICE,
    COUNT,
    COUNT_OR_NONE,
    FRACTION,
    INF,
    LENGTH,
    NAN,
    PART,
    SWITCH,
    Row,
    refused,
)

FL = "fl_lightning"
SERVER, DATA, CLIENT, UPDATES = (f"{FL}.{room}" for room in ("server", "data", "client", "updates"))
SPARSITY = f"{FL}.sparsity"
SEED = (-1, 2**70, "seed")


def aggregators() -> Iterator[Row]:
    """How updates become one."""
    at, no = "federation.aggregator", COUNT_OR_NONE
    krum = {"class_path": f"{SERVER}.Krum", "init_args": {"num_attackers": 0}}
    yield from refused(at, f"{FL}.Mean", weight_by_examples=SWITCH, exact=SWITCH)
    yield from refused(at, f"{FL}.NormalisedMean", weight_by_examples=SWITCH, exact=SWITCH)
    yield from refused(at, f"{FL}.OverlapMean", weight_by_examples=SWITCH)
    yield from refused(at, f"{SERVER}.AFL", step=AT_LEAST_ZERO)
    yield from refused(at, f"{SERVER}.QFedAvg", q=AT_LEAST_ZERO, local_lr=ABOVE_ZERO)
    yield from refused(at, f"{SERVER}.TiltedMean", tilt=("much", NAN, INF))
    yield from refused(
        at, f"{SERVER}.ClusterFedAvg", {"num_clusters": 2}, num_clusters=COUNT, num_starts=COUNT,
        seed=SEED,
    )  # fmt: skip
    yield from refused(at, f"{SERVER}.Median", memory_gb=AT_LEAST_ZERO)
    for rule in ("Bulyan", "Krum", "MultiKrum", "TrimmedMean"):
        yield from refused(at, f"{SERVER}.{rule}", {"num_attackers": 1}, num_attackers=no)
    yield from refused(at, f"{SERVER}.MultiKrum", {"num_attackers": 0}, num_kept=COUNT)
    yield from refused(at, f"{SERVER}.CentredClipping", radius=LENGTH, num_iterations=COUNT)
    yield from refused(at, f"{SERVER}.FLTrust", trusted_client=no)
    yield from refused(at, f"{SERVER}.GeometricMedian", smoothing=ABOVE_ZERO)
    yield from refused(at, f"{SERVER}.NormBounding", bound=LENGTH)
    yield from refused(at, f"{SERVER}.Bucketing", {"rule": krum}, bucket_size=COUNT, seed=SEED)
    yield from refused(
        at, f"{SERVER}.NearestNeighbourMixing", {"rule": krum, "num_attackers": 0}, num_attackers=no
    )
    yield from refused(
        f"{at}.init_args.rule",
        f"{SERVER}.CentredClipping",
        around={"federation": {"aggregator": {"class_path": f"{SERVER}.Bucketing"}}},
        radius=LENGTH,
        num_iterations=COUNT,
    )


def secure() -> Iterator[Row]:
    """Sums that hide their parts."""
    at = "federation.aggregator"
    yield from refused(
        at, "fl_lightning.secure.SecureMean", clip=ABOVE_ZERO, levels=COUNT, max_examples=COUNT,
        bits=COUNT, threshold=FRACTION, protocol=CHOICE,
    )  # fmt: skip
    yield from refused(
        at, "fl_lightning.secure.EncryptedMean", fraction=FRACTION, max_examples=COUNT, degree=COUNT
    )


def privacy() -> Iterator[Row]:
    """Noise."""
    at = "federation.privacy"
    common = {"clip_norm": 1.0, "noise_multiplier": 1.0}
    uniform = {"class_path": f"{FL}.PoissonCohort", "init_args": {"fraction": 0.5}}
    for name in ("CentralDP", "LocalDP", "DistributedDP", "ExampleDP", "BandedMatrixDP"):
        sampled = {"cohort": uniform} if name == "CentralDP" else {}
        yield from refused(
            at, f"{FL}.{name}", common, around={"federation": sampled},
            clip_norm=ABOVE_ZERO, noise_multiplier=AT_LEAST_ZERO, delta=("tiny", 0, 1, -0.1, NAN),
        )  # fmt: skip
        yield from refused(
            at, f"{FL}.{name}", {"clip_norm": 1.0}, around={"federation": sampled},
            epsilon=("small", 0, -1, NAN, INF),
        )  # fmt: skip
    yield from refused(at, f"{FL}.CentralDP", common, accountant=CHOICE)
    yield from refused(at, f"{FL}.BandedMatrixDP", common, bands=COUNT)
    yield from refused(at, f"{FL}.DistributedDP", common, min_shares=COUNT)
    yield from refused(
        f"{at}.init_args.adaptive_clip",
        f"{FL}.AdaptiveClip",
        around={
            "federation": {
                "cohort": uniform,
                "privacy": {"class_path": f"{FL}.CentralDP", "init_args": common},
            }
        },
        quantile=("half", -1, 2, NAN),
        learning_rate=ABOVE_ZERO,
        bits_stddev=("much", -1, NAN, INF),
    )


def cohorts() -> Iterator[Row]:
    """Who takes part."""
    at, half = "federation.cohort", {"fraction": 0.5}
    for name in ("UniformCohort", "BySizeCohort", "LeastRecentCohort", "RoundRobinCohort"):
        home = FL if name == "UniformCohort" else DATA
        yield from refused(at, f"{home}.{name}", fraction=FRACTION, size=COUNT)
        yield from refused(at, f"{home}.{name}", half, min_size=COUNT)
    yield from refused(at, f"{FL}.PoissonCohort", half, fraction=FRACTION, min_size=COUNT_OR_NONE)
    yield from refused(at, f"{FL}.AllClients")
    yield from refused(
        at, f"{DATA}.ByLossCohort", half, fraction=FRACTION, temperature=ABOVE_ZERO, losses=CHOICE,
        loss_batches=COUNT,
    )  # fmt: skip
    yield from refused(
        at, f"{DATA}.PowerOfChoiceCohort", {**half, "num_candidates": 4}, num_candidates=COUNT,
        losses=CHOICE, loss_batches=COUNT,
    )  # fmt: skip
    yield from refused(
        at, f"{DATA}.OortCohort", half, exploration=PART, exploration_decay=FRACTION,
        min_exploration=PART, slowness=AT_LEAST_ZERO, duration_quantile=PART, cut_off=FRACTION,
        clip_quantile=FRACTION,
    )  # fmt: skip
    sampler = {"class_path": f"{FL}.UniformCohort", "init_args": half}
    diurnal = {"class_path": f"{DATA}.Diurnal"}
    available = {"sampler": sampler, "availability": diurnal}
    around = {"federation": {"cohort": {"class_path": f"{DATA}.AvailableCohort"}}}
    around["federation"]["cohort"]["init_args"] = available
    yield from refused(at, f"{DATA}.AvailableCohort", available)
    yield from refused(
        f"{at}.init_args.availability", f"{DATA}.Diurnal", around=around, mean=PART,
        amplitude=PART, period=ABOVE_ZERO, spread=AT_LEAST_ZERO,
    )  # fmt: skip
    yield from refused(
        f"{at}.init_args.availability", f"{DATA}.Stretches", around=around, fraction=FRACTION,
        length=COUNT,
    )  # fmt: skip


def corrections() -> Iterator[Row]:
    """What clients add to their gradients, and what they have for themselves."""
    at = "federation.correction"
    yield from refused(at, f"{FL}.FedProx", mu=AT_LEAST_ZERO)
    yield from refused(at, f"{FL}.FedDyn", alpha=ABOVE_ZERO)
    yield from refused(at, f"{FL}.FedLC", tau=AT_LEAST_ZERO)
    yield from refused(at, f"{FL}.Moon", mu=AT_LEAST_ZERO, temperature=ABOVE_ZERO)
    yield from refused(at, f"{FL}.Scaffold", option=CHOICE)
    at = "federation.personal"
    yield from refused(at, f"{FL}.APFL", mixture=PART, mixture_rate=AT_LEAST_ZERO)
    yield from refused(at, f"{FL}.Ditto", pull=AT_LEAST_ZERO)
    yield from refused(at, f"{FL}.FineTuned", local_steps=COUNT)
    yield from refused(at, f"{FL}.Personal", parameters=([], 5))
    yield from refused(
        at, f"{FL}.Personal", {"head": True}, own_epochs=COUNT_OR_NONE, head=SWITCH, norms=SWITCH
    )
    yield from refused(at, f"{FL}.Personal", at_start=["parameters"], parameters=(["no_such.*"],))


def updates() -> Iterator[Row]:
    """What happens to an update on its way."""
    at, block = "federation.updates[]", ("some", 0, -1)
    yield from refused(at, f"{UPDATES}.QSGD", bits=(*COUNT, 33), norm=CHOICE, block=block)
    yield from refused(at, f"{UPDATES}.Affine", bits=(*COUNT, 33), block=block)
    yield from refused(at, f"{UPDATES}.Cast", dtype=CHOICE)
    yield from refused(at, f"{UPDATES}.PowerSGD", rank=COUNT, iterations=COUNT)
    yield from refused(at, f"{UPDATES}.RandomK", {"fraction": 0.5}, fraction=FRACTION)
    yield from refused(at, f"{UPDATES}.TopK", {"fraction": 0.5}, fraction=FRACTION)
    yield from refused(at, f"{UPDATES}.Sign", block=block)
    yield from refused(at, f"{UPDATES}.ErrorFeedback", transforms=(5, []))
    yield from refused("federation.download[]", f"{UPDATES}.QSGD", bits=COUNT, block=block)


def devices() -> Iterator[Row]:
    """How fast clients are, and whom the server waits for."""
    at = "federation.devices"
    speeds = {"class_path": f"{CLIENT}.LogNormalSpeeds"}
    yield from refused(
        at, f"{CLIENT}.Devices", {"speeds": speeds}, latency=AT_LEAST_ZERO, jitter=AT_LEAST_ZERO,
        drop_rate=("half", -0.1, 1, 2, NAN), deadline=ABOVE_ZERO, late=CHOICE,
    )  # fmt: skip
    at = f"{at}.init_args.speeds"
    around = {"federation": {"devices": {"class_path": f"{CLIENT}.Devices"}}}
    yield from refused(
        at, f"{CLIENT}.LogNormalSpeeds", around=around, median=ABOVE_ZERO, sigma=AT_LEAST_ZERO
    )
    fast = {"seconds": [1.0]}
    lists = ([], [0.0], [-1.0], [NAN], [INF], "fast")
    yield from refused(
        at, f"{CLIENT}.SpeedTiers", fast, around=around, seconds=lists,
        shares=([], [0.0], [-1.0], [NAN], [1.0, 1.0], [INF]),
    )  # fmt: skip
    yield from refused(at, f"{CLIENT}.GivenSpeeds", fast, around=around, seconds=lists)
    yield from refused(
        at, f"{CLIENT}.GivenSpeeds", fast, around=around, at_start=["seconds"],
        seconds=([1.0, 2.0, 3.0],),
    )  # fmt: skip
    at, buffer = "federation.asynchronous", {"concurrency": 4}
    around = {"federation": {"cohort": None, "devices": {"class_path": f"{CLIENT}.Devices"}}}
    around["federation"]["devices"]["init_args"] = {"speeds": speeds}
    yield from refused(
        at, f"{SERVER}.FedBuff", {**buffer, "buffer_size": 2}, around=around, concurrency=COUNT,
        buffer_size=COUNT,
    )  # fmt: skip
    yield from refused(
        at, f"{SERVER}.FedAsync", buffer, around=around, concurrency=COUNT, mixing=FRACTION
    )
    around["federation"]["asynchronous"] = {
        "class_path": f"{SERVER}.FedAsync",
        "init_args": buffer,
    }
    at = f"{at}.init_args.staleness"
    yield from refused(at, f"{SERVER}.PolynomialStaleness", around=around, exponent=AT_LEAST_ZERO)
    yield from refused(
        at, f"{SERVER}.HingeStaleness", around=around, slope=AT_LEAST_ZERO, grace=COUNT_OR_NONE
    )


def attackers() -> Iterator[Row]:
    """Clients that attack."""
    at, around = "federation.attackers", {"federation": {"attackers": {"fraction": 0.5}}}
    yield from refused(f"{at}.forge", f"{SERVER}.ALIE", around=around, z=("much", NAN, INF))
    yield from refused(f"{at}.forge", f"{SERVER}.GaussianNoise", around=around, std=AT_LEAST_ZERO)
    yield from refused(
        f"{at}.forge", f"{SERVER}.InnerProductManipulation", around=around, epsilon=("x", NAN, INF)
    )
    yield from refused(f"{at}.forge", f"{SERVER}.MinMax", around=around, direction=CHOICE)
    yield from refused(f"{at}.forge", f"{SERVER}.Scaling", around=around, factor=("x", NAN, INF))
    yield from refused(f"{at}.forge", f"{SERVER}.SignFlip", around=around, scale=("x", NAN, INF))
    yield from refused(
        f"{at}.poison", f"{DATA}.LabelFlip", {"num_classes": 10}, around=around,
        num_classes=(*COUNT, 1), share=PART,
    )  # fmt: skip
    yield from refused(
        f"{at}.poison", f"{DATA}.Trigger", {"target": 0}, around=around, target=COUNT_OR_NONE,
        size=COUNT, value=("white", NAN, INF), share=PART,
    )  # fmt: skip
    yield from refused(
        f"{at}.poison", f"{DATA}.Trigger", {"target": 0}, around=around, at_start=["target", "size"],
        target=(10,), size=(9,),
    )  # fmt: skip
    yield from refused(
        f"{at}.poison", f"{DATA}.LabelFlip", {"num_classes": 10}, around=around,
        at_start=["num_classes"], num_classes=(5,),
    )  # fmt: skip


def server_optimizers() -> Iterator[Row]:
    """How the global model moves."""
    at, beta = "federation.server_optimizer", ("x", -0.1, 1, NAN)
    for name in ("FedAdagrad", "FedAdam", "FedYogi"):
        second = {} if name == "FedAdagrad" else {"beta2": beta}
        yield from refused(
            at, f"{SERVER}.{name}", lr=AT_LEAST_ZERO, beta1=beta, tau=ABOVE_ZERO, **second
        )
    yield from refused(
        at, f"{SERVER}.FedLion", lr=AT_LEAST_ZERO, beta1=beta, beta2=beta,
        weight_decay=AT_LEAST_ZERO,
    )  # fmt: skip
    yield from refused(
        at, "torch.optim.SGD", lr=AT_LEAST_ZERO, momentum=AT_LEAST_ZERO, weight_decay=AT_LEAST_ZERO
    )
    at = "model.init_args.optimizer"
    yield from refused(
        at, "torch.optim.SGD", lr=AT_LEAST_ZERO, momentum=AT_LEAST_ZERO, weight_decay=AT_LEAST_ZERO
    )
    yield from refused(at, "torch.optim.AdamW", lr=AT_LEAST_ZERO, eps=AT_LEAST_ZERO)
    yield from refused(at, f"{FL}.SparseAdamW", lr=AT_LEAST_ZERO, eps=AT_LEAST_ZERO)
    yield from refused(
        at, f"{FL}.SparseSGDM", lr=AT_LEAST_ZERO, momentum=AT_LEAST_ZERO, weight_decay=AT_LEAST_ZERO
    )
    at = "federation.server_schedule"
    yield from refused(
        at, "torch.optim.lr_scheduler.StepLR", {"step_size": 1}, step_size=COUNT,
        gamma=("x", NAN, INF),
    )  # fmt: skip
    yield from refused(
        at, "torch.optim.lr_scheduler.CosineAnnealingLR", {"T_max": 5}, T_max=COUNT,
        eta_min=("x", NAN, INF),
    )  # fmt: skip


def partitions() -> Iterator[Row]:
    """Who owns which examples, and where they come from."""
    at, alpha = "data.init_args.partition", {"alpha": 0.5}
    yield from refused(at, f"{DATA}.IID")
    yield from refused(
        at, f"{DATA}.DirichletPerClass", alpha, alpha=ABOVE_ZERO, min_examples=COUNT_OR_NONE
    )
    yield from refused(at, f"{DATA}.DirichletPerClient", alpha, alpha=ABOVE_ZERO)
    yield from refused(
        at, f"{DATA}.DirichletSizes", alpha, alpha=ABOVE_ZERO, min_examples=COUNT_OR_NONE
    )
    yield from refused(
        at, f"{DATA}.PowerLawSizes", {"exponent": 1.0}, exponent=AT_LEAST_ZERO,
        min_examples=COUNT_OR_NONE,
    )  # fmt: skip
    yield from refused(
        at, f"{DATA}.LabelShards", {"classes_per_client": 2}, classes_per_client=COUNT
    )
    yield from refused(at, f"{DATA}.McMahanShards", shards_per_client=COUNT)
    for name, option in (
        ("LabelShards", "classes_per_client"),
        ("McMahanShards", "shards_per_client"),
    ):
        yield from refused(at, f"{DATA}.{name}", at_start=[option], **{option: (1000,)})
    at = "data.init_args.transforms[]"
    yield from refused(at, f"{DATA}.FederatedNormalize", eps=AT_LEAST_ZERO)
    normal = {"mean": [0.0], "std": [1.0]}
    yield from refused(
        at, f"{DATA}.Normalize", normal, mean=([], "x", [NAN]),
        std=([], [0.0], [-1.0], [NAN], [INF], [1.0, 1.0]),
    )  # fmt: skip
    yield from refused(at, f"{DATA}.Reshape", {"shape": [64]}, shape=([0], [-1, -1], "x", [-2]))


def sources() -> Iterator[Row]:
    """Data modules and models."""
    at = "data.init_args.source"
    part = ("half", -0.5, 1, 1.5, NAN)
    classes = ([], [1, 1], "some")
    yield from refused(
        at, f"{DATA}.Digits", batch_size=COUNT, augment=SWITCH, image_size=COUNT,
        val_fraction=part, classes=classes, seed=SEED,
    )  # fmt: skip
    yield from refused(at, f"{DATA}.Digits", at_start=["classes"], classes=([99],))
    yield from refused(
        at, f"{DATA}.Iris", batch_size=COUNT, test_fraction=part, val_fraction=part, seed=SEED
    )
    for name in ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST"):
        yield from refused(
            at, f"{DATA}.{name}", {"root": "nowhere"}, batch_size=COUNT, image_size=COUNT,
            val_fraction=part, classes=classes,
        )  # fmt: skip
        yield from refused(at, f"{DATA}.{name}", at_start=["root"], root=("nowhere",))
    images = {"root": "nowhere", "image_size": 8}
    yield from refused(
        at, f"{DATA}.ImageFolder", images, image_size=COUNT, batch_size=COUNT, val_fraction=part,
        padding_mode=CHOICE, std=([0.0, 1.0, 1.0], [NAN, 1.0, 1.0], [1.0]),
        mean=([NAN, 0.0, 0.0], [1.0]),
    )  # fmt: skip
    yield from refused(at, f"{DATA}.ImageFolder", images, at_start=["root"], root=("nowhere", ""))
    at, digits = "data", {"source": {"class_path": f"{DATA}.Digits"}, "num_clients": 5}
    yield from refused(
        at, f"{FL}.FederatedDataModule", digits, num_clients=COUNT, batch_size=COUNT,
        client_val_fraction=part, client_test_fraction=part, bins=COUNT, seed=SEED,
    )  # fmt: skip
    yield from refused(
        at, f"{FL}.FederatedDataModule", digits, at_start=["num_clients", "client_val_fraction"],
        num_clients=(100_000,), client_val_fraction=(0.999,),
    )  # fmt: skip


def models() -> Iterator[Row]:
    """LightningModules."""
    at = "model"
    sizes = {"num_classes": 10, "in_chans": 1, "image_size": 32}
    small = {"network": "lenet", "network_kwargs": None, **sizes}
    yield from refused(
        at, f"{FL}.ImageClassifier", small, num_classes=COUNT, in_chans=COUNT,
        image_size=(*COUNT, 100_000), drop_rate=("half", -0.1, 1, 2, NAN),
        label_smoothing=("half", -0.1, 1.5, NAN), freeze_blocks=COUNT_OR_NONE,
        freeze_backbone=SWITCH, network=("lenett", ""),
    )  # fmt: skip
    around = {"model": {"class_path": f"{FL}.ImageClassifier", "init_args": small}}
    at = f"{at}.init_args.schedule"
    yield from refused(
        at, f"{FL}.models.Schedule", around=around, kind=CHOICE, warmup_rounds=COUNT_OR_NONE,
        step_every=COUNT, step_factor=ABOVE_ZERO, final_factor=PART,
    )  # fmt: skip
    yield from refused(
        "model", f"{FL}.models.KMeans", {"num_clusters": 3, "num_features": 4}, num_clusters=COUNT,
        num_features=COUNT, start=CHOICE, seed=SEED,
    )  # fmt: skip


def callbacks() -> Iterator[Row]:
    """Masks, evaluation, progress."""
    at, half = "trainer.callbacks[]", {"density": 0.5}
    for option in ("density", "sparsity"):
        bad = (*FRACTION[:1], *FRACTION[2:]) if option == "sparsity" else FRACTION
        more = (1,) if option == "sparsity" else ()
        yield from refused(at, f"{FL}.MaskCalibration", **{option: (*bad, *more)})
    yield from refused(
        at, f"{FL}.MaskCalibration", half, rounds=COUNT, soft_mask=PART, head=CHOICE,
        max_examples=COUNT, every_n_rounds=COUNT, progressive=SWITCH, per_tensor=SWITCH,
        seed=SEED, include=(5,), sparsity=(0.9,),
    )  # fmt: skip
    yield from refused(
        at, f"{FL}.ClientEvaluation", every_n_rounds=COUNT_OR_NONE, max_clients=COUNT
    )
    yield from refused(at, f"{FL}.PartitionReport")
    yield from refused(at, f"{FL}.RoundProgressBar", refresh_rate=("x", 1.5, -1))
    yield from refused(at, f"{FL}.BackdoorSuccess", {"trigger": {"class_path": f"{DATA}.Trigger"}})
    for name, options in {
        "RidgeHead": {"regularisation": AT_LEAST_ZERO, "temperature": ABOVE_ZERO},
        "LinearHead": {
            "regularisation": AT_LEAST_ZERO,
            "max_iterations": COUNT,
            "tolerance": ABOVE_ZERO,
        },
    }.items():
        yield from in_mask("head", f"{SPARSITY}.{name}", options)
    yield from in_mask("sensitivity", f"{SPARSITY}.SampledFisher", {"num_samples": COUNT})
    yield from in_mask("sensitivity", f"{SPARSITY}.EmpiricalFisher", {})
    yield from in_mask("rule", f"{SPARSITY}.LeastSensitive", {})


def in_mask(option: str, class_path: str, bad: dict) -> Iterator[Row]:
    """Yield what a class refuses that is an option of a callback."""
    for row in refused("inner", class_path, **bad):
        spec = {"density": 0.5, option: row.config["inner"]}
        callback = {"class_path": f"{FL}.MaskCalibration", "init_args": spec}
        path = row.option.replace("inner", f"trainer.callbacks[0].init_args.{option}")
        yield Row(
            path, row.value, {"trainer": {"callbacks": [callback]}}, row.says, python=row.python
        )


ROWS = list(
    chain(
        aggregators(), secure(), privacy(), cohorts(), corrections(), updates(), devices(),
        attackers(), server_optimizers(), partitions(), sources(), models(), callbacks(),
    )
)  # fmt: skip

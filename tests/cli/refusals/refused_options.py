"""Malformed options that are no class's: of the block, of the Trainer, of the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from refused_rows import (
    AT_LEAST_ZERO,
    CHOICE,
    COUNT,
    INF,
    NAN,
    PART,
    SWITCH,
    Row,
    merged,
    nested,
)

FL = "fl_lightning"
TOP_K = {"class_path": f"{FL}.updates.TopK", "init_args": {"fraction": 0.5}}


def each(
    place: str, around: Mapping[str, Any] | None = None, **bad: Sequence[Any]
) -> Iterator[Row]:
    """Yield a row for each malformed value of some options."""
    for option, values in bad.items():
        path = f"{place}.{option}".lstrip(".")
        for value in values:
            yield Row(path, value, merged(around or {}, nested(path, value)))


def block() -> Iterator[Row]:
    """The options of ``federation``."""
    at = "federation"
    yield from each(
        at, local_epochs=COUNT, min_replies=COUNT, slots=COUNT,
        spot_check=PART, client_memory_gb=AT_LEAST_ZERO, seed=(-1, 2**70, "seed", 1.5),
        on_client_failure=CHOICE, engine=CHOICE, speedups=(["warp"], "all", [1]), client_state=(5,),
        updates=(5, [5], "everything"), download=(5, [5]),
    )  # fmt: skip
    yield from each(at, {"federation": {"local_epochs": None}}, local_steps=COUNT)
    yield Row("federation.min_replies", 6, nested("federation.min_replies", 6))
    yield Row(
        "federation.client_state", "no_such*", nested("federation.client_state", ["no_such*"])
    )
    families = (
        "cohort", "correction", "personal", "aggregator", "privacy", "server_optimizer", "devices",
        "asynchronous", "server_schedule", "attackers",
    )  # fmt: skip
    for option in families:
        for value in (5, "no_such", "fl_lightning.NoSuchClass", "no_such.Module", [], ""):
            yield Row(f"{at}.{option}", value, nested(f"{at}.{option}", value))
        for wrong in ("fl_lightning.ImageClassifier", f"{FL}.updates.TopK", "torch.nn.Linear"):
            path = f"{at}.{option}"
            yield Row(path, wrong, nested(path, {"class_path": wrong}))
            yield Row(path, wrong, nested(path, wrong))
    for option in ("updates", "download"):
        for wrong in (f"{FL}.FedProx", f"{FL}.NoSuchClass", "TopKK"):
            spec = [{"class_path": wrong}]
            yield Row(f"{at}.{option}", wrong, nested(f"{at}.{option}", spec))
    for misspelt in ("local_epoch", "cohorts", "agregator", "corection", "clients", "rounds"):
        yield Row(f"{at}.{misspelt}", "", nested(f"{at}.{misspelt}", 1), "not accepted")
    for value in (5, "yes", [], True):
        yield Row(at, value, {at: value})


def attackers() -> Iterator[Row]:
    """Who attacks."""
    flip = {"class_path": f"{FL}.data.LabelFlip", "init_args": {"num_classes": 10}}
    around = nested("federation.attackers", {"fraction": 0.2, "poison": flip})
    at = "federation.attackers"
    yield from each(at, around, fraction=("half", -0.1, 1.5, NAN, INF), spared=("x", [-1], [99]))
    yield from each(at, around, seed=(-1, 1.5), forge=(5, "no"), poison=(5, "no"))
    yield Row(at, "", nested(at, {"fraction": 0.2}))


def combinations() -> Iterator[Row]:
    """What makes no sense together."""

    def row(name: str, value: Any, says: str = "", **block: Any) -> Row:
        return Row(f"federation.{name}", value, {"federation": block}, says, name=name)

    def spec(path: str, **options: Any) -> dict[str, Any]:
        return {"class_path": f"{FL}.{path}", "init_args": options}

    secure, krum = spec("secure.SecureMean"), spec("server.Krum", num_attackers=1)
    central = spec("CentralDP", clip_norm=1.0, noise_multiplier=1.0)
    devices = spec("client.Devices", speeds=spec("client.LogNormalSpeeds"))
    fed_buff = spec("server.FedBuff", concurrency=4, buffer_size=2)
    noises = {"clip_norm": 1.0, "noise_multiplier": 1.0, "epsilon": 2.0}
    yield row("local_steps", "", "local_epochs", local_steps=3, local_epochs=3)
    yield row("cohort", "", "fraction", cohort=spec("UniformCohort"))
    yield row("cohort", 3, "fraction", cohort=spec("UniformCohort", fraction=0.5, size=3))
    yield row("cohort", 50, "5", cohort=spec("UniformCohort", size=50))
    yield row("SecureMean", "SecureMean", "", aggregator=secure, updates=[TOP_K])
    yield row("SecureMean", "SecureMean", "", aggregator=secure, privacy=central)
    yield row("SecureMean", "SecureMean", "", aggregator=secure, correction=spec("Scaffold"))
    yield row("aggregator", 3, "at least", aggregator=spec("server.Krum", num_attackers=3))
    yield row("aggregator", 3, "at least", aggregator=spec("server.Bulyan", num_attackers=3))
    yield row("privacy", "Krum", "", aggregator=krum, privacy=central)
    yield row("privacy", 2, "", privacy=spec("CentralDP", **noises))
    yield row("privacy", "", "", privacy=spec("CentralDP", clip_norm=1.0))
    yield row("asynchronous", "", "devices", asynchronous=fed_buff, cohort=None)
    both = {"asynchronous": fed_buff, "devices": devices, "cohort": None}
    yield row("asynchronous", "Scaffold", "", **both, correction=spec("Scaffold"))
    yield row("updates", "", "low rank", updates=[spec("updates.QSGD"), spec("updates.PowerSGD")])
    yield row("updates", "", "top-k", updates=[spec("updates.QSGD"), TOP_K])
    yield row("download", "", "top-k", download=[TOP_K])
    yield row(
        "correction", "FedDyn", "", correction=spec("FedDyn"), server_optimizer="torch.optim.Adam"
    )
    yield row("server_optimizer", "LBFGS", "", server_optimizer="torch.optim.LBFGS")
    fine = spec("FineTuned", local_steps=2)
    sparse = {"class_path": f"{FL}.SparseSGDM", "init_args": {"lr": 0.1}}
    yield Row(
        "federation.personal",
        "FineTuned",
        {"federation": {"personal": fine}, "model": {"init_args": {"optimizer": sparse}}},
    )
    mask = {"class_path": f"{FL}.MaskCalibration", "init_args": {"density": 0.5}}
    two = {"trainer": {"callbacks": [mask, mask]}, "model": {"init_args": {"optimizer": sparse}}}
    yield Row("trainer.callbacks", "MaskCalibration", two, "one of a kind")
    one = {"trainer": {"callbacks": [mask]}}
    yield Row("", "", one, "SparseAdamW", name="optimizer")
    nothing = {"class_path": f"{FL}.MaskCalibration"}
    yield Row("trainer.callbacks[0]", "", {"trainer": {"callbacks": [nothing]}}, "density")


def trainer() -> Iterator[Row]:
    """Lightning's own options."""
    at = "trainer"
    share = ("half", -1, -0.5, 1.5, NAN)
    yield from each(
        at,
        accelerator=("tpu9", "gpu", 5, ""),
        strategy=("fsdp", "ddp", "no_such", 5, ""),
        devices=(-3, 0, "many", [], [-1], [0, 0], 1.5, "", "0"),
        num_nodes=(0, -1, "two", 1.5),
        precision=("8", "float", 17, ""),
        logger=(5, "no_such", "fl_lightning.FedProx"),
        callbacks=(5, "no_such", [5], ["no_such.Callback"], [f"{FL}.FedProx"]),
        fast_dev_run=(-1, "some", 1.5),
        max_epochs=("many", 1.5, -2, -10),
        min_epochs=("many", 1.5, -1),
        max_steps=("many", 1.5, -2),
        min_steps=("many", 1.5, -1),
        max_time=("soon", "1:2:3", {"decades": 1}, {"hours": 0}, {"hours": 1e20}, {}, -1),
        limit_train_batches=share,
        limit_val_batches=share,
        limit_test_batches=share,
        limit_predict_batches=share,
        overfit_batches=("half", -1),
        val_check_interval=(0, -1, 0.0, -0.5, 1.5, NAN, "often", 100),
        check_val_every_n_epoch=(0, -1, "often", 1.5),
        num_sanity_val_steps=("some", 1.5, -2),
        log_every_n_steps=("some", 1.5, -1),
        accumulate_grad_batches=COUNT,
        gradient_clip_val=("much", -1, NAN),
        gradient_clip_algorithm=("nothing", 5),
        enable_checkpointing=("maybe", 7),
        enable_progress_bar=SWITCH,
        enable_model_summary=SWITCH,
        deterministic=("maybe", 7),
        benchmark=SWITCH,
        inference_mode=SWITCH,
        profiler=("slow", 5),
        detect_anomaly=SWITCH,
        barebones=SWITCH,
        plugins=(5, "no_such"),
        sync_batchnorm=SWITCH,
        reload_dataloaders_every_n_epochs=("some", -1, 1.5),
    )  # fmt: skip
    for path in ("/proc/no_such", "/dev/null/runs", "/dev/null"):
        config = {"trainer": {"default_root_dir": path, "enable_checkpointing": True}}
        yield Row("trainer.default_root_dir", path, config)
    for value in (0.5, 1):
        config = {"trainer": {"overfit_batches": value}}
        yield Row("trainer.overfit_batches", "", config, "limit_train_batches")
    for value in (5, "yes", [], True):
        yield Row(at, value, {at: value})
    for misspelt in ("max_epoch", "epochs", "acelerator", "device", "num_node", "gpus"):
        yield Row(f"{at}.{misspelt}", "", nested(f"{at}.{misspelt}", 1), "not accepted")
    early = "lightning.pytorch.callbacks.EarlyStopping"
    saved = "lightning.pytorch.callbacks.ModelCheckpoint"
    for name, options in (
        (early, {"monitor": "val/loss", "patience": -1}),
        (early, {"monitor": "val/loss", "mode": "up"}),
        (early, {"monitor": "no/such"}),
        (early, {"monitor": "val/loss", "min_delta": "x"}),
        (early, {"monitor": "val/loss", "patience": 1.5}),
        (early, {"monitr": "val/loss"}),
        (early, {"patience": 3}),
        (saved, {"monitor": "val/loss", "save_top_k": -2}),
        (saved, {"monitor": "no/such"}),
        (saved, {"save_top_k": 2}),
        (saved, {"monitor": "val/loss", "mode": "up"}),
        (saved, {"every_n_epochs": -1}),
        (saved, {"every_n_epochs": 2, "every_n_train_steps": 2}),
        (saved, {"dirname": "x"}),
    ):
        option = next(reversed(options))
        spec = {"class_path": name, "init_args": options}
        config = {"trainer": {"callbacks": [spec], "enable_checkpointing": True}}
        is_misspelt = option in ("monitr", "dirname")
        name = "monitor" if option == "patience" and len(options) == 1 else ""
        value = "" if is_misspelt or name else options[option]
        name = name or ("no/such" if value == "no/such" else "")
        yield Row(f"trainer.callbacks[0].init_args.{option}", value, config, name=name)


def top() -> Iterator[Row]:
    """The options beside the blocks."""
    yield from each("", seed_everything=(-1, "x", 1.5, 2**40, 2**70, NAN))
    yield from each("", num_threads=(*COUNT, 10**6), test_after_fit=SWITCH)
    yield Row("ckpt_path", "", {"ckpt_path": ""})
    yield Row("ckpt_path", "no_such.ckpt", {"ckpt_path": "no_such.ckpt"})
    yield Row("ckpt_path", 5, {"ckpt_path": 5})
    yield Row("weights_only", "maybe", {"weights_only": "maybe"})
    for misspelt in ("models", "federations", "trainers", "seed", "epochs"):
        yield Row(misspelt, 1, {misspelt: 1}, "not accepted")
    for option in ("model", "data"):
        for value in (5, [], "no_such", f"{FL}.FedProx", f"{FL}.NoSuchClass", ""):
            yield Row(option, value, {option: value})
        for value in ("no_such.Module", f"{FL}.FedProx", f"{FL}.NoSuchClass", "torch.nn.Linear", 5):
            yield Row(option, value, {option: {"class_path": value}})
    yield Row(
        "data", "Digits", {"data": {"class_path": f"{FL}.data.Digits"}}, "FederatedDataModule"
    )


def data_and_model() -> Iterator[Row]:
    """Models that do not fit the data."""
    at = "model.init_args"
    yield Row(f"{at}.num_classes", 5, nested(f"{at}.num_classes", 5), "label 9", name="num_classes")
    yield Row(
        f"{at}.num_classes", 1, nested(f"{at}.num_classes", 1), "at least 2", name="num_classes"
    )
    yield Row(f"{at}.in_chans", 3, nested(f"{at}.in_chans", 3), "1", name="in_chans")
    yield Row(f"{at}.image_size", 16, nested(f"{at}.image_size", 16), "8", name="image_size")
    source = "data.init_args.source.init_args.image_size"
    yield Row(f"{at}.image_size", 8, nested(source, 16), "16", name="image_size")
    path = f"{at}.network_kwargs"
    yield from (
        Row(path, value, nested(path, value), name="network_kwargs")
        for value in (5, {"no_such": 1}, {"embed_dim": 0}, {"depth": -1}, {"embed_dim": "x"})
    )
    yield Row(f"{at}.checkpoint_path", "no.pt", nested(f"{at}.checkpoint_path", "no.pt"))
    lenet = {"network": "lenet", "network_kwargs": None, "num_classes": 10, "in_chans": 1}
    for size in (1, 3, 16):
        config = {"model": {"init_args": {**lenet, "image_size": size}}}
        yield Row("model.init_args.image_size", size, config, name="image_size")
    k_means = {"class_path": f"{FL}.models.KMeans", "init_args": {"num_clusters": 3}}
    k_means["init_args"]["num_features"] = 3
    iris = {"source": {"class_path": f"{FL}.data.Iris"}, "num_clients": 5}
    data = {"class_path": f"{FL}.FederatedDataModule", "init_args": iris}
    cluster = {"aggregator": {"class_path": f"{FL}.server.ClusterFedAvg"}}
    cluster["aggregator"]["init_args"] = {"num_clusters": 3}
    config = {"model": k_means, "data": data, "federation": cluster}
    yield Row("model.init_args.num_features", 3, config, "4", name="num_features")


def command_line() -> Iterator[Row]:
    """Words that no file can say."""

    def words(option: str, value: str, *said: str, says: str = "", command: str = "fit") -> Row:
        return Row(option, value, {}, says, words=said, command=command)

    yield words("trainer.max_epoch", "3", "--trainer.max_epoch", "3", says="max_epochs")
    yield words("trainer.max_epoch", "3", "--trainer.max_epoch=3", says="max_epochs")
    yield words("trainer.accel", "cpu", "--trainer.accel", "cpu", says="accelerator")
    yield words("seed", "3", "--seed", "3", says="seed_everything")
    yield words("num_thread", "1", "--num_thread", "1", says="num_threads")
    yield words("federation.local_epoch", "2", "--federation.local_epoch", "2", says="local_epochs")
    yield words("conf", "x.yaml", "--conf", "x.yaml", says="config")
    yield words("no_such", "5", "--no_such", "5")
    yield words("trainer.no_such", "5", "--trainer.no_such", "5", says="not accepted|no")
    yield words("word", "", "word")
    yield words("x", "", "-x")
    yield words("config", "no_such.yaml", "--config", "no_such.yaml")
    yield words("config", "/", "--config", "/")
    yield words("trainer.max_epochs", "", "--trainer.max_epochs", says="argument")
    yield words("fitt", "", command="fitt", says="fit")
    for name, value in (
        ("federation.cohort.init_args.fraction", "1.5"),
        ("federation.cohort.init_args.fraction", "abc"),
        ("federation.cohort.fraction", "1.5"),
        ("federation.local_epochs", "0"),
        ("federation.local_epochs", "x"),
        ("model.init_args.num_classes", "five"),
        ("model.init_args.optimizer.init_args.lr", "abc"),
        ("model.init_args.optimizer.init_args.lr", "-1"),
        ("model.init_args.optimizer", "torch.optim.Adamm"),
        ("data.init_args.num_clients", "0"),
        ("data.init_args.num_clients", "x"),
        ("data.init_args.source.init_args.batch_size", "0"),
        ("trainer.devices", "-3"),
        ("trainer.max_epochs", "1.5"),
        ("federation.aggregator", "fl_lightning.server.Krum"),
        ("federation.aggregator", "Krumm"),
        ("federation.engine", "fast"),
    ):
        yield words(name, value, f"--{name}", value)
    for command in ("validate", "test", "predict"):
        yield Row("trainer.devices", -3, {"trainer": {"devices": -3}}, command=command)
        path = "model.init_args.num_classes"
        yield Row(path, 0, nested(path, 0), command=command)
        yield Row("ckpt_path", "", {"ckpt_path": ""}, command=command)


ROWS = list(
    chain(
        block(), attackers(), combinations(), trainer(), top(), data_and_model(), command_line()
    )
)  # fmt: skip

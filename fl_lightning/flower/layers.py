"""Options of a configuration that the server sets at a site, and options that only the site sets.

    server: seed_everything, num_threads, model, federation; of trainer the length and the rules of
            training (`SHARED_TRAINER`) and the callback `MaskCalibration`
    site:   everything else: data; trainer.accelerator, devices, precision, strategy, logger,
            callbacks, plugins, profiler, default_root_dir, …; ckpt_path and the like

A site's options override the server's, as a later ``--config`` overrides an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_lightning.flower.class_paths import FROM_SERVER, own_names

SHARED = ("seed_everything", "num_threads", "model", "federation", "trainer")
SHARED_TRAINER = (
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "check_val_every_n_epoch",
    "val_check_interval",
    "num_sanity_val_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "inference_mode",
    "detect_anomaly",
)

CALLBACKS, _CALIBRATION = "callbacks", ".MaskCalibration"


def shared_part(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a configuration that the server may set, without those that only a site sets.

    Example:
        >>> shared_part({"trainer": {"max_epochs": 3, "logger": True}, "data": {}})
        {'trainer': {'max_epochs': 3}}
    """
    kept = {name: value for name, value in configuration.items() if name in SHARED}
    trainer = kept.pop("trainer", None)
    if isinstance(trainer, Mapping):
        kept["trainer"] = {n: value for n, value in trainer.items() if n in SHARED_TRAINER}
        if calibrations := [_without_file(c) for c in callbacks_of(trainer) if _is_calibration(c)]:
            kept["trainer"][CALLBACKS] = calibrations
    return kept


def callbacks_of(trainer: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks in the options of a Trainer."""
    given = [trainer.get(name) for name in (CALLBACKS, f"{CALLBACKS}+")]
    return [c for value in given for c in (value if isinstance(value, list) else [value])]


def _is_calibration(callback: Any) -> bool:
    path = _full(callback) if isinstance(callback, Mapping) else None
    return (
        isinstance(path, str) and path.startswith("fl_lightning.") and path.endswith(_CALIBRATION)
    )


def _without_file(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `MaskCalibration`'s options with a placeholder for its mask file: sites get masks from the server."""
    options = calibration.get("init_args")
    if isinstance(options, Mapping) and options.get("mask_file") is not None:
        return {**calibration, "init_args": {**options, "mask_file": FROM_SERVER}}
    return dict(calibration)


def without_callbacks(own: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the callbacks from a site's options, because the Trainer of a site runs none.

    Example:
        >>> without_callbacks({"trainer": {"callbacks": [1], "accelerator": "gpu"}})
        {'trainer': {'accelerator': 'gpu'}}
    """
    trainer = own.get("trainer")
    if not isinstance(trainer, Mapping):
        return dict(own)
    kept = {n: value for n, value in trainer.items() if n.removesuffix("+") != CALLBACKS}
    return {**own, "trainer": kept}


def laid_over(lower: Any, upper: Any) -> Any:
    """Merge two configurations; the values of ``upper`` win.

    Mappings are merged; other values, lists too, are replaced. If ``upper`` names another class, the
    options of the class in ``lower`` are dropped.

    Example:
        >>> laid_over({"a": {"b": 1, "c": [2]}}, {"a": {"c": [3]}})
        {'a': {'b': 1, 'c': [3]}}
    """
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
        return upper
    if "class_path" in upper and _full(upper) != _full(lower):
        return dict(upper)
    merged = dict(lower)
    for name, value in upper.items():
        merged[name] = laid_over(lower[name], value) if name in lower else value
    return merged


def _full(layer: Mapping[str, Any]) -> Any:
    path = layer.get("class_path")
    return own_names().get(path, path) if isinstance(path, str) else path

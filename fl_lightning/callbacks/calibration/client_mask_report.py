"""Masks of the clients' own, told: what they are together, whenever a round has found some."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.federation import log_numbers
from fl_lightning.federation.loggers.once import log_once
from fl_lightning.sparsity.masks.mask import Mask
from fl_lightning.sparsity.masks.report import MaskCounts


def announce_client_masks(
    trainer: Trainer,
    known: MaskCounts,
    frame: Mask,
    num_dense: int,
    num_frozen: int,
    metrics: Mapping[str, float],
) -> None:
    """Say at the start of a fit that clients find masks, and within what.

    Args:
        trainer: with the loggers.
        known: over the masks that the checkpoint had.
        frame: what the clients' masks cover.
        num_dense: numbers of the head that train besides.
        num_frozen: numbers outside masks and head.
        metrics: further numbers for the loggers.
    """
    rank_zero_info(
        f"masks of clients: each finds its own when it first takes part, among "
        f"{frame.num_entries:,} maskable parameters; {num_dense:,} train densely, {num_frozen:,} "
        f"frozen{f'; {known.num_masks:,} are from the checkpoint' if known.num_masks else ''}"
    )
    if metrics:
        log_once(trainer, "mask", metrics, step=trainer.global_step)


def tell_client_masks(trainer: Trainer, counts: MaskCounts, num_bytes: int) -> None:
    """Print and log what the masks found so far are together.

    Args:
        trainer: at the end of the last group of the round that found some.
        counts: over all masks so far.
        num_bytes: of the new ones: what their clients tell the server of them.
    """
    num_clients = len(trainer.datamodule.clients)  # type: ignore[attr-defined]
    has_pairs = counts.num_masks > 1
    pairs = f"; two share {counts.overlap:.3g} of what either lets train" if has_pairs else ""
    rank_zero_info(
        f"masks of clients: {counts.num_masks:,} of {num_clients:,} found; of "
        f"{counts.num_entries:,} maskable parameters each trains {counts.density:.4g}, all "
        f"together {counts.union_density:.4g}{pairs}"
    )
    numbers = {
        "mask/clients": float(counts.num_masks),
        "mask/density": counts.density,
        "mask/sparsity": 1 - counts.density,
        "mask/union_density": counts.union_density,
        "calibration/total_bytes_up": float(num_bytes),
    }
    if has_pairs:
        numbers["mask/overlap"] = counts.overlap
    log_numbers(trainer, numbers, step=trainer.global_step - 1)  # the server has stepped

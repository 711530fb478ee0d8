"""Report of a new mask, and masks of single clients.

With one mask per client, each client calibrates when it is first sampled. It sends its mask instead of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.federation import Ranks, log_numbers, log_once, run_folder
from fl_lightning.reports.charts import draw
from fl_lightning.reports.loggers import log_figure
from fl_lightning.reports.panels import bars
from fl_lightning.sparsity.masks.mask import Mask, density_per_layer, save_mask
from fl_lightning.sparsity.tasks.merging import MaskCounts


def report_mask(
    trainer: Trainer,
    mask: Mask,
    version: int,
    words: str,
    metrics: dict[str, float] | None,
    *,
    is_one_of_many: bool,
) -> None:
    """Print, log and save a new mask of trainable entries; every process must call this.

    Args:
        trainer: the Trainer of the fit.
        mask: the new mask.
        version: number of the mask, from 0.
        words: line to print.
        metrics: further numbers to log; None logs no numbers, for a mask of a resumed run.
        is_one_of_many: whether further masks may follow; their numbers are then logged as curves.
    """
    folder = run_folder(trainer)  # a collective operation: every process must call it
    rank_zero_info(words)
    if not trainer.is_global_zero or trainer.logger is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    step = trainer.global_step
    if metrics is not None:
        numbers = {
            "mask/density": mask.density,
            "mask/sparsity": mask.sparsity,
            "mask/version": float(version),
            **metrics,
        }
        if is_one_of_many:
            log_numbers(trainer, numbers, step=step)
        else:
            log_once(trainer, "mask", numbers, step=step)
        log_figure(trainer, "mask/density per layer", lambda: density_figure(mask), step=step)
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_mask(mask, Path(folder) / f"mask_v{version}.safetensors")


_MOST_BARS = 150  # if there are more layers, a bar shows a block of layers


def density_figure(mask: Mask) -> Any:
    """Return a bar chart of each layer's density (share of trainable entries); a line marks the whole mask's."""
    rows, depth = density_per_layer(mask), 8
    while len(rows) > _MOST_BARS and depth > 1:
        depth -= 1
        rows = density_per_layer(mask, depth)
    names, densities = [row.name for row in rows], [row.density for row in rows]
    panel = bars(names, densities, x="density", mark=mask.density, most=1.0)
    # above the whole figure: long names of layers leave little room above the bars
    title = f"{mask.num_active:,} of {mask.num_entries:,} entries train"
    return draw({"": panel}, title, height=1.2 + 0.16 * len(rows))[0]


class ClientMasks:
    """Per-client masks; a client's mask is calibrated when it is first read.

    Args:
        find: function that calibrates the mask of a client.

    Attributes:
        counts: statistics over the masks that `exchange` has shared.

    Example:
        >>> import torch
        >>> masks = ClientMasks(lambda client: Mask({"weight": torch.arange(3) == client}))
        >>> masks(1)["weight"].tolist(), sorted(masks.state_dict())
        ([False, True, False], [1])
    """

    def __init__(self, find: Callable[[int], Mask]) -> None:
        self._find = find
        self._packed: dict[int, dict[str, Any]] = {}
        self._new: list[int] = []
        self.counts = MaskCounts()

    def __call__(self, client: int) -> Mask:
        """Return a client's mask, on the CPU."""
        if client in self._packed:
            return Mask.from_state_dict(self._packed[client])
        mask = self._find(client)
        self._packed[client] = mask.state_dict()
        self._new.append(client)
        return mask

    def exchange(self, ranks: Ranks) -> int:
        """Share the masks that each process has calibrated with all others; every process must call this.

        Returns:
            Payload bytes of the new masks, at eight entries per byte; 0 if there are none.
        """
        num_bytes = 0
        for found in ranks.gather({client: self._packed[client] for client in self._new}):
            self._packed.update(found)
            for packed in found.values():
                self.counts.add(Mask.from_state_dict(packed))
                num_bytes += sum(bits.numel() for bits in packed["bits"].values())
        self._new = []
        return num_bytes

    def found(self) -> dict[int, Mask]:
        """Return all masks calibrated so far, by client number."""
        return {
            client: Mask.from_state_dict(self._packed[client]) for client in sorted(self._packed)
        }

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return all masks calibrated so far, packed to eight entries per byte."""
        return dict(self._packed)

    def load_state_dict(self, state: Mapping[int, dict[str, Any]]) -> None:
        """Replace all per-client masks by those that `state_dict` returned."""
        self._packed, self.counts = dict(state), MaskCounts()
        for mask in self.found().values():
            self.counts.add(mask)


def report_client_masks(trainer: Trainer, counts: MaskCounts, num_bytes: int) -> None:
    """Print and log a summary of all per-client masks calibrated so far: density, union, overlap.

    Args:
        trainer: Trainer of the fit.
        counts: statistics over all masks so far.
        num_bytes: payload bytes of the round's new masks.
    """
    num_clients = len(trainer.datamodule.clients)  # type: ignore[attr-defined]
    has_pairs = counts.num_masks > 1
    pairs = f"; Jaccard index of pairs {counts.overlap:.3g}" if has_pairs else ""
    rank_zero_info(
        f"masks of clients: {counts.num_masks:,} of {num_clients:,} calibrated; mean density "
        f"{counts.density:.4g} of {counts.num_entries:,} maskable parameters, density of their union "
        f"{counts.union_density:.4g}{pairs}"
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
    log_numbers(trainer, numbers, step=trainer.global_step - 1)  # the server has already stepped

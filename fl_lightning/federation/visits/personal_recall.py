"""Where the personal models of a federation's clients are: in its rounds, or in a saved state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.client.memory import ClientMemory
from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.federation.checkpoints.run_memory import saved_memory
from fl_lightning.federation.fit_rounds import FitRounds
from fl_lightning.federation.run import Run
from fl_lightning.federation.visits.fine_tuning import FineTuning
from fl_lightning.federation.visits.personal_models import PersonalModels


def recalled_models(
    trainer: Trainer,
    personal: Personalisation | None,
    seed: int,
    run: Run | None,
    saved: Mapping[str, Any],
) -> PersonalModels | None:
    """Return what clients have for themselves; None if nothing.

    Args:
        trainer: whose module holds the global model.
        personal: what the user asked for.
        seed: of what fine-tuning draws.
        run: of the fit in this process; None if there was none.
        saved: a checkpoint's state, or that of `state_to_bring_home`, which then counts; or empty.
    """
    if personal is None:
        return None
    module, steps, tune = trainer.lightning_module, personal.tuning_steps, None
    if steps:
        tune = FineTuning(trainer, trainer.datamodule, steps, seed)  # type: ignore[attr-defined]
    if saved:
        names = (saved.get("personal") or {"names": []})["names"]
        memory = saved_memory(saved["memory"], trainer.ckpt_path)
    elif run is not None:
        names, memory = run.local.own.names, run.memory.clients
    else:
        names, memory = [], ClientMemory()
    return PersonalModels(module, names, memory, tune) if names or tune else None


def state_to_bring_home(rounds: FitRounds | None) -> dict[str, Any]:
    """Return what another process needs to evaluate personal models, unless it is large."""
    if rounds is None or not rounds.run.local.own.names:
        return {}
    memory = rounds.memory.clients
    if not memory.is_small:
        rank_zero_info(
            "personal models are too large to be brought home from the fit's processes: "
            "evaluate them with ckpt_path"
        )
        return {}
    return {
        "personal": {"names": list(rounds.run.local.own.names)},
        "memory": memory.state_dict(with_round=False),
    }


def own_layers(
    personal: Personalisation | None, recall: Callable[[], PersonalModels | None]
) -> Callable[[int], AbstractContextManager[None]] | None:
    """Return what has the module hold the layers that are a client's own, if there are any."""
    if personal is None or personal.beside or personal.tuning_steps:
        return None
    models = recall()
    return None if models is None else models.of

"""A site's Trainer, as Lightning's command line makes it: it follows orders."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.cli.federated_cli import FederatedCLI
from fl_lightning.cli.over_network.site_calibration import SiteCalibration
from fl_lightning.cli.subcommands import run_lightning
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.shards import ClientShards
from fl_lightning.flower.policy import MOST_CLIENTS, Policy, Refused, check_most
from fl_lightning.flower.rules.site_file import read_policy
from fl_lightning.flower.server.checks import of_transforms
from fl_lightning.flower.site.fit import AtSite
from fl_lightning.flower.site.site import Fit, Site
from fl_lightning.flower.site_facts import STAGES, SiteFacts
from fl_lightning.flower.transport.resident import log_to, serve

# what a site's Trainer has nothing to do with
_SITE_WORDS = (
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.limit_val_batches=0",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.devices=1",
    "--test_after_fit=false",
)


class _LimitedTensors(TorchDispatchMode):
    """Refuses tensors before there is memory for them, once they have more numbers together than allowed."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most, self._made = most, 0
        self.refused: Refused | None = (
            None  # which others on the way may have made another error of
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("new_") or not any(isinstance(each, torch.Tensor) for each in args):
            self._made += max((_numbers(each, name) for each in args), default=0)
            if self._made > self._most:
                self.refused = Refused(
                    f"the model has more than most_parameters {self._most} of site.yaml, when it makes a "
                    f"tensor by {name}{tuple(args)}"
                )
                raise self.refused
        return func(*args, **(kwargs or {}))


def _numbers(argument: Any, name: str) -> int:
    """Return how many numbers an argument asks a function for that makes a tensor."""
    if isinstance(argument, (list, tuple)) and all(isinstance(each, int) for each in argument):
        return math.prod(argument)
    is_length = name in ("arange", "linspace", "eye") and isinstance(argument, (int, float))
    return int(argument) ** (2 if name == "eye" else 1) if is_length else 0


def run_site(fit: Fit, policy: Policy) -> None:
    """Have a site's Trainer follow the orders of one run.

    Args:
        fit: what it is to follow.
        policy: of the site.
    """
    places = policy.clients
    fit.desk.start_clock()

    class SiteCLI(FederatedCLI):
        """A fit on orders."""

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            """Have the Trainer follow orders instead of running rounds."""
            federation = self._get(self.config_init, "federation")
            rounds = (fit.configuration.get("trainer") or {}).get("max_epochs")
            num_rounds = None if rounds is None or rounds < 0 else rounds
            options = self._get(self.config_init, "trainer")
            calibrations = [SiteCalibration(c) for c in options["callbacks"] or ()]
            calibrates = calibrations[0] if calibrations else None
            at_site = AtSite(
                federation, fit.desk, fit.memory, policy, num_rounds, fit.account, calibrates
            )
            options["callbacks"] = [at_site]
            return super(FederatedCLI, self).instantiate_trainer(**kwargs)

        def instantiate_classes(self) -> None:
            """Build no larger model than the site allows."""
            limit = _LimitedTensors(policy.most_parameters)
            try:
                with limit:
                    super().instantiate_classes()
            except BaseException as error:  # noqa: BLE001 - it is raised again
                raise limit.refused or error from None

        def fit(self, model: Any, **kwargs: Any) -> None:
            """Say what this site has, and wait for the first order."""
            data = self.datamodule
            if problems := list(of_transforms(data)):
                raise ConfigurationError("\n".join(problems))
            data.prepare_data()
            data.setup("fit")
            passes = self._get(self.config_init, "federation").local_epochs or 0
            batches = -(-max(data.clients.num_examples) // (data.batch_size or 1))
            check_most(
                "local steps of federation.local_epochs", passes * batches, policy.most_steps
            )
            facts = SiteFacts(
                clients=_sizes_at(data.clients, places),
                held_out={stage: _sizes_at(data.held_out_for(stage), places) for stage in STAGES},
                batch_size=data.batch_size,
                drop_last=data.drop_last,
                precision=str(self.trainer.precision),
                signing=policy.public_key,
                sum_key=policy.sum_key_fingerprint,
                most_bytes=policy.most_bytes,
            )
            fit.desk.hello(facts.options())
            order = fit.desk.first_order()
            if order is not None:
                check_most("num_clients", order.options["num_clients"], MOST_CLIENTS)
                data.join_as(places, order.options["num_clients"])
                self.trainer.fit(model, datamodule=data)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        file.write_text(yaml.safe_dump(dict(fit.configuration), sort_keys=False))
        run_lightning(
            ["fit", f"--config={file}", *_SITE_WORDS], cli=SiteCLI, keeps_configuration=False
        )


def site_process(folder: str) -> None:
    """Be a site's resident process: answer orders until told to end.

    Args:
        folder: of the site, with ``site.yaml``, and ``own.yaml``: its own layer of every configuration.

    Raises:
        ConfigurationError: if one of them cannot be read.
    """
    policy = read_policy(Path(folder, "site.yaml"))
    log_to(Path(folder, "log", "resident.log"))
    try:
        own = yaml.safe_load(Path(folder, "own.yaml").read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{folder}/own.yaml: {error}") from None
    serve_site(policy, own)


def serve_site(policy: Policy, own: Mapping[str, Any]) -> None:
    """Answer orders until told to end.

    Args:
        policy: what the site is and what it allows.
        own: its own layer of every configuration.
    """
    site = Site(policy, own)
    serve(
        policy.socket,
        lambda: site.handle,
        meanwhile=lambda: site.serve(lambda fit: run_site(fit, policy)),
    )


def _sizes_at(shards: ClientShards, places: Mapping[int, int]) -> dict[int, int]:
    """Return the numbers of examples of a site's clients."""
    return {client: int(shards.num_examples[at]) for client, at in places.items()}

"""The Trainer of a site, built by Lightning's command line; it carries out the server's orders.

Orders are to train, to evaluate, and to compute sums for the mask or the head of `MaskCalibration`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.callbacks.calibration.head_fitting import HEAD, linear_head, owner_features
from fl_lightning.callbacks.calibration.mask_calibration import MaskCalibration
from fl_lightning.callbacks.calibration.scores import SCORES, scoring
from fl_lightning.cli.commands import run_lightning
from fl_lightning.cli.federated_cli import FederatedCLI
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.yaml_files import read
from fl_lightning.data.shards import FlatShards
from fl_lightning.federation import clients_as_owners
from fl_lightning.flower.documents import document_of
from fl_lightning.flower.messages import Order, OrderRefused
from fl_lightning.flower.packing import VALUES, copy_model, examples_of, of_stage
from fl_lightning.flower.policy import MOST_CLIENTS, Policy, Refused, check_most, read_policy
from fl_lightning.flower.server.elsewhere import unknown_elsewhere
from fl_lightning.flower.server.remote_clients import STAGES, SiteFacts
from fl_lightning.flower.site.fit import AtSite, Fit
from fl_lightning.flower.site.memory import ClientSums
from fl_lightning.flower.site.order_queue import OrderResult
from fl_lightning.flower.site.site import Site
from fl_lightning.flower.transport.resident import log_to, serve
from fl_lightning.nas.one_shot import OneShot
from fl_lightning.nas.sub_networks.capability import affordable
from fl_lightning.sparsity.heads import OneExchange
from fl_lightning.sparsity.masks.mask import Mask

# options that switch off what only the server's Trainer does
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
    """Watches PyTorch's tensor creation, and raises before all tensors together have more entries than allowed."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most, self._made = most, 0
        self.refused: Refused | None = None  # the caller may turn the error into another one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("new_") or not any(isinstance(each, torch.Tensor) for each in args):
            self._made += max((_numbers(each, name) for each in args), default=0)
            if self._made > self._most:
                self.refused = Refused(
                    f"the model has too many parameters (most_parameters of site.yaml: {self._most}) when it "
                    f"creates a tensor by {name}{tuple(args)}"
                )
                raise self.refused
        return func(*args, **(kwargs or {}))


def _numbers(argument: Any, name: str) -> int:
    """Return how many entries a tensor has that PyTorch creates from an argument, e.g. from a shape."""
    if isinstance(argument, (list, tuple)) and all(isinstance(each, int) for each in argument):
        return math.prod(argument)
    is_length = name in ("arange", "linspace", "eye") and isinstance(argument, (int, float))
    return int(argument) ** (2 if name == "eye" else 1) if is_length else 0


def run_site(fit: Fit, policy: Policy) -> None:
    """Build a site's Trainer, and carry out the server's orders for one run."""
    places = policy.clients
    fit.queue.start_clock()

    class SiteCLI(FederatedCLI):
        """Lightning's command line for a fit at a site, which carries out the server's orders."""

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            """Build the Trainer with a callback that carries out the server's orders instead of running rounds."""
            federation = self._get(self.config_init, "federation")
            options = self._get(self.config_init, "trainer")
            calibrates = next(map(SiteCalibration, options["callbacks"] or ()), None)
            options["callbacks"] = [AtSite(federation, fit, policy, calibrates)]
            return super(FederatedCLI, self).instantiate_trainer(**kwargs)

        def instantiate_classes(self) -> None:
            """Build all objects; raise if the model is larger than the site allows."""
            limit = _LimitedTensors(policy.most_parameters)
            try:
                with limit:
                    super().instantiate_classes()
            except BaseException as error:  # noqa: BLE001 - it is raised again
                raise limit.refused or error from None

        def fit(self, model: Any, **kwargs: Any) -> None:
            """Send the server the site's numbers of examples and other facts, wait for its first order, and fit."""
            data = self.datamodule
            if problems := unknown_elsewhere(data):
                raise ConfigurationError("\n".join(problems))
            data.prepare_data()
            data.setup("fit")
            federation = self._get(self.config_init, "federation")
            per_pass = -(-max(data.clients.num_examples) // (data.batch_size or 1))
            batches = (federation.local_epochs or 0) * per_pass
            batches += (federation.local_steps or 0) * self.trainer.accumulate_grad_batches
            check_most(
                "batches of federation.local_epochs or local_steps", batches, policy.most_steps
            )
            largest = ""
            if policy.most_cost is not None and isinstance(model, OneShot):
                largest = str(affordable(model.networks, policy.most_cost))
                model.most_of_clients |= dict.fromkeys(places, model.space.parse(largest))
            facts = SiteFacts(
                clients=_sizes_at(data.clients, places),
                held_out={stage: _sizes_at(data.held_out(stage), places) for stage in STAGES},
                batch_size=data.batch_size,
                drop_last=data.drop_last,
                precision=str(self.trainer.precision),
                signing=policy.public_key,
                sum_key=policy.sum_key_fingerprint,
                most_bytes=policy.most_bytes,
                largest=largest,
            )
            fit.queue.answer(OrderResult(options=document_of(facts)))
            order = fit.queue.first_order()
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
    """Run a site's long-lived process, which answers the server's orders until it is told to end.

    Args:
        folder: folder of the site, with ``site.yaml``, and ``own.yaml``, the site's own options for every run.

    Raises:
        ConfigurationError: if one of these files cannot be read.
    """
    policy = read_policy(Path(folder, "site.yaml"))
    log_to(Path(folder, "log", "resident.log"))
    own = read(Path(folder, "own.yaml"), "", remedy="fl-lightning network init writes one")
    serve_site(policy, own)


def serve_site(policy: Policy, own: Mapping[str, Any]) -> None:
    """Answer the server's orders at a site, until the process is told to end."""
    site = Site(policy, own)
    serve(
        policy.socket,
        site.handle,
        meanwhile=lambda: site.serve(lambda fit: run_site(fit, policy)),
    )


def _sizes_at(shards: FlatShards, places: Mapping[int, int]) -> dict[int, int]:
    return {client: int(shards.num_examples[at]) for client, at in places.items()}


class SiteCalibration:
    """Computes at a site what a sparse mask's calibration needs: scores of parameters, or sums for a linear head.

    Args:
        calibration: the configuration's calibration.
    """

    def __init__(self, calibration: MaskCalibration) -> None:
        self._calibration = calibration

    def mask_applier(self, trainer: Trainer) -> Callable[[Mask], None]:
        """Return a function that makes the entries of a sparse mask trainable, in the Trainer's module and optimizer."""
        return self._calibration.mask_applier(trainer).apply

    def sums(self, trainer: Trainer, order: Order) -> Iterator[ClientSums]:
        """Yield sums over the clients that a server's order names, with the order's model; the module stays unchanged."""
        fit, options = self._calibration.head_fit, order.options
        with scoring(trainer) as visit:
            copy_model(visit.module, order.tensors)
            owners = clients_as_owners(trainer.datamodule)  # type: ignore[attr-defined]
            if options["what"] == SCORES:
                device = trainer.strategy.root_device
                values = {n: t.to(device) for n, t in of_stage(VALUES, order.tensors).items()}
                ids = options["version"], options["round"]
                score = self._calibration.scores.score(visit, owners, values, ids)
                for client, count in examples_of(order).items():
                    found = score(client, count)
                    yield client, found.num_examples, found.sums
            elif isinstance(fit, OneExchange):
                head = linear_head(visit.module, self._calibration.heads(visit.module))
                for client in order.clients:
                    features = owner_features(visit, owners, client, head, fit)
                    sums = fit.sums(features, head.in_features, head.out_features)
                    yield client, 0, {HEAD: sums}
            else:
                raise OrderRefused("policy", "this run fits no head by one exchange of sums")

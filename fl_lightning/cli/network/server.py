"""The Trainer of a network's server, built by Lightning's command line; the clients train at sites."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from fl_lightning.callbacks.calibration.mask_calibration import MaskCalibration
from fl_lightning.cli.commands import run_lightning
from fl_lightning.cli.federated_cli import FederatedCLI, ended_with_a_sentence
from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure
from fl_lightning.core.plain_json import shown
from fl_lightning.federation import LAST, Federation, checkpoint_folders
from fl_lightning.flower.messages import Order
from fl_lightning.flower.packing import RunMask
from fl_lightning.flower.server.asynchronous import sites_for
from fl_lightning.flower.server.correspondence import Correspondence
from fl_lightning.flower.server.elsewhere import SCALED, DataElsewhere, check_over_network
from fl_lightning.flower.server.remote_clients import STAGES, ClientsAtSites, Counted, SiteFacts
from fl_lightning.flower.sums import check_encrypted
from fl_lightning.flower.transport.apps import CONFIGURATION
from fl_lightning.flower.transport.channel import Channel
from fl_lightning.secure.encrypted_mean import EncryptedMean
from fl_lightning.server.server import as_aggregator


def server_run(channel: Channel, options: Mapping[str, Any], folder: Path) -> None:
    """Train a run over remote sites, inside Flower's server app; the channel carries messages to the sites.

    Args:
        channel: channel to the sites.
        options: ``sites``, the number of sites to wait for; ``folder``, the run's working directory;
            ``words``, further words of the command line; ``resume``, a checkpoint; ``deadline`` of an
            order, in seconds; ``note``, a file into which the run writes its checkpoint's path.
        folder: folder of the app, with the configuration as ``run.yaml``.
    """
    words = shlex.split(str(options.get("words", "")))
    if options.get("resume"):
        words.append(f"--ckpt_path={options['resume']}")
    configuration = (folder / CONFIGURATION).read_text()
    os.chdir(str(options["folder"]))
    sys.path.append(os.getcwd())  # modules of the researcher's, as where the run was started
    note = Path(str(options["note"])) if options.get("note") else None
    correspondence = Correspondence(channel, deadline=float(options.get("deadline", 3600.0)))
    wanted = int(options["sites"])

    def run() -> None:
        try:
            run_server(configuration, words, correspondence, wanted=wanted, note=note)
        except ClientFailure as failure:  # the site's log has the traceback
            raise RoundFailure(str(failure)) from failure

    try:
        ended_with_a_sentence(run)
    except SystemExit as end:
        # Flower passes on what was printed when an app raises, but not when it exits
        print(end.code, flush=True)
        raise RoundFailure(str(end.code)) from None


class OverSites:
    """Connects a run to the sites that train its clients: greets the sites, and stops them at the end.

    Args:
        configuration: configuration of the run, as YAML; sites get it as well.
        correspondence: exchange of messages with the sites.
        wanted: number of sites that the run needs.
    """

    def __init__(self, configuration: str, correspondence: Correspondence, wanted: int) -> None:
        self._configuration, self._wanted = configuration, wanted
        self._correspondence = correspondence
        self._stops: dict[str, Order] = {}

    def begin(self, trainer: Trainer, data: Any, model: Any, checkpoint: Any) -> DataElsewhere:
        """Greet the sites, connect the federation to them, and return a data module that stands for their data.

        Args:
            trainer: Trainer of the fit that is about to begin.
            data: the configured data module.
            model: the configured module.
            checkpoint: path of the checkpoint to resume from; None for a new run.

        Raises:
            ConfigurationError: if the run cannot work over a network, or with these sites.
        """
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        federation = next(c for c in callbacks if isinstance(c, Federation))
        calibration = next((c for c in callbacks if isinstance(c, MaskCalibration)), None)
        check_over_network(trainer, model, data, federation)
        counted = Counted(_run_of(checkpoint))
        federation.handed.append(counted)

        def mask() -> RunMask | None:
            if calibration is None or calibration.mask is None:
                return None
            return RunMask(calibration.mask, calibration.version)

        remote = ClientsAtSites(self._correspondence, self._configuration, counted, trainer, mask)
        told = remote.greet(self._wanted)
        sizes = {client: n for facts in told.values() for client, n in facts.clients.items()}
        _check_encrypted(told, federation, model)
        _compare_sites(told, trainer.precision)
        _limit_clients(told, model)
        federation.clients_side = partial(
            sites_for(federation, counted, len(sizes)),
            remote=remote,
            signing_keys={s: bytes.fromhex(f.signing) for s, f in told.items() if f.signing},
        )
        self._stops = dict.fromkeys(told, remote.order("stop", (), ({}, {}), 0))
        first = told[min(told)]
        elsewhere = DataElsewhere(
            data,
            num_examples=sizes,
            held_out={
                stage: {c: n for each in told.values() for c, n in each.held_out[stage].items()}
                for stage in STAGES
            },
            batch_size=first.batch_size,
            drop_last=first.drop_last,
        )
        elsewhere.summed_by = remote.sums
        return elsewhere

    def end(self) -> None:
        """Tell all sites to end the run; their clients' state stays on the sites' disks."""
        self._correspondence.forget_posted()
        for _ in self._correspondence.ask(self._stops):
            pass


def run_server(
    configuration: str,
    words: Sequence[str],
    correspondence: Correspondence,
    *,
    wanted: int,
    note: Path | None = None,
) -> Any:
    """Train a configuration over remote sites, and return the Trainer.

    Args:
        configuration: configuration of the run, as YAML; sites get it as well.
        words: further words of the server's command line, e.g. for the folder of checkpoints.
        correspondence: exchange of messages with the sites.
        wanted: number of sites that the run needs.
        note: file into which the path of the last checkpoint is written before the first round.
    """
    run = OverSites(configuration, correspondence, wanted)
    trainers: list[Trainer] = []

    class ServerCLI(FederatedCLI):
        """Lightning's command line for a fit at the server, whose clients train at remote sites."""

        def fit(self, model: Any, **kwargs: Any) -> None:
            """Connect the federation to the sites, and train over the sites' clients."""
            checkpoint = kwargs.get("ckpt_path")
            elsewhere = run.begin(self.trainer, self.datamodule, model, checkpoint)
            self.datamodule = kwargs["datamodule"] = elsewhere
            folders = checkpoint_folders(self.trainer)
            if note is not None and folders:
                note.write_text(str((folders[0] / LAST).absolute()))
            super().fit(model, **kwargs)
            trainers.append(self.trainer)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        file.write_text(configuration)
        run_lightning(["fit", f"--config={file}", *words], cli=ServerCLI)
    run.end()  # not before the last model was tested
    return trainers[0]


def _check_encrypted(told: Mapping[str, SiteFacts], federation: Federation, model: Any) -> None:
    """Raise ConfigurationError if the run encrypts sums of updates and a site cannot take part in them."""
    hidden = as_aggregator(federation.aggregator).protection
    if isinstance(hidden, EncryptedMean):
        size = sum(each.numel() for each in model.parameters() if each.requires_grad)
        check_encrypted(told, hidden.agreed_sum, size)


def _limit_clients(told: Mapping[str, SiteFacts], model: Any) -> None:
    """Set in the supernet the largest sub-network that each client can train, by its site's compute limit.

    Raises:
        ConfigurationError: naming a site whose limit is no sub-network of the model.
    """
    for site, facts in told.items():
        if not facts.largest:
            continue
        try:
            largest = model.space.parse(facts.largest)
        except (ConfigurationError, AttributeError) as error:
            raise ConfigurationError(
                f"site {site}: its largest sub-network {shown(facts.largest)} is none of this model: {error}"
            ) from None
        model.most_of_clients |= dict.fromkeys(facts.clients, largest)


def _compare_sites(told: Mapping[str, SiteFacts], ours: str) -> None:
    """Warn if a site's precision differs from the configuration's, or its batch size or ``drop_last`` from the first site's.

    Raises:
        ConfigurationError: naming sites with a precision whose loss scale all clients would have to share.
    """
    if scaled := sorted(site for site, facts in told.items() if facts.precision == SCALED):
        raise ConfigurationError(
            f"precision {SCALED} cannot be used over a network, because sites do not share its loss scale: set "
            f"trainer.precision to bf16-mixed or 32-true in own.yaml of {', '.join(scaled)}"
        )
    for site, facts in told.items():
        if facts.precision != ours:
            rank_zero_warn(
                f"site {site} trains in precision {shown(facts.precision)}, not in {ours} as this configuration "
                "says: each site sets its precision in its own.yaml"
            )
    first = min(told)
    batches = {site: (facts.batch_size, facts.drop_last) for site, facts in told.items()}
    if others := sorted(site for site in told if batches[site] != batches[first]):
        rank_zero_warn(
            f"sites {', '.join(others)} have another batch_size or drop_last than site {first}, from whose "
            f"{batches[first][0]} examples a batch the server counts local steps, e.g. for learning rates by "
            "step: set them alike in each own.yaml"
        )


def _run_of(checkpoint: Any) -> str:
    """Return the id of the run that wrote a checkpoint; a new id without a checkpoint."""
    if checkpoint is None:
        return secrets.token_hex(16)
    import torch

    state = torch.load(checkpoint, map_location="cpu", weights_only=False)
    for callback in state["callbacks"].values():
        if isinstance(callback, dict) and "sites" in callback.get("stages", ()):
            return str(callback["stages"]["sites"]["run"])
    raise ConfigurationError(
        f"resume: {checkpoint} was not written by a run over a network: give a checkpoint of such a run"
    )

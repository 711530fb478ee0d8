"""Protection of updates at a site: vectors for hidden sums, noise, and its privacy cost.

The site does not trust the server. Noise comes from the site's own secure generator, whatever the configuration
says. The site derives the mechanism from the configuration, charges each update of a client to its ledger, and
refuses rounds and clients that the cohorts of the run do not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.update import ClientUpdate
from fl_lightning.data.cohorts.population import ClientIds
from fl_lightning.federation import Options, Run
from fl_lightning.flower.messages import Order, OrderRefused
from fl_lightning.flower.policy import Policy, Refused
from fl_lightning.flower.site.ledger import Ledger
from fl_lightning.privacy.mechanism import AccountedRun, Mechanism, Privacy
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.privacy.private_mean import clipped
from fl_lightning.secure.encrypted_mean import EncryptedSum
from fl_lightning.server.protected import NoiseShares, Protected, Terms
from fl_lightning.server.server import as_aggregator


class SitePrivacy:
    """Adds differentially private noise to the updates of a site's clients, and charges its cost to the ledger.

    Args:
        privacy: privacy of the configuration.
        run: rounds, cohorts and seed of the configuration.
        ledger: ledger for the run; a cost above its budget is refused.
        clients: clients of this site.
        secure: True to draw noise from the system's secure generator.

    Attributes:
        clip_norm: clipping norm of updates.
        mechanism: mechanism that adds the noise.
        cost: privacy cost of one update of a client.
    """

    def __init__(
        self,
        privacy: Privacy,
        run: AccountedRun,
        ledger: Ledger,
        clients: Iterable[int],
        *,
        secure: bool = True,
    ) -> None:
        self._run, self._ledger = run, ledger
        source = NoiseSource(None if secure else run.seed)
        self.clip_norm, self.mechanism = privacy.clip_norm, privacy.mechanism(run, source)
        self.cost = self.mechanism.release_cost
        ledger.check(self.cost, clients, run.most_turns(run.planned_rounds))
        self._cohorts: Iterator[tuple[int, ClientIds]] = iter(())
        self._present: tuple[int, ClientIds] | None = None

    def check_order(self, order: Order) -> None:
        """Raise if an order has clients outside the round's cohort or without budget, or asks for buffers.

        Raises:
            OrderRefused: naming the clients outside the cohort.
            Refused: if a client has no budget left.
        """
        if order.round >= self._run.planned_rounds:
            raise OrderRefused(
                "policy",
                f"round {order.round} is beyond the {self._run.planned_rounds} planned rounds",
            )
        if self._present is None or self._present[0] > order.round:
            self._cohorts = enumerate(self._run.cohorts(self._run.planned_rounds))
            self._present = next(self._cohorts)
        while self._present[0] < order.round:
            self._present = next(self._cohorts)
        cohort = set(self._present[1].tolist())
        if others := [client for client in order.clients if client not in cohort]:
            raise OrderRefused(
                "policy", f"clients {others} are not in the cohort of round {order.round}"
            )
        if not order.options.get("buffers_stay", True):
            raise OrderRefused(
                "policy", "the order asks for buffers, which would leave without noise"
            )
        self._ledger.check(self.cost, order.clients)

    def charge(self, clients: Iterable[int]) -> None:
        """Charge each client's privacy budget for one update, before the update leaves."""
        self._ledger.charge(self.cost, clients)

    def noisy(self, update: ClientUpdate, round_index: int) -> ClientUpdate:
        """Return the update with a clipped and noisy delta, as it leaves the site."""
        delta, _ = clipped(update.delta, self.clip_norm)
        release = self.mechanism.client_release(round_index, self.clip_norm)
        return replace(update, delta=delta if release is None else release(delta, update.client_id))


def hidden_at_site(
    options: Options, run: Run, num_rounds: int | None, policy: Policy, ledger: Ledger
) -> tuple[Protected | None, SitePrivacy | None]:
    """Return the secure or encrypted sum of a run at a site, and the noise on updates, each None if not used.

    Args:
        options: options of the federation, from the server.
        run: run of the site.
        num_rounds: planned number of rounds.
        policy: policy of the site.
        ledger: records the privacy that the clients have spent, in this run and others.

    Raises:
        ConfigurationError: if updates cannot be hidden over a network, or the run exceeds the budget.
    """
    aggregator, private = as_aggregator(options.aggregator), options.client_privacy
    if private is None or not private.clients_add_noise:
        policy.check_unprotected("training" if private is None else type(private).__name__)
        return _sums_of(aggregator.protection, policy), None
    num_clients, cohort = len(run.data.clients), options.cohort
    accounted = AccountedRun(
        options.cohort,
        num_clients=num_clients,
        num_rounds=num_rounds,
        seed=options.seed,
        num_coordinates=sum(p.numel() for p in run.module.parameters() if p.requires_grad),
    )
    secure, protection = aggregator.noise_shares, aggregator.protection
    made = partial(
        SitePrivacy,
        private,
        ledger=ledger,
        clients=policy.clients,
        secure=private.secure_noise or not policy.seeded_noise,
    )
    if secure is None or protection is None:
        if private.is_for_sums:
            raise Refused(
                f"{type(private).__name__} has enough noise only in a sum, and the server would see single "
                "updates: use the aggregator SecureMean, or LocalDP"
            )
        return None, made(accounted)
    most = cohort.expected_size(num_clients) if cohort.has_fixed_size else num_clients
    protection.begin(Terms(most_clients=most, seed=options.seed))
    fewest = secure.fewest_survivors(most) if cohort.has_fixed_size else None
    privacy = made(replace(accounted, fewest_survivors=fewest))
    sums = secure.with_noise_shares(partial(_shares_of, privacy.mechanism))
    sums.clip_norm = privacy.clip_norm
    return _sums_of(sums.protection, policy), privacy


def _shares_of(mechanism: Mechanism[Any]) -> NoiseShares:
    assert mechanism.shares is not None, "others are refused, see `check_private`"
    return mechanism.shares


def _sums_of(protection: Protected | None, policy: Policy) -> Protected | None:
    if protection is not None and not protection.spans_network:
        raise ConfigurationError(
            f"federation.aggregator {type(protection).__name__} is only simulated with its present options: this "
            "site would have to show updates to the server"
        )
    is_encrypted = protection is not None and isinstance(protection.agreed_sum, EncryptedSum)
    if is_encrypted and policy.sum_key is None:
        raise ConfigurationError("EncryptedMean: this site's site.yaml has no sum_key")
    return protection

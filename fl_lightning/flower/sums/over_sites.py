"""How a server has the vectors of its clients added up where they are: by which scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fl_lightning.flower.server.correspondence import Correspondence
from fl_lightning.flower.sums.at_server import SumOverSites, WritesOrders
from fl_lightning.flower.sums.encrypted_at_server import EncryptedOverSites
from fl_lightning.secure.scheme import EncryptedSum
from fl_lightning.server.protected import SumsAtSites, SumsOverSites


def adds_over_sites(
    sums: SumsOverSites,
    correspondence: Correspondence,
    site_of: Mapping[int, str],
    keys: Mapping[str, bytes],
    write: WritesOrders,
    lost: Callable[[int, str], None],
    trained_on: Callable[[], str],
) -> SumsAtSites:
    """Return what adds up vectors at sites.

    Args:
        sums: what the aggregator says of them.
        correspondence: with the sites.
        site_of: the site of each client.
        keys: public signing keys by site, of those that have one.
        write: writes orders of the present round.
        lost: told whose vector will not be in the sum, and why; it may raise.
        trained_on: what clients of the present round have trained on, see `agreed.trained_on`.
    """
    if isinstance(sums.agreed_sum, EncryptedSum):
        return EncryptedOverSites(correspondence, site_of, write, lost)
    return SumOverSites(correspondence, site_of, keys, write, lost, trained_on)

"""A site, running: its resident process and Flower's node, and what hinders the node in a sentence."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from fl_lightning.flower.network.folder import SiteFolder
from fl_lightning.flower.network.probe import check_server, seconds_ahead
from fl_lightning.flower.network.programs import SITE_PROCESS, site_programs
from fl_lightning.flower.network.serving import free_port
from fl_lightning.flower.network.supervision import Ended, Program, Supervisor, backoff

PAUSE = 15.0
# seconds between two clocks that Flower allows, see flwr.common.constant
_MOST_AHEAD, _MOST_BEHIND = 5.0, 300.0
_REFUSED = re.compile(r"\b2004\b|\b2001\b|PermissionDenied|FLEET_NODE|activat", re.IGNORECASE)


class NodeEnds:
    """Says why Flower's node has ended, once for each reason, and when it is to start again.

    Args:
        site: whose node.
        say: tells people.
    """

    def __init__(self, site: SiteFolder, say: Callable[[str], None]) -> None:
        self._site, self._say = site, say
        self._said = ""

    def __call__(self, ended: Ended) -> float:
        """Return the seconds until it is started again."""
        site = self._site
        try:
            check_server(site.server, site.folder / "ca.crt")
        except (ConnectionError, ValueError) as error:
            return self._told(str(error), PAUSE)
        ahead = seconds_ahead(site.server, site.folder / "ca.crt")
        if ahead is not None and not -_MOST_BEHIND < ahead < _MOST_AHEAD:
            return self._told(_about_clock(ahead), PAUSE)
        if _REFUSED.search(ended.words):
            return self._told(
                f"the server does not let {site.name} in: its key is not registered there, or a site "
                "with the same key is, or was within the last minute, connected",
                PAUSE,
            )
        log = site.folder / "log" / "supernode.log"
        return self._told(
            f"Flower's node has ended with code {ended.code}: see {log}", backoff(ended)
        )

    def _told(self, reason: str, pause: float) -> float:
        if reason != self._said:
            self._say(f"{reason}. Trying again every {pause:g} s.")
        self._said = reason
        return pause


def _about_clock(ahead: float) -> str:
    how = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    return (
        f"this machine's clock is {how}, and the server lets sites in that are less than "
        f"{_MOST_AHEAD:.0f} s ahead and {_MOST_BEHIND:.0f} s behind: set the clock, e.g. by NTP"
    )


def site_supervised(
    site: SiteFolder, say: Callable[[str], None], *, process: str = SITE_PROCESS
) -> list[Program]:
    """Return the programs of a site, with sentences for what hinders them.

    Args:
        site: which.
        say: tells people.
        process: the function of its folder that its process consists of, ``module:function``.
    """
    return site_programs(site, runtime_port=free_port(), process=process, again=NodeEnds(site, say))


def reach(site: SiteFolder, say: Callable[[str], None]) -> None:
    """Wait until a site's server answers.

    Args:
        site: which.
        say: tells people.

    Raises:
        ConfigurationError: if the server is not the one of the site's network.
    """
    said = ""
    while True:
        try:
            check_server(site.server, site.folder / "ca.crt")
        except ConnectionError as error:
            if str(error) != said:
                say(f"{error}. Trying again every {PAUSE:g} s.")
            said = str(error)
            time.sleep(PAUSE)
        else:
            return


def join(site: SiteFolder, say: Callable[[str], None]) -> None:
    """Be a site of a network until a signal.

    Args:
        site: which.
        say: tells people.

    Raises:
        ConfigurationError: if the server is not the one of the site's network.
    """
    reach(site, say)
    with Supervisor(site_supervised(site, say)) as supervisor:
        say(f"{site.name} runs, for the server at {site.server}. Logs: {site.folder / 'log'}")
        supervisor.watch(lambda: False)

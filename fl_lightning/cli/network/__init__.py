"""The command ``fl-lightning network``: trains over a real network, through Flower.

Each subcommand is a function below; the function's arguments are the subcommand's options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.transport.resident import raising_at_signals
from fl_lightning.reports.screen import markdown

_say = partial(print, flush=True)
# options that may be given several times, which the parser cannot derive from a function's arguments
_SEVERAL = {
    "config": ("A YAML file of the run, as for fit; may be repeated, later files win.", True),
    "host": ("A further host name of the server; may be repeated.", False),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the subcommands of ``fl-lightning network`` to its parser."""
    commands = parser.add_subcommands(dest="action", required=True)
    for name, function in _COMMANDS.items():
        description = str(function.__doc__).splitlines()[0]
        own = type(parser)(prog=f"fl-lightning network {name}", description=description)
        own.add_function_arguments(function, as_group=False, skip={"options", *_SEVERAL})
        for option in _SEVERAL.keys() & function.__annotations__.keys():
            text, required = _SEVERAL[option]
            own.add_argument(f"--{option}", action="append", type=str, required=required, help=text)
        commands.add_subcommand(name, own, help=description)


def network(given: Any, *, options: Sequence[str]) -> None:
    """Run a subcommand of ``fl-lightning network`` with its parsed options."""
    try:
        import flwr.app  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            "network needs Flower: pip install 'fl-lightning[flower]'"
        ) from None
    function = _COMMANDS[given.action]
    own = {"options": options} if "options" in function.__annotations__ else {}
    with raising_at_signals():
        function(**given[given.action].as_dict(), **own)


def init(
    *,
    out: str,
    server: str,
    sites: str | None = None,
    public_keys: str | None = None,
    host: Sequence[str] | None = None,
) -> None:
    """Write the folder of a new network of server and sites: certificates, keys, start commands.

    Args:
        out: the network's folder; must not exist.
        server: HOST:PORT under which sites reach the server.
        sites: names of the sites, whose keys are made here: hospital_a,hospital_b.
        public_keys: instead of sites: files written by network keys: hospital_a.public,hospital_b.public.
        host: further host names of the server.
    """
    from fl_lightning.flower.network.folder import PublicKeys, make_network, parse_sites

    if (sites is None) == (public_keys is None):
        raise ConfigurationError(
            "init: give either --sites, the names of the sites, or --public_keys, the files of their public keys"
        )
    told = [PublicKeys.read(Path(file)) for file in (public_keys or "").split(",") if file]
    names = sites or ",".join(one.site for one in told)
    keys = {one.site: one for one in told} or None
    made = make_network(Path(out), server, parse_sites(names), hosts=host or [], keys=keys)
    _say(f"network: {made.folder}")
    secret = "it has no secret" if told else "where nobody else can read it"
    for name in made.sites:
        _say(f"site:    give {made.site(name)} to {name}, {secret}")
    _say(f"server:  {made.server / 'start.sh'}")
    _say(f"next:    {made.folder / 'README.md'} says what to do, on a page")


def keys(*, folder: str, site: str) -> None:
    """Make a site's key pairs, at the site; only the public keys leave the site.

    Args:
        folder: the site's folder.
        site: the site's name: hospital_a.
    """
    from fl_lightning.flower.network.folder import make_keys

    own = Path(folder)
    public = make_keys(own, site)
    file = own / f"{site}.public"
    file.write_text(yaml.safe_dump(asdict(public), sort_keys=False))
    _say(f"keys:    {own / 'key'}, {own / 'signing.key'}: they stay here")
    _say(f"signing: {public.signing}, which peers in every site.yaml must say of {public.site}")
    _say(
        f"next:    give {file} to the server's people, for fl-lightning network init --public_keys"
    )


def serve(*, folder: str, bind: str = "127.0.0.1", control_port: PositiveInt | None = None) -> None:
    """Run the network's server until Ctrl-C.

    Args:
        folder: the network's folder.
        bind: address to listen at for sites; 0.0.0.0 for all of this machine's addresses.
        control_port: port of Flower's control interface, on this machine only; the server's port + 1 if null.
    """
    from fl_lightning.flower.network.folder import NetworkFolder
    from fl_lightning.flower.network.serving import serving
    from fl_lightning.flower.network.supervision import Supervisor

    served = NetworkFolder.read(Path(folder))
    port = control_port or served.port + 1
    with (
        Supervisor() as supervisor,
        serving(served, supervisor, bind=bind, control_port=port),
    ):
        _say(f"sites:   {', '.join(served.sites)}; their keys are registered")
        _say(f"for sites: {bind}:{served.port}, HTTPS, only what sites need")
        if bind == "127.0.0.1":
            _say("         from this machine only: --bind 0.0.0.0 opens it to others")
        _say(
            f"control: 127.0.0.1:{port}, from this machine only: everybody who reaches it can have the"
        )
        _say("         server and all sites run code, and register keys. Never open it to others")
        _say(f"logs:    {served.server / 'log'}")
        _say(f"next:    fl-lightning network run --folder {served.folder} --config run.yaml")
        supervisor.wait()


def join(*, folder: str, site: str | None = None) -> None:
    """Run a site, which trains its clients for the server, until Ctrl-C.

    Args:
        folder: the site's folder; the network's with --site.
        site: the site's name.
    """
    from fl_lightning.flower.network import serving
    from fl_lightning.flower.network.folder import SiteFolder

    own = Path(folder) if site is None else Path(folder, "sites", site)
    serving.join(SiteFolder.read(own), _say)


def run(
    *,
    folder: str,
    config: Sequence[str],
    sites: PositiveInt | None = None,
    resume: str | None = None,
    deadline: PositiveInt = 3600,
    options: Sequence[str] = (),
) -> None:
    """Train over the connected sites, at the server. Words after -- are options of the fit.

    Args:
        folder: the network's folder.
        config: YAML files of the run.
        sites: number of sites to wait for; all if null.
        resume: checkpoint to resume from, or last.
        deadline: seconds that a site may take for a round.
        options: options of the fit.
    """
    from fl_lightning.cli.commands import resolve
    from fl_lightning.flower.network.folder import NetworkFolder
    from fl_lightning.flower.network.following import carry_out
    from fl_lightning.flower.network.serving import control_of

    # sites have devices of their own
    configuration = resolve([*_words(config), *options, "--trainer.devices=1"])
    for name in _own_modules(configuration):
        _say(
            f"sites:   {name} is a module of this folder: each site must have it installed, and allow"
        )
        _say(f"         it in its site.yaml: classes: [{name}.*]")
    served = NetworkFolder.read(Path(folder))
    control = control_of(served)
    own = {
        "sites": sites or len(served.sites),
        "resume": resume or "",
        "deadline": float(deadline),
        "folder": str(Path.cwd()),
    }
    carry_out(control, _say, options=own, configuration=configuration)


def _own_modules(configuration: str) -> list[str]:
    """Return the Python modules in the current folder whose classes the configuration names, so that sites need them."""
    from fl_lightning.flower.layers import shared_part

    shared = yaml.safe_dump(shared_part(yaml.safe_load(configuration)))
    names = sorted(set(re.findall(r"class_path: (\w+)\.", shared)) - {"fl_lightning"})
    return [name for name in names if Path(name).is_dir() or Path(f"{name}.py").is_file()]


def status(*, folder: str) -> None:
    """Print which sites are connected to the server, and the state of each run.

    Args:
        folder: the network's folder.
    """
    from fl_lightning.flower.network.folder import NetworkFolder
    from fl_lightning.flower.network.following import last_log_line, runs, sites
    from fl_lightning.flower.network.serving import control_of

    served = NetworkFolder.read(Path(folder))
    control = control_of(served)
    _say(markdown(["site", "state", "last seen", "fl-lightning", "flwr"], sites(served, control)))
    known = runs(control)
    _say(f"\nruns: {len(known)}" if known else "\nno runs yet")
    if known:
        _say(markdown(["run", "state", "started"], known[:5]))
        _say(f"last line: {last_log_line(served)}")


def demo(
    *,
    config: Sequence[str],
    sites: str = "hospital_a,hospital_b,hospital_c",
    rounds: PositiveInt = 3,
    options: Sequence[str] = (),
) -> None:
    """Try out training over a network on this machine: its server and sites are removed afterwards.

    Args:
        config: YAML files of the run.
        sites: names of the sites.
        rounds: number of rounds.
        options: options of the fit.
    """
    from fl_lightning.cli.network.demo import compared_demo
    from fl_lightning.flower.network.folder import parse_sites

    compared_demo([*_words(config), *options], parse_sites(sites), rounds, _say)


_COMMANDS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (init, keys, serve, join, run, status, demo)
}


def _words(config: Sequence[str]) -> list[str]:
    """Return an option ``--config=…`` for each configuration file, for a fit's command line."""
    return [f"--config={path}" for path in config]

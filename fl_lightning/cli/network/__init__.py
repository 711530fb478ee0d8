"""The command ``fl-lightning network``: train over a real network, through Flower."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.transport.resident import raising_at_signals
from fl_lightning.reports.screen import markdown

_DEMO_SITES = "hospital_a,hospital_b,hospital_c"


def add_commands(parser: ArgumentParser, make: Callable[..., ArgumentParser]) -> None:
    """Give a parser the commands of a network.

    Args:
        parser: of ``fl-lightning network``.
        make: makes a parser.
    """
    commands = parser.add_subcommands(dest="action", required=True)
    for name, (add, _, description) in _COMMANDS.items():
        own = make(prog=f"fl-lightning network {name}", description=description)
        add(own)
        commands.add_subcommand(name, own, help=description)


def network(given: Any, *, options: Sequence[str]) -> None:
    """Run one of the commands.

    Args:
        given: its parsed options.
        options: words of the command line that go to its fits.

    Raises:
        ConfigurationError: if an option is refused.
    """
    try:
        import flwr.app  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            "network needs Flower: pip install 'fl-lightning[flower]'"
        ) from None
    act = _COMMANDS[given.action][1]
    with raising_at_signals():
        act(given[given.action], options)


def _add_init(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str, required=True, help="The network's folder; new.")
    parser.add_argument(
        "--server", type=str, required=True, help="HOST:PORT under which sites reach the server."
    )
    parser.add_argument(
        "--sites",
        type=str | None,
        default=None,
        help="Their names: hospital_a,hospital_b. Their keys are made here.",
    )
    parser.add_argument(
        "--public_keys",
        type=str | None,
        default=None,
        help="Instead: files that sites wrote by network keys: hospital_a.public,hospital_b.public.",
    )
    parser.add_argument(
        "--host", action="append", type=str, default=[], help="A further name of the server."
    )


def _init(given: Any, rest: Sequence[str]) -> None:
    from fl_lightning.flower.network.folder import PublicKeys, make_network, parse_sites

    if (given.sites is None) == (given.public_keys is None):
        raise ConfigurationError(
            "init: give either --sites, their names, or --public_keys, their files"
        )
    told = [PublicKeys.read(Path(file)) for file in (given.public_keys or "").split(",") if file]
    names = given.sites or ",".join(one.site for one in told)
    made = make_network(
        Path(given.out),
        given.server,
        parse_sites(names),
        hosts=given.host,
        keys={one.site: one for one in told} or None,
    )
    _say(f"network: {made.folder}")
    secret = "it has no secret" if told else "where nobody else can read it"
    for name in made.sites:
        _say(f"site:    give {made.site(name)} to {name}, {secret}")
    _say(f"server:  {made.server / 'start.sh'}")
    _say(f"next:    {made.folder / 'README.md'} says what to do, on a page")


def _add_keys(parser: ArgumentParser) -> None:
    parser.add_argument("--folder", type=str, required=True, help="The site's folder.")
    parser.add_argument("--site", type=str, required=True, help="Its name: hospital_a.")


def _keys(given: Any, rest: Sequence[str]) -> None:
    from fl_lightning.flower.network.folder import make_keys

    folder = Path(given.folder)
    file = folder / f"{given.site}.public"
    public = make_keys(folder, given.site)
    file.write_text(yaml.safe_dump(asdict(public), sort_keys=False))
    _say(f"keys:    {folder / 'key'}, {folder / 'signing.key'}: they stay here")
    _say(f"signing: {public.signing}, which peers in every site.yaml must say of {public.site}")
    _say(
        f"next:    give {file} to the server's people, for fl-lightning network init --public_keys"
    )


def _add_serve(parser: ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument(
        "--bind",
        type=str,
        default="127.0.0.1",
        help="Address to listen at for sites; 0.0.0.0 for all of this machine's.",
    )
    parser.add_argument(
        "--control_port",
        type=PositiveInt | None,
        default=None,
        help="Of Flower's own interfaces, on this machine only; the server's port + 1 if null.",
    )


def _serve(given: Any, rest: Sequence[str]) -> None:
    from fl_lightning.flower.network.folder import NetworkFolder
    from fl_lightning.flower.network.serving import serving
    from fl_lightning.flower.network.supervision import Supervisor

    served = NetworkFolder.read(Path(given.folder))
    port = given.control_port or served.port + 1
    with (
        Supervisor() as supervisor,
        serving(served, supervisor, bind=given.bind, control_port=port),
    ):
        _say(f"sites:   {', '.join(served.sites)}; their keys are registered")
        _say(f"for sites: {given.bind}:{served.port}, HTTPS, only what sites need")
        if given.bind == "127.0.0.1":
            _say("         from this machine only: --bind 0.0.0.0 opens it to others")
        _say(f"control: 127.0.0.1:{port}, from this machine only: whoever reaches it can have the")
        _say("         server and all sites run code, and register keys. Never open it to others")
        _say(f"logs:    {served.server / 'log'}")
        _say(f"next:    fl-lightning network run --folder {served.folder} --config run.yaml")
        supervisor.watch(lambda: False)


def _add_join(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--folder", type=str, required=True, help="The site's folder, or with --site the network's."
    )
    parser.add_argument("--site", type=str | None, default=None, help="Its name.")


def _join(given: Any, rest: Sequence[str]) -> None:
    from fl_lightning.flower.network.folder import SiteFolder
    from fl_lightning.flower.network.serving import join

    folder = Path(given.folder)
    join(SiteFolder.read(folder if given.site is None else folder / "sites" / given.site), _say)


def _add_run(parser: ArgumentParser) -> None:
    _add_folder(parser)
    _add_config(parser)
    parser.add_argument(
        "--sites", type=PositiveInt | None, default=None, help="How many to wait for; all if null."
    )
    parser.add_argument(
        "--resume", type=str | None, default=None, help="A checkpoint, or last, to go on from."
    )
    parser.add_argument(
        "--deadline",
        type=PositiveInt,
        default=3600,
        help="Seconds that a site may take for a round.",
    )


def _run(given: Any, rest: Sequence[str]) -> None:
    from fl_lightning.cli.commands import resolve
    from fl_lightning.flower.network.folder import NetworkFolder
    from fl_lightning.flower.network.following import carry_out
    from fl_lightning.flower.network.serving import control_of

    # sites have devices of their own
    configuration = resolve([*_configs(given.config), *rest, "--trainer.devices=1"])
    for name in _own_modules(configuration):
        _say(
            f"sites:   {name} is a module of this folder: each site must have it installed, and allow"
        )
        _say(f"         it in its site.yaml: classes: [{name}.*]")
    served = NetworkFolder.read(Path(given.folder))
    control = control_of(served)
    options = {
        "sites": given.sites or len(served.sites),
        "resume": given.resume or "",
        "deadline": float(given.deadline),
        "folder": str(Path.cwd()),
    }
    carry_out(control, _say, options=options, configuration=configuration)


def _own_modules(configuration: str) -> list[str]:
    """Modules of the current folder of which sites are to build classes."""
    from fl_lightning.flower.rules.layers import shared_part

    shared = yaml.safe_dump(shared_part(yaml.safe_load(configuration)))
    names = sorted(set(re.findall(r"class_path: (\w+)\.", shared)) - {"fl_lightning"})
    return [name for name in names if Path(name).is_dir() or Path(f"{name}.py").is_file()]


def _add_folder(parser: ArgumentParser) -> None:
    parser.add_argument("--folder", type=str, required=True, help="The network's folder.")


def _status(given: Any, rest: Sequence[str]) -> None:
    from fl_lightning.flower.network.folder import NetworkFolder
    from fl_lightning.flower.network.following import last_words, runs, sites
    from fl_lightning.flower.network.serving import control_of

    served = NetworkFolder.read(Path(given.folder))
    control = control_of(served)
    _say(markdown(["site", "state", "last seen", "fl-lightning", "flwr"], sites(served, control)))
    known = runs(control)
    _say(f"\nruns: {len(known)}" if known else "\nno runs yet")
    if known:
        _say(markdown(["run", "state", "started"], known[:5]))
        _say(f"last words: {last_words(served)}")


def _add_demo(parser: ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--sites", type=str, default=_DEMO_SITES, help="Their names.")
    parser.add_argument("--rounds", type=PositiveInt, default=3, help="Of the run.")


def _demo(given: Any, rest: Sequence[str]) -> None:
    from fl_lightning.cli.network.demo import compared_demo
    from fl_lightning.flower.network.folder import parse_sites

    compared_demo([*_configs(given.config), *rest], parse_sites(given.sites), given.rounds, _say)


_COMMANDS: dict[
    str, tuple[Callable[[ArgumentParser], None], Callable[[Any, Sequence[str]], None], str]
] = {
    "init": (_add_init, _init, "Write a network's folder: certificates, keys, start commands."),
    "keys": (_add_keys, _keys, "Make a site's keys, at the site: only public halves leave it."),
    "serve": (_add_serve, _serve, "Be the server, until Ctrl-C."),
    "join": (_add_join, _join, "Be a site, until Ctrl-C."),
    "run": (_add_run, _run, "Train, at the server. Words after -- are options of the fit."),
    "status": (_add_folder, _status, "Tell which sites are there, and how far runs are."),
    "demo": (_add_demo, _demo, "Try it: a server and sites on this machine, gone afterwards."),
}


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        action="append",
        type=str,
        required=True,
        help="The run, the same YAML files as for fit, one over the other.",
    )


def _configs(paths: Sequence[str]) -> list[str]:
    """Return the words that name configurations to a fit.

    Raises:
        ConfigurationError: if one of them is no file.
    """
    for path in paths:
        if not Path(path).is_file():
            raise ConfigurationError(f"config: there is no file {path}")
    return [f"--config={Path(path).absolute()}" for path in paths]


def _say(words: str) -> None:
    print(words, flush=True)

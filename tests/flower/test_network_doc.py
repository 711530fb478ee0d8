"""docs/network.md is true: its commands and options exist, its keys, categories and lists are the code's."""

import dataclasses
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from flower.test_same_bits import FAST, SLOW
from readme import ROOT

from fl_lightning.cli.commands import parser_of
from fl_lightning.flower.class_paths import DEFAULT
from fl_lightning.flower.layers import SHARED, SHARED_TRAINER
from fl_lightning.flower.messages import CATEGORIES
from fl_lightning.flower.policy import Policy

PAGE = (ROOT / "docs" / "network.md").read_text()
SECURE = (ROOT / "docs" / "secure.md").read_text()  # which has commands of a network, too
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_WORDS = 3900
SERVICES = ROOT / "docs" / "how_to" / "services"


def section(title):
    """What stands between a heading and the next of any level."""
    [found] = re.findall(
        rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", PAGE, re.DOTALL | re.MULTILINE
    )
    return found


def first_cells(text):
    """The names in the first column of the tables of a text."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def of_network():
    """Every command of the page that is one of ours, in a block or inside a sentence."""
    pages = PAGE + SECURE
    spans = [*re.findall(r"`((?:uv run [^`]*)?fl-lightning network [^`]+)`", pages)]
    blocks = "".join(re.findall(r"```bash\n(.*?)```", pages, re.DOTALL)).splitlines()
    return list(
        dict.fromkeys([*spans, *(line for line in blocks if "fl-lightning network" in line)])
    )


def test_the_page_is_short():
    assert len(PAGE.split()) <= MOST_WORDS


@pytest.mark.parametrize("command", of_network())
def test_commands_and_their_options_exist(command, monkeypatch):
    before, _, words = command.partition("fl-lightning network ")
    for extra in re.findall(r"--extra (\w+)", before):
        assert extra in PROJECT["optional-dependencies"]
    own, _, _ = words.partition(" -- ")
    monkeypatch.chdir(ROOT)
    given = parser_of("network").parse_args(shlex.split(own))
    for config in given[given.action].get("config") or ():
        assert config == "run.yaml" or Path(config).is_file()


def of_services():
    """The commands that the units and the compose file start, by what starts them."""
    units = {
        path.stem: re.search(r"^ExecStart=\S*/(fl-lightning .*)$", path.read_text(), re.MULTILINE)[
            1
        ]
        for path in sorted(SERVICES.glob("*.service"))
    }
    compose = yaml.safe_load((SERVICES / "compose.yaml").read_text())["services"]
    return units | {f"compose {name}": service["command"] for name, service in compose.items()}


@pytest.mark.parametrize("name", of_services())
def test_a_service_starts_a_server_or_a_site_and_ends_it_as_ctrl_c(name):
    program, network, *words = shlex.split(of_services()[name])
    assert (program, network) == ("fl-lightning", "network")
    given = parser_of("network").parse_args(words)
    assert given.action == ("serve" if "server" in name else "join")
    if name.startswith("compose "):
        services = yaml.safe_load((SERVICES / "compose.yaml").read_text())["services"]
        assert services[name.removeprefix("compose ")]["stop_signal"] == "SIGINT"
    else:
        assert "\nKillSignal=SIGINT\n" in (SERVICES / f"{name}.service").read_text()


def test_every_command_is_on_the_page_and_options_in_its_sentences_exist():
    listed = {words.split()[0] for c in of_network() for words in [c.split("network ")[1]]}
    actions = parser_of("network")._subcommands_action.choices
    assert listed == set(actions)
    ours = {o for parser in actions.values() for a in parser._actions for o in a.option_strings}
    named = set(re.findall(r"`(--[a-z_]+)[^`]*`", PAGE))
    # torchrun's, Flower's, the fit's
    assert named - {"--node_rank", "--insecure", "--config"} <= ours


def test_keys_of_a_site_and_their_defaults_are_those_of_its_policy():
    keys = first_cells(section("site.yaml: a site's identity and policy"))
    of_policy = {field.name: field.default for field in dataclasses.fields(Policy)}
    assert sorted(keys) == sorted(of_policy)
    for name in ("most_epsilon", "fewest_in_secure_sum", "most_bytes"):
        [told] = re.findall(rf"^\| `{name}` \| `(\w+)` \|", PAGE, re.MULTILINE)
        assert told == ("null" if of_policy[name] is None else str(of_policy[name]))


def test_what_a_site_takes_from_the_server():
    told = re.search(
        r"\*\*From the server:\*\*(.*?)\n- \*\*",
        section("own.yaml: the site's own layer"),
        re.DOTALL,
    )
    names = re.findall(r"`([a-z_]+)`", told[1])
    assert set(SHARED) <= set(names)
    assert set(names) <= {*SHARED, *SHARED_TRAINER}


def test_default_classes_are_listed():
    [told] = re.findall(
        r"Allowed by default: (.*?)\.\n", section("Which classes a site builds"), re.DOTALL
    )
    assert tuple(re.findall(r"`([^`]+)`", told)) == DEFAULT


def test_categories_of_failures_exist():
    named = first_cells(PAGE.split("The categories of failures")[1].split("\n## ")[0])
    assert named
    assert set(named) <= set(CATEGORIES)


def test_what_is_compared_with_its_simulation_is_listed():
    told = section("The same as a simulation")
    assert [
        name for name in (*FAST, *SLOW) if name.replace("plain", "plain FedAvg") not in told
    ] == []


def test_the_app_is_flowers_form():
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    app = tomllib.loads(text)["tool"]["flwr"]["app"]
    assert set(app) == {"publisher", "components", "config"}
    assert set(app["config"]) <= {"sites", "folder", "words", "resume", "deadline"}


def test_the_code_runs(tmp_path):
    pytest.importorskip("flwr")
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"__file__": str(tmp_path / "server_app.py")}
    exec(compile(code, "page", "exec"), names)  # noqa: S102
    assert type(names["app"]).__name__ == "ServerApp"

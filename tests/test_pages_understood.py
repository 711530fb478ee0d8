"""What pages say to write and to type is understood: their YAML, and the commands of pages that no other test reads."""

import importlib.util
import inspect
import pkgutil
import re
import runpy

import pytest
import yaml
from readme import ROOT, commands, words_of
from test_readme_session import NOT_TYPED

from fl_lightning.cli import main
from fl_lightning.cli.commands import parser_of
from fl_lightning.cli.configs import with_paths
from fl_lightning.experiments.experiment import Experiment

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("algorithms/*.md"))]
ALGORITHMS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in (ROOT / "configs" / "algorithms").glob("*.yaml")
}
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
# whose blocks have a test of their own
READ_ELSEWHERE = {"coming_from", "extending", "sweeps", "experiments", "network"}
READ_ELSEWHERE |= {
    "architecture_search",
    "networks_of_all_sizes",
    "own_spaces",
    "search_without_training",
    "search_results",
}


def blocks(page):
    """The YAML of a page that is part of a fit's configuration."""
    found = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [block.rstrip("\n") for block in found]


BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    if page.stem not in READ_ELSEWHERE
    for number, block in enumerate(blocks(page))
    if yaml.safe_load(block) not in ALGORITHMS.values()  # test_algorithm_configs runs those
]
# the first is the one that test_configs runs, the others are run by test_pages
_, *PRIVATE = re.findall(
    r"^(uv run fl-lightning fit .*)$", (DOCS / "privacy.md").read_text(), re.MULTILINE
)
RUN = [
    *PRIVATE,
    *(command for command in commands() if command not in NOT_TYPED),
    *(command for command, why in NOT_TYPED.items() if why.startswith("test_configs runs it")),
]
OF_FITS = ("fit", "validate", "test", "predict", "compare")
COMMANDS = {
    tuple(words_of(command)): None
    for page in PAGES
    if page.stem not in READ_ELSEWHERE
    for command in commands(page.read_text())
    if words_of(command)[0] == "fl-lightning"
    and words_of(command)[1] not in ("init", "configs", "--version")  # typed as they are
    and re.search(r" -|report \S", command)  # more than a command's name
}
for typed in RUN:
    COMMANDS.pop(tuple(words_of(typed)), None)


def understood(arguments, monkeypatch, capsys):
    """Return the whole configuration that a command line asks for; nothing is trained."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["fl-lightning"])
    end = arguments.index("--") if "--" in arguments else len(arguments)
    with pytest.raises(SystemExit) as exit_:
        main([*arguments[:end], "--print_config", *arguments[end:]])
    said = capsys.readouterr()
    assert exit_.value.code == 0, said.err
    return said.out


@pytest.mark.parametrize("block", BLOCKS)
def test_yaml_is_understood(block, tmp_path, monkeypatch, capsys):
    (tmp_path / "own.yaml").write_text(block)
    layers = ["--config", QUICKSTART, "--config", str(tmp_path / "own.yaml")]
    shown = understood(["fit", *layers], monkeypatch, capsys)
    for name in re.findall(r"class_path: ([\w.]+)", block):
        assert re.search(rf"class_path: [\w.]*\b{name.rpartition('.')[2]}\n", shown), name


def with_quickstart(words):
    """Replace the reader's own configurations, which have no folder, by the quickstart."""
    names = ("FILE", "NAME", "config.yaml", "experiment.yaml", "mine.yaml", "run.yaml")
    return with_paths([QUICKSTART if word in names else word for word in words])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_is_understood(command, monkeypatch, capsys):
    _, name, *words = command
    monkeypatch.chdir(ROOT)
    if name not in OF_FITS:
        own = words[: words.index("--")] if "--" in words else words
        parser_of(name).parse_args(with_quickstart(own))
    elif any(word.endswith("help") for word in words):
        main([name, *words])
        assert "federation." in capsys.readouterr().out
    else:
        assert "class_path: " in understood([name, *with_quickstart(words)], monkeypatch, capsys)


def test_the_experiment_on_its_page_is_one():
    (block,) = blocks(DOCS / "experiments.md")
    experiment = Experiment(**yaml.safe_load(block))
    assert [variant.name for variant in experiment.all_variants] == ["dense", "from it"]


def test_benchmarks_that_pages_name_are_there():
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"python -m (benchmarks[.\w]*)", text))
    assert len(named) > 5
    for name in named:
        assert importlib.util.find_spec(name), name


def test_classes_functions_and_files_that_pages_name_are_there():
    text = "".join(page.read_text() for page in PAGES)
    dotted = set(re.findall(r"`(fl_lightning(?:\.\w+)+)`", text))
    files = set(re.findall(r"`((?:fl_lightning|tests|configs|docs)/[\w/.]+)`", text))
    assert len(dotted) > 20
    assert len(files) > 10
    for name in dotted:
        pkgutil.resolve_name(name)
    assert not {name for name in files if not (ROOT / name).exists()}


def test_every_algorithm_is_on_one_page_as_its_configuration_has_it():
    sections = [
        section
        for page in PAGES
        if page.parent.name == "algorithms"
        for section in page.read_text().split("\n## ")
        if "**Configuration**" in section
    ]
    named = [re.search(r"`configs/algorithms/(\w+)\.yaml`", s).group(1) for s in sections]
    assert sorted(named) == sorted(ALGORITHMS)
    for name, section in zip(named, sections, strict=True):
        assert (
            yaml.safe_load(re.search(r"```yaml\n(.*?)```", section, re.DOTALL).group(1))
            == (ALGORITHMS[name])
        )


def as_shown(default):
    """Return a parameter's default as pages write it."""
    if default is inspect.Parameter.empty:
        return "required"
    known = {"None": "`null`", "<factory>": "`[]`", "True": "`true`", "False": "`false`"}
    return known.get(str(default), f"`{default}`")


def defaults(section):
    """Options of the classes that a section names, and what pages may say of their defaults."""
    found = {}
    for name in set(re.findall(r"\bfl_lightning\.[\w.]*\b[A-Z]\w+", section)):
        module, _, cls = name.rpartition(".")
        parameters = inspect.signature(getattr(importlib.import_module(module), cls)).parameters
        for option, parameter in parameters.items():
            found.setdefault(option, set()).add(as_shown(parameter.default))
    return found


OPTION = re.compile(r"^\|(?: `\w+` \|)? `(\w+)` \| (required|`[^`]*`) \| \S", re.MULTILINE)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "| option | default |" in p.read_text()], ids=lambda p: p.stem
)
def test_options_and_their_defaults_are_those_of_the_classes(page):
    for section in page.read_text().split("\n## "):
        known = defaults(section)
        for option, default in OPTION.findall(section):
            assert default in known.get(option, ()), f"{page.name}: {option}"


def test_pictures_of_partitions_are_drawn_by_their_script(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["draw_partitions.py", str(tmp_path)])
    runpy.run_path(str(DOCS / "how_to" / "draw_partitions.py"), run_name="__main__")
    page = (DOCS / "partitions.md").read_text()
    shown = set(re.findall(r"\(partitions/(\w+\.png)\)", page))
    assert {path.name for path in tmp_path.iterdir()} == shown
    assert {path.name for path in (DOCS / "partitions").iterdir()} == shown

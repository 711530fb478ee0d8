"""What pages show runs and does what they say: their Python, YAML and commands; links lead somewhere."""

import json
import re
import runpy
import shlex
import sys

import numpy as np
import pytest
import torch
import yaml
from readme import ROOT, words_of
from small_sets import write_idx
from test_pages_understood import PRIVATE, QUICKSTART, understood

from fl_lightning import ClientEvaluation, FederatedDataModule, standard_callbacks
from fl_lightning.cli import main
from fl_lightning.data import Digits

DOCS = ROOT / "docs"
READ = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("algorithms/*.md"))]
LANGUAGES = ("bash", "python", "text", "toml", "yaml")


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run_block(block, names=None):
    """Run Python of a page and return the names that it defines."""
    names = {} if names is None else names
    exec(compile(block, "a page", "exec"), names)  # noqa: S102 - our own words
    return names


# pages whose Python has a test of its own, and where; all others run here, from top to bottom
OWN_PYTHON = {
    **dict.fromkeys(["coming_from", "data", "get_started", "reports", "terminal"], "test_pages.py"),
    "architecture_search": "nas/test_architecture_search_doc.py",
    "extending": "test_extending.py",
    "language_models": "test_how_to.py",
    "network": "flower/test_network_doc.py",
    "own_spaces": "nas/test_own_spaces.py",
    "sweeps": "experiments/test_sweeps_doc.py",
}
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])


@pytest.mark.parametrize(
    "page",
    [p for p in READ if "\n```python\n" in p.read_text() and p.stem not in OWN_PYTHON],
    ids=lambda page: page.stem,
)
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_the_python_of_a_page_runs(page):
    names = {}
    for block in blocks(page):
        run_block(block.replace("max_epochs=20", "max_epochs=1"), names)


def test_python_that_does_not_run_here_runs_elsewhere():
    for page, test in OWN_PYTHON.items():
        assert blocks(f"{page}.md")
        assert page in (ROOT / "tests" / test).read_text()


@pytest.mark.parametrize("page", READ, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_says_its_language(page):
    """So that no command and no Python escapes the tests; what a program prints is text."""
    for language, block in FENCE.findall(page.read_text()):
        assert language in LANGUAGES or language.startswith("{"), block
        if language == "text":
            assert not re.match(r"(uv|pip|python|torchrun|fl-lightning|import|from) ", block), block


def test_the_python_of_the_page_on_data_does_what_is_said():
    # whose other blocks are scripts
    arrays, targets, sensor = (block for block in blocks("data.md") if "trainer.fit" not in block)
    names = run_block(arrays)
    names["data"].setup("fit")
    assert len(names["data"].clients) == 2
    assert len(set(run_block(targets)["data"].labels)) == 3
    run_block(sensor, names)
    examples = torch.ones(1, 1000), torch.tensor([3]), 50, [1]
    inputs, label = names["Sensor"]().apply(*examples)
    assert label == 3
    np.testing.assert_allclose(inputs.mean(), 1.5, atol=2e-3)
    assert torch.equal(inputs, names["Sensor"]().apply(*examples)[0])
    data = FederatedDataModule(
        Digits(seed=0), num_clients=3, example_transforms=[names["Sensor"]()]
    )
    data.setup("fit")
    assert data.train_batch(data.clients[1][:4])[0].shape == (4, 1, 8, 8)


SHORT = (
    "--trainer.max_epochs 1 --trainer.enable_progress_bar false --trainer.devices 1 --report false"
    " --federation.local_epochs null --federation.local_steps 1 --test_after_fit false"
)


@pytest.mark.parametrize("command", PRIVATE)
@pytest.mark.filterwarnings("ignore:privacy:UserWarning")
def test_commands_on_privacy_run(command, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    main([*words_of(command)[1:], *SHORT.split()])
    assert list(tmp_path.rglob("best.ckpt"))


def test_the_block_on_privacy_is_understood(tmp_path, monkeypatch, capsys):
    [block] = blocks("privacy.md", "yaml")
    (tmp_path / "block.yaml").write_text(block)
    layers = ["--config", QUICKSTART, "--config", str(tmp_path / "block.yaml")]
    shown = yaml.safe_load(understood(["fit", *layers], monkeypatch, capsys))
    said = shown["federation"]["privacy"]["init_args"]
    assert said["adaptive_clip"]["quantile"] == 0.5
    assert said["epsilon"] == 8.0


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_the_python_on_reports_makes_the_files_that_it_names(tmp_path):
    [block] = blocks("reports.md")
    run_block(block)
    folder = tmp_path / "runs" / "mine" / "version_0"
    files = {path.name for path in folder.iterdir()}
    assert {"report.html", "figures", "rounds.jsonl", "partition.csv"} <= files
    (folder / "report.html").unlink()
    page = (DOCS / "reports.md").read_text()
    command = re.search(r"uv run fl-lightning (report .*)", page).group(1)
    main(command.replace("quickstart", "mine").split())
    assert (folder / "report.html").exists()


def test_the_yaml_on_reports_is_of_a_callback():
    [block] = blocks("reports.md", "yaml")
    [callback] = yaml.safe_load(block)["trainer"]["callbacks"]
    assert callback["class_path"] == "fl_lightning.ClientEvaluation"
    assert ClientEvaluation(**callback["init_args"])._local is not None


def test_the_python_on_the_terminal_leaves_a_log_file(tmp_path):
    [block] = blocks("terminal.md")
    run_block(block)
    assert "| INFO | round 2/2: " in next(tmp_path.rglob("run.log")).read_text()


def test_the_table_on_the_terminal_has_every_companion():
    page = (DOCS / "terminal.md").read_text()
    named = re.findall(r"^\| `(\w+)(?:\(\w+\))?` \|", page, re.MULTILINE)
    assert set(named) == {type(callback).__name__ for callback in standard_callbacks()}


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
def test_the_port_of_flowers_example_is_on_the_page_and_trains(tmp_path):
    pytest.importorskip("torchvision")
    assert blocks("coming_from.md") == [(DOCS / "how_to" / "from_flower.py").read_text()]
    write_idx(tmp_path / "data" / "MNIST" / "raw", num_train=160)
    names = runpy.run_path(str(DOCS / "how_to" / "from_flower.py"))
    trainer, data = names["trainer"], names["data"]
    assert trainer.global_step == trainer.current_epoch == 3  # rounds
    assert [len(client) for client in data.clients] == [24] * 4  # 60 % of 40
    record = names["federation"].rounds.record
    assert len(record.finished) == 2
    losses = trainer.callback_metrics
    assert 0 < losses["test_loss"] < 1
    assert torch.isfinite(losses["clients/test_loss_mean"])  # each client's own fifth


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
def test_the_port_of_flowers_example_trains_as_yaml(tmp_path, monkeypatch):
    pytest.importorskip("torchvision")
    write_idx(tmp_path / "data" / "MNIST" / "raw", num_train=160)
    [script], layers = blocks("coming_from.md"), blocks("coming_from.md", "yaml")
    (tmp_path / "my.py").write_text(script.partition("\nseed_everything(0)")[0])
    for name, layer in zip(("base.yaml", "mine.yaml"), layers, strict=True):
        (tmp_path / name).write_text(layer)
    monkeypatch.syspath_prepend(tmp_path)
    [command] = blocks("coming_from.md", "bash")
    main(shlex.split(command)[1:])
    [rounds] = tmp_path.rglob("rounds.jsonl")
    lines = [json.loads(line) for line in rounds.read_text().splitlines()]
    assert len(lines) == 3
    assert all("clients/val_loss_mean" in str(line) for line in lines)  # as Flower: every round


def test_the_script_of_a_project_has_the_options_that_the_page_names(tmp_path, monkeypatch, capsys):
    [block] = blocks("get_started.md")
    page = (DOCS / "get_started.md").read_text()
    words = re.search(r"`python (main.py fit [^`]*)`", page)[1].split()
    main(["init", "my_project"])
    monkeypatch.chdir("my_project")
    monkeypatch.syspath_prepend(tmp_path / "my_project")
    monkeypatch.setattr(sys, "argv", [*words, "--print_config"])
    with pytest.raises(SystemExit) as end:
        run_block(block, {"__name__": "__main__"})
    shown = yaml.safe_load(
        capsys.readouterr().out.partition("seed_everything")[2].partition("\n")[2]
    )
    assert end.value.code == 0
    assert shown["model"]["lr"] == 0.1
    assert shown["data"]["source"]["init_args"]["batch_size"] == 32


def test_every_family_of_the_decision_table_has_a_page():
    links = re.findall(r"\]\(algorithms/(\w+)\.md", (DOCS / "which_algorithm.md").read_text())
    assert set(links) >= {path.stem for path in (DOCS / "algorithms").glob("*.md")} - {
        "attacks",  # not for use
        "published",
    }


PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / ".github").rglob("*.md"),
    ]
)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(path):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_inside_the_repository_leads_somewhere(page):
    for link in _LINK.finditer(without_code(page.read_text())):
        target, _, anchor = link["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {link['target']}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {link['target']}"


_SOURCE = re.compile(r"[A-Z][\w-]+(?: et al\.|(?:, [A-Z]\w+)* and [A-Z]\w+)\s(?:19|20)\d\d")


@pytest.mark.parametrize("page", READ, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_source_is_a_link(page):
    assert not _SOURCE.findall(_LINK.sub("", without_code(page.read_text())))


def test_every_page_can_be_reached_from_the_readme():
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for link in _LINK.finditer(without_code(page.read_text())):
            target = link["target"].partition("#")[0]
            if target and "://" not in target:
                ahead.append((page.parent / target).resolve())
    pages = {
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "algorithms").glob("*.md"),
    }
    assert {page.name for page in pages - seen} <= {"index.md"}


def test_every_name_that_a_round_logs_is_explained():
    page = (ROOT / "docs" / "logged.md").read_text()
    code = "\n".join(path.read_text() for path in (ROOT / "fl_lightning").rglob("*.py"))
    rooms = "round|privacy|calibration|head|mask|search|recalibration"
    names = set(re.findall(rf'"((?:{rooms})/\w+)"', code))
    assert len(names) > 25
    assert not {name for name in names if f"`{name}`" not in page}
    explained = set(re.findall(rf"`((?:{rooms})/\w+)`", page))
    assert not {name for name in explained if name not in code}

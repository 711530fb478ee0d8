"""The commands search and latency, mistakes included."""

import shlex
import time
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli import main
from fl_lightning.nas import NASBench201
from fl_lightning.nas.spaces.named import described_space, named_space

SPACE = ["--space", "nas_bench_201", "--channels", "4", "--cells", "1"]
SMALL = [*SPACE, "--side", "8", "--batch_size", "4"]


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_latency_then_search_under_it(tmp_path, capsys):
    timing = ["--rounds", "2", "--calibration", "3", "--held_out", "3"]
    main(["latency", *SPACE, "--side", "8", "--out", "laptop.json", *timing])
    assert "rank correlation" in capsys.readouterr().out
    limits = ["--constraint", "flops<=1e6", "--constraint", "latency_ms<=1000"]
    words = ["search", *SMALL, "--latency", "laptop.json", *limits, "--budget", "8"]
    main([*words, "--score", "synflow", "--export", "best.yaml"])
    said = capsys.readouterr().out
    assert "latency_ms" in said
    assert "held-out networks" in said
    command = said.splitlines()[-1].removeprefix("next:     fl-lightning ")
    assert command.startswith("fit --config best.yaml --data=")
    rows = [line for line in said.splitlines() if line.startswith("|") and "~" not in line]
    assert max(map(len, rows)) <= 80
    content = yaml.safe_load((tmp_path / "best.yaml").read_text())
    best = content["model"]["init_args"]["network"]["init_args"]
    space = described_space(best.pop("space"))
    found = space.parse(best.pop("architecture"))
    network = space.build(found, **best)
    told = (tmp_path / "best.yaml").read_text()
    assert f"# params: {sum(p.numel() for p in network.parameters()):,}\n" in told
    assert "held-out" in told
    assert (tmp_path / "runs/search/front.png").exists()
    page = (tmp_path / "runs/search/report.html").read_text()
    assert "<dd>flops&lt;=1e+06, latency_ms&lt;=1000</dd>" in page
    assert page.count(str(found)) >= 3  # the fact, the front's row and tooltip, the configuration
    assert len((tmp_path / "runs/search/evaluated.csv").read_text().splitlines()) == 9
    with pytest.raises(SystemExit, match=r"side \(8 there, 32 here"):
        main(["search", *SPACE, "--latency", "laptop.json"])


def test_the_next_command_can_be_pasted_into_a_shell(capsys):
    main(["search", *SMALL, "--score", "params", "--budget", "2", "--out", "two words"])
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next:     ")
    assert shlex.split(command)[:4] == ["fl-lightning", "fit", "--config", "two words/best.yaml"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["search", "--space", "nas_bench_202"], "Did you mean 'nas_bench_201'"),
        (["search", *SMALL, "--strategy", "evolutoin"], "strategy must be one of 'random'"),
        (["search", *SMALL, "--score", "synfolw"], "score must be one of synflow"),
        (["search", *SMALL, "--constraint", "flop<=1"], "constraint 'flop<=1' must be a cost"),
        (["search", *SMALL, "--constraint", "flops<=1"], "the closest has flops"),
        (["search", *SMALL, "--latency", "no.json"], "no.json cannot be read"),
        (["search", *SMALL, "--front", "joules"], "front must be one of the costs"),
        (["search", *SMALL, "--score", "accuracy"], "give --table"),
        (["search", *SMALL, "--score", "accuracy+params"], "or several of them"),
        (["search", *SMALL, "--images", "nowhere"], "images: there is no folder nowhere"),
        (
            ["search", *SMALL, "--images", ".", "--score", "params"],
            "by --score params does not use",
        ),
        (
            ["search", *SMALL, "--table", "t.csv", "--score", "snip"],
            "by --score snip does not read it",
        ),
        (["search", *SMALL, "--table", "t.csv"], "t.csv"),  # whose accuracy it would maximise
        (["search", *SMALL, "--batch_size", "1", "--score", "jacov"], "at least 2 images, got 1"),
        (["search", *SMALL, "--out", "/proc/x"], "out: /proc/x cannot be written"),
        (["search", *SMALL, "--sweep", "/proc/x.yaml"], "sweep: /proc/x.yaml cannot be written"),
        (["search", *SMALL, "--export", "."], "export: . cannot be written: it is a folder"),
        (
            ["latency", *SPACE, "--out", "/proc/x.json"],
            "out: /proc/x.json cannot be written",
        ),
        (["search", "--space", "small_vit", "--cells", "2"], "is not a space of cells"),
        (["latency", *SPACE, "--out", "no/x.json"], "there is no folder no"),
        (
            ["latency", *SPACE, "--out", "x.json", "--device", "quantum"],
            "device must be cpu, cuda or cuda:1, got 'quantum'",
        ),
    ],
)
def test_a_mistake_is_told_in_a_sentence(words, says, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    said = f"{end.value.code} {capsys.readouterr().err}"
    assert says in said
    assert "Traceback" not in said


def test_an_unwritable_folder_is_told_before_the_search(tmp_path):
    (tmp_path / "here").write_text("a file")
    begun = time.perf_counter()
    with pytest.raises(SystemExit, match="out: here/there cannot be written: here is a file"):
        main(["search", *SMALL, "--budget", "100000", "--out", "here/there"])
    assert time.perf_counter() - begun < 60
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_broken_image_is_named(tmp_path):
    for name in ("cats", "dogs"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.png").write_bytes(b"no image")
    with pytest.raises(SystemExit, match=r"images/(cats|dogs)/1\.png cannot be read"):
        main(["search", *SMALL, "--images", "images"])


@pytest.mark.parametrize("under", [[], ["space"], ["model", "init_args", "space"]])
def test_a_file_may_say_the_space_as_a_configuration_does(under, tmp_path):
    content = {"class_path": "fl_lightning.nas.ViT", "init_args": {"depths": [2, 3]}}
    for key in reversed(under):
        content = {key: content}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(content))
    assert named_space(str(tmp_path / "space.yaml")).depths == (2, 3)


@pytest.mark.parametrize(
    ("settings", "says"),
    [([1], "must be settings by name"), ({"stem": "eight"}, "stem must be a whole number")],
)
def test_a_file_with_settings_that_no_space_has_is_refused(settings, says, tmp_path):
    content = {"class_path": "fl_lightning.nas.ResNet", "init_args": settings}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit, match=says):
        main(["search", "--space", "space.yaml"])


def test_a_sweep_is_written_into_a_new_folder_and_over_no_file(tmp_path):
    words = ["search", *SMALL, "--sweep", "new/folder/nets.yaml"]
    main(words)
    written = (tmp_path / "new/folder/nets.yaml").read_text()
    assert yaml.safe_load(written)["pruner"] == "hyperband"
    with pytest.raises(SystemExit, match=r"sweep: new/folder/nets\.yaml exists: name another file"):
        main([*words, "--seed", "1"])
    assert (tmp_path / "new/folder/nets.yaml").read_text() == written


@pytest.mark.slow
def test_a_sweep_trains_the_networks_of_a_space(tmp_path, capsys):
    """Two trials of one round: the decisions are the sweep's options, and the best is a network."""
    main(["search", *SMALL, "--in_channels", "1", "--sweep", "nets.yaml"])
    assert "fl-lightning sweep --search nets.yaml" in capsys.readouterr().out
    content = yaml.safe_load((tmp_path / "nets.yaml").read_text())
    assert content["space"]["model.network.architecture.5"] == list(NASBench201.operations)
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    words = ["--trials", "2", "--workers", "1", "--out", "swept", "--pruner", "none"]
    small = ["--trainer.max_epochs", "1", "--data.init_args.num_clients", "2"]
    main(["sweep", "--search", "nets.yaml", "--config", str(quickstart), *words, "--", *small])
    best = yaml.safe_load((tmp_path / "swept/best.yaml").read_text())
    given = best["model"]["init_args"]["network"]["init_args"]
    assert len(given["architecture"]) == 6
    assert set(given["architecture"]) <= set(NASBench201.operations)

"""The commands of docs/privacy.md run, for a round; its YAML is understood."""

import re
import shlex
import sys

import pytest
import yaml
from readme import ROOT

from fl_lightning.cli import main

DOC = (ROOT / "docs" / "privacy.md").read_text()
# the first is the one that test_configs runs
_, *COMMANDS = re.findall(r"^uv run fl-lightning (fit .*)$", DOC, re.MULTILINE)
SHORT = (
    "--trainer.max_epochs 1 --trainer.enable_progress_bar false --trainer.devices 1 --report false"
    " --federation.local_epochs null --federation.local_steps 1 --test_after_fit false"
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.filterwarnings("ignore:privacy:UserWarning")
def test_commands_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    main([*shlex.split(command), *SHORT.split()])
    assert list(tmp_path.rglob("best.ckpt"))


def test_the_block_is_understood(tmp_path, monkeypatch, capsys):
    [block] = re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)
    (tmp_path / "block.yaml").write_text(block)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    files = [ROOT / "configs" / "quickstart.yaml", tmp_path / "block.yaml"]
    layers = [word for file in files for word in ("--config", str(file))]
    with pytest.raises(SystemExit) as end:
        main(["fit", *layers, "--print_config"])
    assert end.value.code == 0
    said = yaml.safe_load(capsys.readouterr().out)["federation"]["privacy"]["init_args"]
    assert said["adaptive_clip"]["quantile"] == 0.5
    assert said["epsilon"] == 8.0

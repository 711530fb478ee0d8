"""Malformed configurations end in one sentence: the option, what was given, what is allowed."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import refused_classes
import refused_options
from refused_rows import imported
from refused_runs import problems, said_by, words_of

from fl_lightning import ConfigurationError

ROWS = refused_classes.ROWS + refused_options.ROWS
# of the rows, one in so many is tried in every run of the tests: they take a second each
EVERY = 30


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{n} {row}", marks=[] if n % EVERY == 0 else pytest.mark.slow)
        for n, row in enumerate(ROWS)
    ],
)
def test_it_is_refused_in_a_sentence(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    code, told = said_by(words_of(row, tmp_path))
    assert not problems(row, code, told), told


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "federation:\n  cohort: {class_path: AllClients\n",
            "mine.yaml is not valid YAML: .* line 2",
        ),
        (
            "- federation\n",
            "mine.yaml is not valid: it contains no options, which are written as name: value",
        ),
    ],
)
def test_a_file_that_is_no_configuration_is_named(content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    Path("mine.yaml").write_text(content)
    code, told = said_by(["fit", "--config", "quickstart", "--config", "mine.yaml"])
    assert code
    assert re.search(said, " ".join(told.split()))


def test_there_are_many():
    assert len(ROWS) >= 1700
    assert len({row.option for row in ROWS}) >= 250


def test_a_sentence_with_faults_is_found_out():
    row = refused_options.ROWS[0]
    assert problems(row, 0, "") == ["accepted"]
    assert "traceback" in problems(row, 1, "Traceback (most recent call last): ValueError")
    assert f"does not say {row.option}" in problems(row, 1, "fl-lightning: it must be otherwise")


def is_for_a_constructor(row):
    """Whether the constructor itself must refuse: not a seed that is read later, not torch's own rules."""
    is_late = row.option.endswith("source.init_args.seed") and not isinstance(row.value, str)
    if row.python is None or is_late or row.python[0].startswith("torch."):
        return False
    return not row.option.startswith("model.init_args.optimizer.")


IN_PYTHON = {}
for a_row in filter(is_for_a_constructor, ROWS):
    IN_PYTHON.setdefault(a_row.python[0], []).append(a_row)


@pytest.mark.parametrize("class_path", IN_PYTHON)
def test_in_python_it_is_a_configuration_error_with_the_option_and_its_value(class_path):
    make = imported(class_path)
    of_torch = issubclass(make, torch.optim.Optimizer)
    params = {"params": [torch.nn.Parameter(torch.zeros(1))]} if of_torch else {}
    for row in IN_PYTHON[class_path]:
        built = {
            name: imported(value["class_path"])(**value.get("init_args", {}))
            if isinstance(value, dict) and "class_path" in value
            else value
            for name, value in row.python[1].items()
        }
        option, value = row.option.rpartition(".")[2], row.value
        with pytest.raises(ConfigurationError, match=option) as refused:
            make(**params, **built)
        assert isinstance(value, list | dict) or str(value) in str(refused.value), row

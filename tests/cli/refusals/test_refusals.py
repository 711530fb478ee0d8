"""Malformed configurations end in one sentence: the option, what was given, what is allowed."""

import sys
from pathlib import Path

import pytest

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


def test_there_are_many():
    assert len(ROWS) >= 1700
    assert len({row.option for row in ROWS}) >= 250


def test_a_sentence_with_faults_is_found_out():
    row = refused_options.ROWS[0]
    assert problems(row, 0, "") == ["accepted"]
    assert "traceback" in problems(row, 1, "Traceback (most recent call last): ValueError")
    assert f"does not say {row.option}" in problems(row, 1, "fl-lightning: it must be otherwise")


def test_in_python_it_is_a_configuration_error():
    """Values of the right type; what is of another one is the business of whoever calls."""
    wrong = []
    for row in ROWS:
        if (
            row.python is None
            or isinstance(row.value, str)
            or imported(row.python[0]).__module__.startswith("torch")
        ):
            continue
        class_path, options = row.python
        options = {
            name: imported(value["class_path"])(**value["init_args"])
            if isinstance(value, dict) and "class_path" in value
            else value
            for name, value in options.items()
        }
        try:
            imported(class_path)(**options)
        except ConfigurationError:
            continue
        except TypeError:  # a float where a whole number belongs, e.g.
            continue
        wrong.append((class_path, row.option.rpartition(".")[2], row.value))
    assert not [each for each in wrong if not isinstance(each[2], float) or each[2] != each[2]]

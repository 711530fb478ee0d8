"""The README, the pages that say what to type, and the commands in them, for the tests that type them."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PAGES = (
    *("get_started", "overview", "engines", "sparse", "experiments"),
    *("own_module", "export", "results", "benchmarks", "development"),
)
MANUAL = "\n".join(
    path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs" / f"{p}.md" for p in _PAGES))
)


def commands(text=MANUAL):
    """Every command of a text once: what ``&&`` joins, and those inside a sentence, too."""
    fences = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fences.findall(text) if language == "bash"]
    spans = re.findall(r"`((?:uv run|fl-lightning) [^`]+)`", fences.sub("", text))
    typed = "\n".join([*blocks, *(span.replace("\n", " ") for span in spans)])
    lines = [line for line in typed.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    joined = (part.strip() for line in lines for part in line.split("&&"))
    return list(dict.fromkeys(part for part in joined if part))


def words_of(command):
    """The words after ``uv run``, which only chooses the environment."""
    words = shlex.split(command, comments=True)
    program = re.match(r"uv run (--(?:extra|group) \w+ )?", command)
    return words[len(program[0].split()) :] if program else words


def first_with(words):
    """The first command of the manual that has these words."""
    found = [command for command in commands() if words in command]
    assert found, f"no command of the manual has the words {words!r}"
    return found[0]

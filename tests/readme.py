"""The README and the commands in it, for the tests that read or type them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def commands():
    """Every command of the README once: what ``&&`` joins, and those inside a sentence, too."""
    blocks = re.findall(
        r"^```(?:bash|sh|shell|console)\n(.*?)^```", README, re.DOTALL | re.MULTILINE
    )
    text = "\n".join([*blocks, *re.findall(r"`(uv run [^`]+)`", README)])
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    joined = (part.strip() for line in lines for part in line.split("&&"))
    return list(dict.fromkeys(part for part in joined if part))


def first_with(words):
    """The first command of the README that has these words."""
    found = [command for command in commands() if words in command]
    assert found, f"no command of the README has the words {words!r}"
    return found[0]

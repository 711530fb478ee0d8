"""Lines that stay at the bottom of a terminal, and what is printed above them."""

import io
import logging
import sys

from terminal_screen import Terminal, seen

from fl_lightning.reports.progress import run_line
from fl_lightning.reports.screen import StatusLines, in_blocks


def at_a_terminal(monkeypatch):
    """Have one terminal of 80 columns for standard output and standard error; return it."""
    monkeypatch.setenv("TERM", "xterm")
    found = Terminal()
    monkeypatch.setattr(sys, "stdout", found)
    monkeypatch.setattr(sys, "stderr", found)
    return found


def opened(*status):
    """Return a screen that shows some status lines."""
    screen = StatusLines()
    screen.open()
    screen.show(*status)
    return screen


def lines(terminal):
    return seen(terminal.getvalue().replace("\n", "\r\n"), 80)


def test_what_is_printed_scrolls_above_the_lines(monkeypatch):
    terminal = at_a_terminal(monkeypatch)
    screen = opened("bar 1/2", "  inner 3/5")
    print("a message that is much longer than the bar")
    print("two", "words", sep="\n", file=sys.stderr)
    assert lines(terminal) == [
        "a message that is much longer than the bar",
        *("two", "words", "bar 1/2", "  inner 3/5"),
    ]
    screen.show("bar 2/2")
    assert lines(terminal)[-2:] == ["words", "bar 2/2"]
    screen.close("done")
    print("after")
    assert lines(terminal)[-3:] == ["done", "after", ""]


def test_the_beginning_of_a_line_waits_for_its_end_and_no_color_is_kept_to(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = at_a_terminal(monkeypatch)
    screen = opened(run_line("round 1/2", 0.5, "", {}, 79))
    assert "━" in terminal.getvalue()
    screen.show("bar")
    print("begun ", end="", flush=True)
    assert lines(terminal) == ["bar"]
    screen.show("bar")
    print("and ended")
    print("without an end", end="")
    assert lines(terminal) == ["begun and ended", "bar"]
    screen.close()
    assert lines(terminal) == ["begun and ended", "without an end", ""]
    assert "\x1b[3" not in terminal.getvalue()


def test_handlers_write_above_the_lines_and_get_their_streams_back(monkeypatch):
    terminal = at_a_terminal(monkeypatch)
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("fl_lightning.somebody")
    for each in (handler, logging.lastResort):  # the second follows standard error by itself
        logger.addHandler(each)
    try:
        screen = opened("bar")
        logger.warning("careful")
        assert lines(terminal) == ["careful", "careful", "bar"]
        screen.close()
    finally:
        for each in (handler, logging.lastResort):
            logger.removeHandler(each)
    assert handler.stream is terminal
    assert sys.stdout is sys.stderr is terminal


def test_a_process_that_does_not_draw_clears_what_another_one_has_drawn(monkeypatch):
    terminal = at_a_terminal(monkeypatch)
    drawing, other = StatusLines(), StatusLines()
    drawing.open()
    drawing.show("bar 1/2", "inner")
    streams = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = terminal  # as the other process has them
    other.open(draws=False)
    print("from another process")
    assert lines(terminal) == ["from another process", ""]
    other.close()
    sys.stdout, sys.stderr = streams
    drawing.show("bar 2/2")
    assert lines(terminal) == ["from another process", "bar 2/2"]


def test_without_a_terminal_nothing_happens(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    screen = opened("bar")
    screen.close("done")
    assert not screen.is_open
    assert stream.getvalue() == ""
    assert sys.stderr is stream


def test_a_terminal_without_signs_gets_a_bar_of_letters(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    screen = opened(run_line("round 1/2", 0.5, "", {}, 79))
    screen.close()
    assert seen(raw.getvalue().decode("ascii").split("\x1b[J")[1], 80)[0].startswith(
        f"round 1/2  {'-' * 15}"
    )


def test_a_table_in_blocks_has_every_cell_once():
    head = ["variant", *(f"metric {i}" for i in range(7))]
    rows = [[name, *(f"{name}{i}" for i in range(7))] for name in ("a", "b")]
    text = in_blocks(head, rows, 40)
    assert max(map(len, text.splitlines())) <= 40
    for cell in [*head[1:], *rows[0][1:], *rows[1][1:]]:
        assert text.count(cell) == 1

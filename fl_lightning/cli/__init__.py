"""The command line: ``fl-lightning fit | validate | test | predict | compare | search | latency``."""

from fl_lightning.cli.command import main

__all__ = ["main"]

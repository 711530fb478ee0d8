"""The command line: ``fl-lightning fit | validate | test | predict`` and our own commands."""

from fl_lightning.cli.main import main

__all__ = ["main"]

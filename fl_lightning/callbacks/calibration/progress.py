"""A progress bar for what happens before the first round, in the style of the Trainer's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from fl_lightning.callbacks.progress import RoundProgressBar


@contextmanager
def progress_bar(trainer: Trainer, what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar inside this block, and give the function that moves it by one.

    It is ours, rich's or tqdm's as the Trainer's own bar is; none where that one is missing or disabled,
    nor in other processes than the first.

    Args:
        trainer: whose bar.
        what: the word beside it.
        total: how often it moves.
    """
    own = trainer.progress_bar_callback
    if isinstance(own, RoundProgressBar):
        with own.counting(what, total) as tick:
            yield tick
    elif isinstance(own, RichProgressBar) and own.is_enabled:
        from rich.console import Console
        from rich.progress import Progress

        # the common console is what it was when first used: maybe no terminal
        with Progress(console=Console(), transient=True) as rich_bar:
            task = rich_bar.add_task(what, total=total)
            rich_bar.refresh()  # a short one would be gone before it is drawn
            yield lambda: rich_bar.advance(task)
    elif isinstance(own, TQDMProgressBar) and own.is_enabled:
        with Tqdm(
            desc=what, total=total, leave=False, dynamic_ncols=True, file=sys.stdout
        ) as tqdm_bar:
            yield lambda: tqdm_bar.update() and None
    else:
        yield lambda: None

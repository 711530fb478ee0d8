"""``python -m fl_lightning`` is ``fl-lightning``."""

from fl_lightning.cli.main import main

if __name__ == "__main__":
    main()

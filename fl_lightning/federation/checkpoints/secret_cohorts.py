"""Cohorts that nobody can work out, where ε counts on that.

    cohort of round r:  drawn from BLAKE2b(secret, "cohort", r)

Sampling amplifies privacy towards those who do not know who took part. So cohorts do not follow from
``federation.seed``, which is in checkpoints and configurations, but from a secret of 256 bits of the
operating system. All processes have the same one, and a resumed run goes on with it: it is in a file
of its own, for its owner alone. Checkpoints hold a hash of it, which names the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import final

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import secret_seed
from fl_lightning.federation.checkpoints.run_folder import own_run_folder
from fl_lightning.federation.run import Run


@final
class SecretCohorts:
    """The secret from which a run draws its cohorts; all processes must make theirs together."""

    secret: int

    def __init__(self, run: Run) -> None:
        self._run = run
        self.use(run.ranks.gather(secret_seed())[0])

    def use(self, secret: int) -> None:
        """Draw the coming rounds from a secret."""
        self.secret = self._run.groups.seed = secret

    @property
    def file(self) -> Path:
        """File in which the first process keeps the secret."""
        folder = own_run_folder(self._run.trainer)
        return Path("." if "://" in folder else folder, _name(_hash(self.secret)))

    def announcement(self) -> str:
        """Return in words where the secret is kept."""
        return (
            f"privacy: cohorts are drawn from a secret. {self.file} keeps it once there is a checkpoint: "
            "resuming needs it, and ε does not hold towards who has it"
        )

    def saved(self) -> str:
        """Return what a checkpoint holds of the secret, which is in its file from then on."""
        if self._run.ranks.rank == 0 and not self.file.exists():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.file.with_suffix(".unfinished")
            unfinished.unlink(missing_ok=True)
            with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as to:
                to.write(f"{self.secret:x}\n")
            os.replace(unfinished, self.file)
        return _hash(self.secret)

    def resume(self, saved: str | None) -> None:
        """Draw from the secret of which a checkpoint holds the hash; refuse if it is not there."""
        if saved is None:
            raise ConfigurationError(
                "federation.privacy: cohorts of the checkpoint's run follow from its seed, so that its ε "
                "does not hold for who knows that: start without ckpt_path"
            )
        read = (_read(path) for path in self._places(_name(saved)))
        found = next((secret for secret in read if _hash(secret) == saved), None)
        if (known := self._run.ranks.gather(found)[0]) is None:
            raise ConfigurationError(
                f"federation.privacy: {_name(saved)} is missing, from which this run drew its cohorts: put "
                f"it into {self.file.parent}, or start without ckpt_path. It was in the folder of the "
                "run that wrote the checkpoint; with other cohorts ε would not be the same"
            )
        self.use(known)

    def _places(self, name: str) -> Iterator[Path]:
        folder = self.file.parent
        if (checkpoint := self._run.trainer.ckpt_path) is not None:
            yield from (parent / name for parent in list(Path(checkpoint).parents)[:2])
        yield folder / name
        yield from folder.parent.glob(f"*/{name}")


def _name(saved: str) -> str:
    return f"cohorts-{saved}.secret"


def _read(path: Path) -> int:
    """Secret in a file; 0 if there is none."""
    with suppress(OSError, ValueError):
        return int(path.read_text(), 16) % 2**256
    return 0


def _hash(secret: int) -> str:
    return blake2b(secret.to_bytes(32, "little"), digest_size=8).hexdigest()

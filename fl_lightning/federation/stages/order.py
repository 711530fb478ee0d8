"""The stages of a run, in the one order that makes sense.

devices, older models    who will send, and what they begin from
fp16 scale, masks, personal models, corrections    how clients train
the user's own
transport                what travels: compression, error feedback, bytes
staleness                how the server weighs what arrives
secure sums, privacy     what it may see; what it releases is made private before anything else
"""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stage, Stages
from fl_lightning.federation.stages.client_masks import MaskedClients, client_masks
from fl_lightning.federation.stages.clock import VirtualTime
from fl_lightning.federation.stages.corrector import Corrector
from fl_lightning.federation.stages.personaliser import Personaliser
from fl_lightning.federation.stages.secure_rounds import SecureRounds
from fl_lightning.federation.stages.transport import Transport
from fl_lightning.privacy.protected import Protected
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.updates.path import Step
from fl_lightning.updates.transform import UpdateTransform


def stages_of(
    run: Run,
    aggregator: Aggregator,
    time: VirtualTime,
    updates: Sequence[Step],
    download: Sequence[UpdateTransform],
    more: Sequence[Stage],
    private: Stage | None,
) -> Stages:
    """Return them.

    Args:
        run: whose they are.
        aggregator: how updates become one.
        time: what is simulated of it.
        updates: what happens to updates on their way.
        download: what happens to models on theirs.
        more: the user's own.
        private: what makes the run private; None if nothing.

    Raises:
        ConfigurationError: for what does not go together.
    """
    stages = time.who_sends(run.options.accumulate)
    stages.append(run.scaler)
    masks = client_masks(run.trainer)
    if masks is not None:
        is_waiting = time.rule is None
        stages.append(MaskedClients(run, masks, updates, download, is_waiting=is_waiting))
    stages.append(Personaliser(run))
    transport = Transport(run, updates, download)
    stages += [Corrector(run, aggregator, is_lossy=transport.is_lossy), *more, transport]
    stages += time.how_it_counts()
    if isinstance(aggregator, Protected):
        stages.append(SecureRounds(aggregator, run))
    if private is not None:
        stages.append(private)
    for stage in stages:
        stage.enter(run)
    return Stages(stages)

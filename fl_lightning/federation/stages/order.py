"""The stages of a run, in the one order that makes sense.

devices, older models    who will send, and what they begin from
fp16 scale, masks, personal models, corrections    how clients train
the user's own
transport                what travels: compression, error feedback, bytes
staleness                how the server weighs what arrives
secure sums, privacy     what it may see; what it releases is made private before anything else
"""

from __future__ import annotations

from fl_lightning.core.errors import ConfigurationError
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


def stages_of(run: Run, aggregator: Aggregator, time: VirtualTime, private: Stage | None) -> Stages:
    """Return them.

    Args:
        run: whose they are.
        aggregator: how updates become one.
        time: what is simulated of it.
        private: what makes the run private; None if nothing.

    Raises:
        ConfigurationError: for what does not go together.
    """
    options = run.options
    stages = time.who_sends(run.accumulate)
    stages.append(run.scaler)
    masks = client_masks(run.trainer)
    if masks is not None:
        stages.append(MaskedClients(masks, is_waiting=time.rule is None))
    stages.append(Personaliser(run))
    transport = Transport(run, options.updates, options.download)
    stages += [Corrector(run, aggregator, is_lossy=transport.is_lossy), *options.stages, transport]
    stages += time.how_it_counts()
    if isinstance(aggregator, Protected):
        stages.append(SecureRounds(aggregator, run))
    if private is not None:
        stages.append(private)
    if problems := [problem for stage in stages for problem in stage.problems(run)]:
        raise ConfigurationError("\n".join(problems))
    for stage in stages:
        stage.enter(run)
    return Stages(stages)

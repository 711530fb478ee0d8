"""What the server tells a site, an `Order`, and what the site tells the server, an `Answer`.

Both check themselves when they are made: what can be made can be sent and read, and what is read is
what was made. Equal messages have equal bytes, see `fl_lightning.flower.wire.container`.

An answer names its order by the `digest` of the order's bytes. An order that is repeated, byte for
byte, is the same order: its answer counts once.
"""

from fl_lightning.flower.wire.answer import Answer
from fl_lightning.flower.wire.client_answer import ClientAnswer
from fl_lightning.flower.wire.failures import CATEGORIES, Failure
from fl_lightning.flower.wire.fields import check_site, package_version
from fl_lightning.flower.wire.order import JSON, KINDS, Kind, Order, digest
from fl_lightning.flower.wire.plain_json import MessageError

__all__ = [
    "CATEGORIES",
    "JSON",
    "KINDS",
    "Answer",
    "ClientAnswer",
    "Failure",
    "Kind",
    "MessageError",
    "Order",
    "check_site",
    "digest",
    "package_version",
]

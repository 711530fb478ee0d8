"""A user's ``training_step`` as a function of tensors, and the limits of such a function."""


class CannotStack(Exception):  # noqa: N818 - a finding, not a fault
    """Raised if clients cannot train in slots (many clients as one batch); the message gives the reason."""


class CannotPad(CannotStack):
    """Raised if batches cannot be padded; clients may still train in slots with whole batches."""

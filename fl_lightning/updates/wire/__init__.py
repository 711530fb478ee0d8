"""The binary format of messages."""

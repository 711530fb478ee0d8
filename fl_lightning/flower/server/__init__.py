"""The server side of a network, whose clients are at sites."""

"""Floor 2: an update on its way from a client to the server."""

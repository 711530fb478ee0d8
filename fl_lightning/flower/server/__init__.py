"""The server of a network: its clients' side of a round is sites elsewhere."""

"""One-shot networks: which sub-networks train, on which client, and how one is evaluated."""

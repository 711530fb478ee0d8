"""Who takes part in a round: samplers over what the server knows of clients."""

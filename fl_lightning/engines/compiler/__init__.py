"""Steps that are compiled, or recorded and replayed."""

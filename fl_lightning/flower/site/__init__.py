"""A site: orders in, answers out; a Trainer that follows them, and the data that stay here."""

"""A site: orders in, answers out; a Trainer that follows them, and what stays here."""

"""Updates that the server cannot read: secure sums and homomorphic encryption.

From bottom to top: integers of updates (`ring`, `sum_quantiser`); secrets (`entropy`, `keys`,
`signing`, `pads`, `shamir`, `graph`); the protocol (`session`, `messages`, `wire`, `client` with
`client_checks` and `used_rounds`, `server` with `unmasking`); in one process (`simulation`, and
`shortcut` with `unit_seconds`, which only counts); a sum a round (`secure_sum`). Beside it, `ckks`
and `paillier`.

What a secure sum hides: every vector, from a server and from fewer clients than the threshold
together. What it shows: the sum, and who took part. What it does not stop: a client that adds
nonsense, and what can be told from the sum itself, against which noise is added.
"""

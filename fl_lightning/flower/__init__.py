"""The same YAML over a real network: Flower carries the bytes, sites train with a warm Trainer.

What travels is in `messages`, and how it is written and checked in `wire`; what a site allows in
`policy`, and what that is made of in `rules`.
"""

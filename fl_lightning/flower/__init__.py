"""The same YAML over a real network: Flower carries the bytes, sites train with a warm Trainer.

What travels is in `messages` (what orders and answers say), `wire` (how they are written) and
`plain_json`; what a site allows in `policy`, with `class_paths` (what may be built) and `layers`
(what of a configuration is the site's own).
"""

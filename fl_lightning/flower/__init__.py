"""The same YAML over a real network: Flower carries the bytes, sites train with a warm Trainer.

What travels is in `messages` (what orders and answers say), with `client_answer`,
`failures` and `fields`, and in `wire` (how they are written) and `plain_json`; what a site allows in
`policy`, with `site_file`, `class_paths` (what may be built) and `layers` (what of a configuration is
the site's own).
"""

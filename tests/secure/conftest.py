"""Secure sums need the extra ``secure``: without it their tests are left out."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("cryptography") else ["test_*.py"]

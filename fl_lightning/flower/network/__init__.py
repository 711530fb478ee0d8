"""A network of a server and its sites: its folder, its keys, its programs."""

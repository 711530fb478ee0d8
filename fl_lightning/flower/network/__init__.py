"""A network of a server and sites: folder, keys, programs."""

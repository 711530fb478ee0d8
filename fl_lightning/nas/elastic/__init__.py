"""Layers of which a part can run: sub-networks as views of the largest network's weights."""

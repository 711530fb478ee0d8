"""The way of bytes between the server and a site."""

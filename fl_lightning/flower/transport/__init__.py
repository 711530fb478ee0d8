"""Transport of bytes between the server and the sites."""

"""The three services. They never import one another; their common concepts live in `common`."""

"""The state between two steps as a folder: atomic, with checksums, for any placement."""

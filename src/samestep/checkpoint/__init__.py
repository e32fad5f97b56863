"""The state between two steps as a folder: atomic, sealed, free of placement."""

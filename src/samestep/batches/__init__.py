"""A global batch: taken apart, told from others, and cut into rows."""

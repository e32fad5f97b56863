"""A global batch: parsed, fingerprinted, and cut into rows."""

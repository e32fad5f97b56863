"""A language model: what comes next in a text."""

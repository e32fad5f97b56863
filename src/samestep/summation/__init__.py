"""The same parentheses anywhere: the canonical tree, and partial sums across workers."""

"""Sums in the same order on any placement: the canonical tree, and partial sums across workers."""

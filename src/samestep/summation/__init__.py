"""Sums in the same order on any placement: the canonical tree, and the exchange of partial sums."""

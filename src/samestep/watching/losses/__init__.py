"""The forms of losses: which means and sums over rows are not those of the whole batch."""

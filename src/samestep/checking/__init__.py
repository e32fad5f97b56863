"""Where two placements part, and why: records steps, compares the recordings, explains the difference."""

"""`samestep doctor`: a description of a machine, and small runs that test samestep on it."""

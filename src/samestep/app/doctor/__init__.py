"""What `samestep doctor` finds on a machine, and whether the promise holds there."""

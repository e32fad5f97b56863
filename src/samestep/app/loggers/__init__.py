"""Where a run's numbers and pictures go."""

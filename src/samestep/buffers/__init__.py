"""A module's buffers through a step: normalisation statistics, policies, and the check for changes."""

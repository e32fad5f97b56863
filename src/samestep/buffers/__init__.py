"""A module's buffers through a step: norms, policies, the watch."""

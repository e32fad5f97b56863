"""A module's buffers through a step: normalisation statistics and policies."""

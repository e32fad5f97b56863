"""Memory that the workers of a host share, and messages through it."""

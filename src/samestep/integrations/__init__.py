"""Towers in the training loops of other packages."""

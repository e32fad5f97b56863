"""Detects what a tower's pass must not do. Nothing here changes what a step computes."""

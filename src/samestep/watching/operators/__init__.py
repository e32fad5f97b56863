"""The operators that torch runs, and what their results depend on."""

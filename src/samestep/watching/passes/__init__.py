"""What goes from one tower's pass into another, found by following values through operators."""

"""What a pass must not do, and how it is detected: nothing here changes what a step computes."""

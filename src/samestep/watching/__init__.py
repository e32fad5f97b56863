"""What a pass must not do, and how it is seen: nothing here changes what a step computes."""

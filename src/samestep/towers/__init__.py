"""A global batch in, `p.grad` out: the loop over towers, and one optimizer step."""

"""The loader: one global order of the examples, and a random stream for each of them."""

"""The loaders: one global order of the examples, or T shards, and a random stream for each example."""

"""The loaders: examples in one global order, or in T shards, with a random stream for each example."""

"""Files on disk -> tensors."""

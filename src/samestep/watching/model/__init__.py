"""What passes must not change: the model's tensors, modes and settings, generators, and optimizers."""

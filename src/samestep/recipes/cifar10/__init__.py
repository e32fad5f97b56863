"""CIFAR-10, as the classic tutorial had it."""

"""CIFAR-10, as in TensorFlow's classic tutorial."""

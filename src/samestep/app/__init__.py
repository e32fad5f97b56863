"""What is around a step in a program: settings, launch, training, evaluation, run folder, loggers."""

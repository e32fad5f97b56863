"""The program around a step: settings, launcher, training loop, evaluation, run folder, loggers."""

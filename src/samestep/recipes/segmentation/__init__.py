"""Semantic segmentation: a class for every pixel."""

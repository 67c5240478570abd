"""Benchmarks, each a module that prints one table: ``python -m benchmarks.loss``."""

"""The version of the package, in one place that can be read without importing torch."""

__version__ = "3.4.0"

"""Exact attention, its gradient and its double backward, for arrays of any framework."""

__version__ = "0.1.0"

"""Adapter names to verified local directories. No engine, no torch."""

"""Helpers for all of the package: caches, locks, names, files, records, warnings."""

"""Modules that all of the package leans on: caches, locks, names, files, pickles, warnings."""

"""Checks and scripts of the repository; not installed with the package."""

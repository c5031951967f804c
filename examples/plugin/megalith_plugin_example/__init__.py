"""Example of a Megalith plug-in package."""

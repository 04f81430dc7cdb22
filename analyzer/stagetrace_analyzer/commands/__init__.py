"""The commands of the console script, one a module."""

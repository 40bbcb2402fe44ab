"""The version of the client, in one place for the package and its build."""

__version__ = "0.1.0"

"""The package version; pyproject.toml, CMake and Bazel read it from here."""

__version__ = "0.1.0"

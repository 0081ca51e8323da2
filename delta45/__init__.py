"""delta45: a generator that turns one YAML file into a decoder chip."""

__version__ = "0.1.0"

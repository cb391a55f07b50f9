"""Settings: a frozen tree, one way to load it, and TOML text to write it back."""

from tailrace.config.errors import ConfigError
from tailrace.config.load import from_keywords, load, refuse_other_sections, with_options, with_values
from tailrace.config.render import render
from tailrace.config.tree import Config

__all__ = [
    "Config",
    "ConfigError",
    "from_keywords",
    "load",
    "refuse_other_sections",
    "render",
    "with_options",
    "with_values",
]

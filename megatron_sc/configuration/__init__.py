"""Configuration files: YAML whose keys are flags of Megatron and of the plugin. See docs/configs.md."""

from .files import Cluster, Configuration, ConfigurationError, Setting, read_files
from .flags import to_argv

__all__ = ["Cluster", "Configuration", "ConfigurationError", "Setting", "read_files", "to_argv"]

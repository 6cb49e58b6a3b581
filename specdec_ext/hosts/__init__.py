"""Speculation in other programs: those that call ``model.generate``, such as ``pipeline``, and vLLM."""

from specdec_ext.hosts.custom_generate import write_custom_generate
from specdec_ext.hosts.installed import Installed, install, uninstall
from specdec_ext.hosts.replacement import generate_function

__all__ = ["Installed", "generate_function", "install", "uninstall", "write_custom_generate"]

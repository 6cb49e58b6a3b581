"""Speculation for programs that call ``model.generate`` themselves, such as ``pipeline``."""

from specdec_ext.hosts.installed import Installed, install, uninstall

__all__ = ["Installed", "install", "uninstall"]

"""Programs that call ``model.generate`` themselves, and how they come to speculate."""

from specdec_ext.hosts.installed import Installed, install, uninstall

__all__ = ["Installed", "install", "uninstall"]

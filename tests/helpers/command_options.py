"""The extension of Sphinx that writes the options of commands, loaded from docs/_ext."""

import importlib.util
from types import ModuleType

from tests.helpers.field_tables import PAGES


def load_extension() -> ModuleType:
    """Return the module of the extension; it needs Sphinx."""
    spec = importlib.util.spec_from_file_location("command_options", PAGES.parent / "_ext" / "command_options.py")
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension

"""How Sphinx builds these pages: `make docs`. Neither the build nor a reader's browser fetches anything."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from cdpsim import __version__
from cdpsim.cli import main

project = "cdpsim"
copyright = "cdpsim contributors"
version = release = __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
extensions = ["myst_parser", "sphinx.ext.autodoc", "command_options"]
exclude_patterns = ["build"]

myst_enable_extensions = ["colon_fence", "deflist"]  # no mathematics: browsers would fetch what draws it
myst_heading_anchors = 4

smartquotes = False  # options begin with two dashes, and are copied
default_role = "code"  # docstrings have code in single backticks, as Markdown has
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"

html_theme = "furo"
html_title = "cdpsim"
html_static_path = ["static"]
html_css_files = ["calm.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f4e79", "color-brand-content": "#1f5f99"},
    "dark_css_variables": {"color-brand-primary": "#9ec5e8", "color-brand-content": "#8ab8e0"},
}


def write_explored_page(app: Sphinx, failure: Exception | None) -> None:
    """Write the page that the gallery links to, by the command that it shows."""
    gallery = Path(__file__).with_name("gallery.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ cdpsim (.*) -o explore\.html$", gallery, flags=re.MULTILINE)
    page = str(Path(app.outdir) / "explore.html")
    if failure is None and main([*command.split(), "-o", page, "--force", "--quiet"]) != 0:
        raise ExtensionError(f"{page} was not written")


def setup(app: Sphinx) -> None:
    """Connect what is written beside the pages."""
    app.connect("build-finished", write_explored_page)

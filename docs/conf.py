"""The site: pages in Markdown, the API from the docstrings, pictures and tutorials made anew."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import gallery  # noqa: E402

import blr_analysis  # noqa: E402

project, author = "blr_analysis", "The blr_analysis authors"
version = release = blr_analysis.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
html_theme = "furo"
html_title = f"blr_analysis {version}"
html_static_path: list[str] = []
exclude_patterns = ["_build", "_made/gallery.md", "_made/table1.md"]
myst_enable_extensions = ["dollarmath", "attrs_inline"]
myst_heading_anchors = 3
# Formulas are text here, as in the docstrings: nothing is fetched from elsewhere to show them.
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_rtype = False  # "Returns: the mean: …" names no type either
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
nitpicky = True
ROOMS = ("", "builtins", "torch", "blr_analysis", "blr_analysis.learning_rule.families")


def setup(app: Any) -> None:
    app.connect("builder-inited", lambda app: make_pages())
    app.connect("autodoc-process-docstring", say_as_it_stands, priority=100)
    app.connect("missing-reference", leave_importable)


def make_pages() -> None:
    """The pictures of the gallery, and every tutorial as a page and as a notebook."""
    made = HERE / "_made"
    gallery.make(made)
    gallery.tutorials(ROOT / "tutorials", made)


def say_as_it_stands(app: Any, what: str, name: str, obj: Any, options: Any, lines: Any) -> None:
    """Indented blocks are formulas and code; an attribute's "N: the examples" names no type."""
    for k in range(len(lines) - 2):
        this, blank, block = lines[k : k + 3]
        indent = len(this) - len(this.lstrip())
        opens = this.endswith(":") and not this.endswith("::") and not blank.strip()
        if opens and block.startswith(" " * (indent + 1)) and ">>>" not in block:
            lines[k] += ":"
    if what in ("property", "attribute", "data"):
        lines.insert(0, "\\")


def leave_importable(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A name that is not on a page stays plain where Python knows it; else the build fails."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].lstrip(".~")
    home = re.search(
        r"(blr_analysis(?:/\w+?)*?)(/__init__)?\.py:", f"{node.source or node.parent.source}:"
    )
    own = home.group(1).replace("/", ".") if home else ""
    holders = [own, f"{own}.{node.get('py:class') or ''}", "blr_analysis.errors", *ROOMS]
    return content if any(_known(f"{h}.{target}".strip(".")) for h in holders) else None


def _known(name: str) -> bool:
    """Whether a module of this name, or something in one, is there."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            declared = {**getattr(value, "__annotations__", {})}
            if not hasattr(value, part):
                return part in declared
            value = getattr(value, part)
        return True
    return False

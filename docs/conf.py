"""How Sphinx builds the pages: `make docs`.

The sources are read from the root of the repository, so that a link means the same here and where the Markdown itself is read.
"""

project = "slotmill"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "ops/runbook.md", "ops/grafana/README.md", "bench/README.md", "examples/README.md"]
exclude_patterns = [".*/**"]

extensions = ["myst_parser", "sphinx_click"]
myst_heading_anchors = 4  # named as GitHub names them
html_theme = "furo"
html_title = project

"""``python -m vcpo``."""

from vcpo.cli import app

app()

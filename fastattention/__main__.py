"""`python -m fastattention` is the command `fastattention`."""

from fastattention.cli.main import app

app(prog_name="fastattention")

"""`python -m fastattention` is the command `fastattention`."""

from fastattention.cli.main import app

if __name__ == "__main__":
    app(prog_name="fastattention")

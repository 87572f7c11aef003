"""``python -m unisono`` is the command ``unisono``."""

from unisono.cli.main import app

if __name__ == "__main__":
    app()

"""The program ``unisono``, also started as ``python -m unisono``.

An engine process, started by the installed program, imports this module again and calls nothing: no command line is
imported in it.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from unisono.config.bytecode import keep_bytecode

    keep_bytecode()  # before the imports that it serves
    from unisono.cli.main import app

    app()


if __name__ == "__main__":
    main()

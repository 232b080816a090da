"""`python -m flashbob_cupy` is the `flashbob` command."""

from flashbob_cupy.cli import main

main(prog_name="flashbob")

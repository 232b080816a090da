"""`python -m flashbob_cupy` is the `flashbob` command."""

from flashbob_cupy.cli import main

if __name__ == "__main__":
    main(prog_name="flashbob")

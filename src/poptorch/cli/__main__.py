"""`python -m poptorch.cli` is the command `poptorch`."""

from poptorch.cli import main

if __name__ == "__main__":
    main(prog_name="poptorch")

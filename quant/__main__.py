"""This file makes `python -m quant` the toolbox; `torchrun -m quant` starts it on every rank."""

from quant.cli.main import main

if __name__ == "__main__":
    main(prog_name="quant")

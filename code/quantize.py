"""quantize: make a network of integers of a trained one, the same on all machines. `python
code/quantize.py --help`
"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))

"""certify: certify a smoothed classifier on test images: a log of radii. `python code/certify.py
--help`
"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))

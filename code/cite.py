"""cite: the BibTeX entries of what made logs. `python code/cite.py
--help`
"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))

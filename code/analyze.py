"""analyze: turn logs into summaries, tables and plots. `python code/analyze.py --help`"""

import sys

from smoothadv.commands import main

if __name__ == "__main__":
    raise SystemExit(main(["analyze", *sys.argv[1:]]))

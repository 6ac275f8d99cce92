"""analyze: turn logs into summaries, tables and plots. `python code/analyze.py --help`"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))

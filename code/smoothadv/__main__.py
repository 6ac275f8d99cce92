"""``python -m smoothadv NAME ...`` is the console command ``smoothadv NAME ...``."""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

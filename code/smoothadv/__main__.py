"""``python -m smoothadv NAME ...`` is the console command ``smoothadv NAME ...``."""

from smoothadv.commands import main

if __name__ == "__main__":
    raise SystemExit(main())

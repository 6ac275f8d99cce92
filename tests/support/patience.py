"""How long tests wait for what other processes and threads do: no test knows how fast a machine is."""

HANG_SECONDS = 1800
"""After so long, what is waited for hangs: ten times what the slowest has taken on two slow, busy cores."""

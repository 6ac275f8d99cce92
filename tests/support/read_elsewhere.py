"""Reading files in another process, which must survive it and not grow by 300 MiB."""

import json
import sys
from pathlib import Path

_READ = """
import json, resource, sys
from pathlib import Path
from smoothadv.checkpoints import read_checkpoint
from smoothadv.base.errors import UserError
from smoothadv.records.readers import read_examples
readers = {"checkpoint": read_checkpoint, "examples": read_examples}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(Path(sys.argv[1]).iterdir()):
    for name in sys.argv[2:]:
        message = None
        try:
            readers[name](path)
        except UserError as error:
            message = str(error)
        print(json.dumps(message), flush=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def messages(warm, folder: Path, *readers: str) -> list[str | None]:
    """What each reader of files says of each file of a folder, None where it reads it."""
    done = warm.run([sys.executable, "-c", _READ, str(folder), *readers], folder)
    assert done.returncode == 0, (
        f"{done.returncode} after {done.stdout[-100:]}: {done.stderr[-300:]}"
    )
    *lines, growth = map(json.loads, done.stdout.splitlines())
    assert growth < 300
    return lines

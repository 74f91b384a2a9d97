"""After the warm-up no lookup compiles anything, and a read-only home does no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

USE_EVERYTHING = """
import sys
from pathlib import Path
import numpy as np
import cache
from cache import FeatureCache, Lookup, cpu_kernels, lru, slab_index, sources
from cache.errors import SourceError
from tests.cache_fixtures import new_device

def signatures():
    modules = (cpu_kernels, lru, slab_index, sources)
    found = {
        f"{module.__name__}.{name}": len(value.signatures)
        for module in modules
        for name, value in vars(module).items()
        if hasattr(value, "signatures")
    }
    assert len(found) > 15, found
    return found

cache.warm_up()
before = signatures()
root = Path(sys.argv[1])
for host_memory in (0, 4000, 1 << 20):
    features = FeatureCache.open(
        root, new_device(), table_memory_bytes=2048, host_memory_bytes=host_memory,
        num_frames=2, max_positions=32,
    )
    keys = np.arange(-3, 150, dtype=np.int64)
    keys.flags.writeable = False
    for repeat in range(3):
        with features.frame() as frame:
            out = np.zeros((len(keys), 4), np.float32)
            frame.lookup([Lookup(("a", "b"), keys, out), Lookup(("b",), keys[::2], out[:77])])
    features.check_integrity()
    features.close()
changed = {name: n for name, n in signatures().items() if n != before[name]}
assert not changed, changed
"""


def test_no_lookup_compiles_after_the_warm_up(tmp_path: Path) -> None:
    make_tables = (
        "import sys; from pathlib import Path; from cache.table import write_table; "
        "from tests.cache_fixtures import rows_of; "
        "[write_table(Path(sys.argv[1]) / n, [rows_of(range(200))], dim=4) for n in 'ab']"
    )
    for code in (make_tables, USE_EVERYTHING):
        run(code, str(tmp_path))


def test_a_home_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    """A file stands where the folder should be: as unwritable as it gets, even for root."""
    (tmp_path / "file").write_text("")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file"), "NUMBA_CACHE_DIR": ""}
    printed = run(
        "import cache.lru, os; print(os.environ['NUMBA_CACHE_DIR'])", environment=environment
    )
    assert "hotshelf-numba-" in printed


def run(code: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=ROOT, env=os.environ | (environment or {}), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout

"""The Dockerfile, as far as it can be checked without building an image."""

from __future__ import annotations

import re

from server.doctor import CUDA_MAJOR
from server.settings import read_settings
from tests.serving import ROOT

STAGES = {
    text.partition("\n")[0].rpartition(" AS ")[2]: text
    for text in re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
}


def environment(stage: str) -> dict[str, str]:
    """What the ENV instructions of a stage set."""
    text = STAGES[stage].replace("\\\n", " ")
    lines = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    return dict(pair.split("=", 1) for line in lines for pair in line.split())


def test_the_default_target_is_the_gpu() -> None:
    assert list(STAGES)[-1] == "gpu"


def test_the_environment_of_both_targets_is_one_that_the_server_takes() -> None:
    for stage in ("cpu", "gpu"):
        settings = read_settings({}, environment(stage))
        assert (settings.device, settings.host) == ("auto", "0.0.0.0")
        assert STAGES[stage].rstrip().endswith('ENTRYPOINT ["python", "-m", "server", "serve"]')


def test_caches_lie_where_the_user_of_the_image_may_write() -> None:
    text = STAGES["gpu"]
    variables = environment("gpu")
    for name in ("NUMBA_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert variables[name].startswith("/var/cache/hotshelf")
    assert text.index("chown -R hotshelf /repository /var/cache/hotshelf") < text.index("\nUSER ")


def test_the_gpu_target_has_libraries_of_one_cuda() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"cupy-cuda{CUDA_MAJOR}x==" in constraints
    constraints = (ROOT / "constraints-gpu.txt").read_text()
    assert re.search(rf"^nvidia-cuda-nvrtc=={CUDA_MAJOR}\.", constraints, re.MULTILINE)
    assert f"/nvidia/cu{CUDA_MAJOR}/lib:" in environment("gpu")["LD_LIBRARY_PATH"]

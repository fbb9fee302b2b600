"""Writes the lock files beside this script: `make lock`, or `python requirements/lock.py [--constraint FILE]`.

Everything that `pyproject.toml` asks for is resolved once, together, by pip's own resolver, so that any set of the
files fits together. Each file lists what its extra adds to `base.txt`, direct and transitive, by exact version; it
names no index and no download address, so that any mirror serves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
BASE = "base"
LAYERS = ("postgres", "redis", "replay", "cpu", "test")  # extras that get a file of their own
HEADER = "# Written by `make lock` from pyproject.toml; do not edit. {what}\n"


def resolve(requirements: Iterable[str], constraints: Iterable[str]) -> dict[str, str]:
    """Exact versions (name -> version) of the requirements and all they need, as pip would install them here.

    A local version label (`+cpu`) is dropped: the plain version takes whichever build the machine offers.
    Raises CalledProcessError when there is no solution; pip has then said why.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write("\n".join(constraints))
        pins.flush()
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", "-", "--constraint", pins.name, *requirements]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"].partition("+")[0]
        for item in report["install"]
    }


def write(layer: str, pins: Mapping[str, str], *, on_top_of_base: bool) -> None:
    """Replace one lock file."""
    what = f"What the extra `{layer}` adds." if on_top_of_base else "What every process of the product needs."
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    include = ["-r base.txt\n"] if on_top_of_base else []
    (HERE / f"{layer}.txt").write_text("".join([HEADER.format(what=what), *include, *lines]))
    print(f"requirements/{layer}.txt: {len(lines)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraint", type=Path, help="versions to keep to, one `name==version` a line")
    constraint: Path | None = parser.parse_args().constraint
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    needs: dict[str, list[str]] = {BASE: project["dependencies"]}
    needs |= {layer: project["optional-dependencies"][layer] for layer in LAYERS}

    wishes = constraint.read_text().splitlines() if constraint else []
    together = resolve([line for lines in needs.values() for line in lines], wishes)
    pins = [f"{name}=={version}" for name, version in together.items()]
    base = resolve(needs[BASE], pins)
    write(BASE, base, on_top_of_base=False)
    for layer in LAYERS:
        added = {name: version for name, version in resolve(needs[layer], pins).items() if name not in base}
        write(layer, added, on_top_of_base=True)


if __name__ == "__main__":
    main()

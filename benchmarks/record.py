"""What a benchmark leaves behind: benchmarks/results/NAME.json."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def device_name(count: bool = False) -> str:
    """The card's, or `cpu`."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    name = torch.cuda.get_device_name()
    return f"{torch.cuda.device_count()} x {name}" if count else name


def write_record(
    name: str, command: str, metrics: dict[str, float], packages: tuple[str, ...], folder: Path, device: str
) -> None:
    """Write it, with the versions of the packages that are there."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    record = {"name": name, "command": command, "device": device, "versions": versions, "metrics": metrics}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")

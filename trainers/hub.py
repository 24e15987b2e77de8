"""Models of the Hugging Face hub, as directories: what is loaded is a directory in every case."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

from rl_consistency.trainers.data.foreign_files import explained
from rl_consistency.trainers.policy_files import PolicyError

PATTERNS = ("*.json", "model*.safetensors", "*.jinja", "*.txt", "*.model")
"""Files that are fetched: no code, no weights in other formats."""


def model_directory(source: Path | str) -> tuple[Path, str | None]:
    """The directory of a model, and its commit where `source` is the name of a model of the hub,
    `owner/name` or `owner/name@revision`.

    What is missing in the cache of the hub is downloaded. PolicyError, with its remedy, where the
    hub gives no such model.
    """
    if isinstance(source, Path):
        return source, None
    name, _, revision = source.partition("@")
    what = (
        f"{source}: there is no such directory here, and the hub gave no such model. Check the "
        "name, the network (HF_HUB_OFFLINE) and access (HF_TOKEN), or download it elsewhere and "
        "give its directory"
    )
    with explained(PolicyError, what):
        found = snapshot_download(name, revision=revision or None, allow_patterns=list(PATTERNS))
    return Path(found), Path(found).name

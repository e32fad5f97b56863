"""The description of a checkpoint: step, digest, checksums. Writes, reads and checks it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.checkpoint.durable import parse_json
from samestep.errors import DamagedError, DataError, shown
from samestep.identity import Fingerprint

__all__ = ["FORMAT", "MANIFEST", "MAX_MANIFEST_BYTES", "Manifest"]

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**20

_SEAL = "sha256"
_ENTRIES = {"format", "step", "fingerprint", "digest", "files", _SEAL}
_HEX = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[a-z_]+\.(safetensors|json)")
_MAX_COUNT = 2**62


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint, which `samestep.load` returns.

    Attributes:
        step: steps taken when the checkpoint was written.
        digest: `samestep.digest` of the model's weights.
        files: each file's size in bytes and SHA-256.
        fingerprint: what the bits depend on besides the state: device, library versions, ...
        state: what was passed to `save` under other keywords and not to `load`, by name.

    Example:
        >>> import tempfile, torch, samestep
        >>> model = torch.nn.Linear(2, 1)
        >>> path = samestep.save(tempfile.mkdtemp(), model=model, step=7, best=0.5)
        >>> manifest = samestep.load(path, model=model)
        >>> manifest.step, manifest.digest == samestep.digest(model), manifest.state
        (7, True, {'best': 0.5})
    """

    step: int
    digest: str
    files: Mapping[str, tuple[int, str]]
    fingerprint: Fingerprint = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        """Return the content of manifest.json; equal states give equal texts, so it holds no time or path.

        In this and every later format, the last entry is the SHA-256 of the text without that entry.
        """
        values = {
            "format": FORMAT,
            "step": self.step,
            "fingerprint": dict(self.fingerprint),
            "digest": self.digest,
            "files": {name: [size, sha256] for name, (size, sha256) in sorted(self.files.items())},
        }
        return _text(values | {_SEAL: _seal(values)})

    @classmethod
    def parse(cls, content: bytes, file: Path) -> Manifest:
        """Read the content of manifest.json.

        Args:
            content: the text, in UTF-8.
            file: its path, for messages.

        Raises:
            DamagedError: the content is not what was written.
            DataError: the content is intact, but its format is newer.
        """
        try:
            values = parse_json(content)
            if not isinstance(values, dict):
                raise ValueError("it is not a JSON object")
            if values.get(_SEAL) != _seal({k: v for k, v in values.items() if k != _SEAL}):
                raise ValueError("its content does not have the SHA-256 that it holds")
            if _is_count(values.get("format")) and values["format"] > FORMAT:
                raise DataError(f"{file}: format {values['format']} is newer than {FORMAT}: update samestep")
            return _read(values)
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DamagedError(f"{file}: is not the manifest of a checkpoint ({error})") from error


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _seal(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(values).encode()).hexdigest()


def _read(values: dict[str, Any]) -> Manifest:
    _expect(
        values.keys() == _ENTRIES and _is_count(values["format"]) and values["format"] == FORMAT,
        "entries",
        list(values),
    )
    _expect(_is_count(values["step"]), "step", values["step"])
    _expect(
        isinstance(values["digest"], str) and _HEX.fullmatch(values["digest"]), "digest", values["digest"]
    )
    entries, files = values["fingerprint"], values["files"]
    _expect(_all(entries, lambda value: type(value) in (str, int, bool, type(None))), "fingerprint", entries)
    _expect(_all(files, _is_size_and_hash) and all(map(_FILE_NAME.fullmatch, files)), "files", files)
    return Manifest(
        values["step"],
        values["digest"],
        {name: (size, sha256) for name, (size, sha256) in files.items()},
        entries,
    )


def _expect(is_right: object, name: str, value: object) -> None:
    if not is_right:
        raise ValueError(f"invalid {name}: {shown(value)}")


def _all(values: object, is_right: Any) -> bool:
    return isinstance(values, dict) and all(map(is_right, values.values()))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _is_size_and_hash(value: object) -> bool:
    match value:
        case [size, str(sha256)]:
            return _is_count(size) and bool(_HEX.fullmatch(sha256))
    return False

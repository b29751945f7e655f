"""Secrets of tools, from a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import msgspec

from pawl.chassis.ids import StoreId
from pawl.chassis.process.start import StartError

COMMON: Final = "*"


class FileSecrets:
    """Secrets that tools may ask for by name."""

    def __init__(self, secrets: Mapping[str, Mapping[str, str]]) -> None:
        self._secrets = secrets

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """Return the secrets of a file, or none without one.

        Raises:
            StartError: the file cannot be read or has another form.
        """
        if path is None:
            return cls({})
        try:
            return cls(msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, str]]))
        except OSError as error:
            raise StartError(f"PAWL_TOOL_SECRETS_FILE: cannot read {path}: {error.strerror}") from None
        except msgspec.DecodeError:
            raise StartError(f'PAWL_TOOL_SECRETS_FILE: {path} must be JSON like {{"*": {{"name": "value"}}}}') from None

    def find(self, store_id: StoreId, name: str) -> str | None:
        """Return the store's secret, or the common one, or None: for code of the deployment."""
        own = self.own(store_id, name)
        return own if own is not None else self._secrets.get(COMMON, {}).get(name)

    def own(self, store_id: StoreId, name: str) -> str | None:
        """Return the store's secret, or None: for what an admin of the store has connected.

        The admin says where it is sent, and what is common belongs to the deployment and to all other stores.
        """
        return self._secrets.get(store_id, {}).get(name)

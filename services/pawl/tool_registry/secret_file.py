"""Secrets of tools, read from a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import msgspec

from pawl.chassis.ids import StoreId
from pawl.chassis.process.start import StartError

COMMON: Final = "*"


class FileSecrets:
    def __init__(self, secrets: Mapping[str, Mapping[str, str]]) -> None:
        self._secrets = secrets

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """Read secrets from a file. If `path` is None, there are no secrets.

        Raises:
            StartError: The file cannot be read or has the wrong format.
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
        """Return the store's own secret or, if it has none, the common secret. Return None if neither exists.

        This is only for the deployment's own code.
        """
        own = self.own(store_id, name)
        return own if own is not None else self._secrets.get(COMMON, {}).get(name)

    def own(self, store_id: StoreId, name: str) -> str | None:
        """Return the store's own secret, or None if there is none.

        This is for sources that one of the store's admins has connected. The admin chooses where the secret is sent, so
        the deployment's common secrets are not available here.
        """
        return self._secrets.get(store_id, {}).get(name)

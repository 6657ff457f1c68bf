"""Settings that came after the first records, which do not name them: left out wherever they are as before."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any


def later(default: Any) -> Any:
    """The default of such a setting, which is given by name: what older records, keys and folders were made with."""
    return field(default=default, kw_only=True, metadata={"later": True})


def given(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, without those that came later and have their default."""
    every = {f: getattr(value, f.name) for f in fields(value)}
    return {f.name: one for f, one in every.items() if not (f.metadata.get("later") and one == f.default)}

"""The base class of methods that wrap another method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, Self

from ..errors import UsageError
from ..method import Method
from ..remedies import Remedy


@dataclass(frozen=True)
class Around(Method):
    """A method that wraps another, its `host`. It delegates to the host whatever it does not override."""

    name: ClassVar[str] = ""
    hosts: ClassVar[tuple[str, ...] | None] = None
    """names of the methods that it wraps, and those derived from them; None for all"""
    host: Method = Method()
    """the method that it wraps"""
    remedy: ClassVar[Any] = property(attrgetter("host.remedy"))  # type: ignore[misc]

    def __init_subclass__(cls) -> None:
        """Refuse overrides that have no effect: the host's stages call the host's versions."""
        super().__init_subclass__()
        ignored = {"recipe", "finetuning", "refinements", "trained"} & cls.__dict__.keys()
        if ignored and "stages" not in cls.__dict__:
            raise UsageError(
                f"{cls.__qualname__} overrides {min(ignored)}, which has no effect: override stages too, to use it"
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.host, Method):
            raise UsageError(f"the host of {self.name} must be a Method such as PODNet(), not {self.host!r}")

    def with_remedy(self, remedy: Remedy) -> Self:
        """The host with another remedy."""
        return replace(self, host=self.host.with_remedy(remedy))

    def reset_finetuning(self, memory: bool = True) -> Self:
        """The host with its default fine-tuning where it does none."""
        return replace(self, host=self.host.reset_finetuning(memory))

    def check(self, *shares: int) -> None:
        """Refuse what the host refuses, and what this method does not support."""
        self.check_host()
        self.check_needs(*shares)
        self.host.check(*shares)

    def check_host(self) -> None:
        """Refuse a host that it does not wrap."""
        names = {getattr(kind, "name", "") for kind in type(self.host).__mro__}
        if self.hosts is not None and names.isdisjoint(self.hosts):
            raise UsageError(f"{self.name} does not wrap {self.host.name}: take {' or '.join(self.hosts)} as its host")

    def overrides(self, name: str) -> bool:
        """Whether it or its host overrides this function of Method."""
        return getattr(type(self), name) is not getattr(Around, name) or self.host.overrides(name)


def _ask_host(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.host, name)(*args)


HOSTED = (
    "objective", "backbone", "head", "first_rows", "views", "recipe", "finetuning", "stages", "enter", "leave", "hold",
    "epoch", "augmentation", "more", "note", "choose", "after", "scores", "lam",
)  # fmt: skip
"""functions that Around delegates to its host"""
for _name in HOSTED:
    setattr(Around, _name, _ask_host(_name))
for _name in ("trained", "fresh", "capturable", "needs_maps", "continues", "least_memory", "default_memory", "cost"):
    setattr(Around, _name, property(attrgetter(f"host.{_name}")))

"""Which names are registered, and for which content."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lora_worker.adapters.reference import AdapterReference
from lora_worker.errors import AdapterConflictError, UnknownAdapterError

# So many names an error lists before it only counts the rest.
NAMES_SHOWN = 20


class AdapterRegistry:
    """Name to reference. A name changes hands in one assignment, so a row sees the old content or the new."""

    def __init__(self, base_name: str) -> None:
        self._base_name = base_name
        self._references: dict[str, AdapterReference] = {}
        self._names: defaultdict[str, set[str]] = defaultdict(set)  # by digest
        self._pinned: set[str] = set()

    def __iter__(self) -> Iterator[AdapterReference]:
        return iter(list(self._references.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._references

    def get(self, name: str) -> AdapterReference:
        """The reference of a registered name; UnknownAdapterError with the known names otherwise."""
        try:
            return self._references[name]
        except KeyError:
            raise unknown_adapter(name, self._references, self._base_name) from None

    def register(self, reference: AdapterReference, *, replace_content: bool) -> AdapterReference | None:
        """Register; returns what the name stood for before.

        The same content again succeeds. Other content under a registered name needs `replace_content`.
        """
        if reference.name == self._base_name:
            raise name_is_taken(reference.name)
        known = self._references.get(reference.name)
        if known and known.digest != reference.digest and not replace_content:
            raise other_content(known, reference)
        self._put(reference)
        return known

    def remove(self, name: str) -> AdapterReference | None:
        reference = self._references.pop(name, None)
        if reference is not None:
            self._pinned.discard(name)
            self._names[reference.digest].discard(name)
            if not self._names[reference.digest]:
                del self._names[reference.digest]
        return reference

    def set_pinned(self, name: str, *, pinned: bool) -> None:
        self._put(replace(self._references[name], pinned=pinned))

    def loaded(self) -> dict[str, str]:
        """`{name: path}` of all registered adapters."""
        return {reference.name: reference.source for reference in self}

    def find(self, name: str) -> AdapterReference | None:
        return self._references.get(name)

    def names_of(self, digest: str) -> set[str]:
        """The names that stand for this content."""
        return self._names.get(digest, set())

    def is_pinned(self, digest: str) -> bool:
        """Whether any of the content's names is pinned."""
        return not self._pinned.isdisjoint(self.names_of(digest))

    def pinned(self) -> list[AdapterReference]:
        return [self._references[name] for name in sorted(self._pinned)]

    def check_integrity(self) -> None:
        names = {name for names in self._names.values() for name in names}
        assert names == set(self._references), "registry: names and digests disagree"
        assert all(reference.name in self.names_of(reference.digest) for reference in self), "registry: a wrong digest"
        assert self._pinned == {reference.name for reference in self if reference.pinned}, "registry: pins disagree"

    def _put(self, reference: AdapterReference) -> None:
        self.remove(reference.name)
        self._references[reference.name] = reference
        self._names[reference.digest].add(reference.name)
        if reference.pinned:
            self._pinned.add(reference.name)


def name_is_taken(name: str) -> AdapterConflictError:
    """The error of a load under the base model's name."""
    return AdapterConflictError(f"{name!r} is the base model's name; load the adapter under another")


def other_content(known: AdapterReference, reference: AdapterReference) -> AdapterConflictError:
    """The error of a load, without `replace`, of other content than the name stands for."""
    return AdapterConflictError(
        f"the adapter {known.name!r} is already loaded from {known.source} with other content "
        f"(digest {known.digest[:12]}, now {reference.digest[:12]}); unload it first, or load with replace=True"
    )


def was_not(lora_name: str, state: str) -> str:
    """What an unload or unpin says that had nothing to do; `state`: 'loaded' or 'pinned'."""
    return f"the adapter {lora_name!r} was not {state}"


def unloaded_adapter(name: str) -> UnknownAdapterError:
    """The error of a request that waited while its adapter was unloaded."""
    return UnknownAdapterError(f"the adapter {name!r} was unloaded before the request started")


def unknown_adapter(name: str, known: Iterable[str], base_name: str) -> UnknownAdapterError:
    """The error that says so, with what is known."""
    names = sorted(known)
    shown = ", ".join(names[:NAMES_SHOWN]) or "none"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return UnknownAdapterError(
        f"unknown adapter {name!r}: loaded adapters are {shown}{more}; the base model is {base_name!r}"
    )

"""The examples in docstrings: every public name has one, and each gives what it says."""

from collections.abc import Iterator
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, DocTestParser, DocTestRunner

import numpy as np
import pytest
import torch

import sparsetc as stc
from sparsetc.packing.partition import PARTITIONS
from sparsetc.planner.registry import FORMATS, PLANS

MODULES = (stc, stc.decomposition, stc.masks, stc.nn, stc.datasets, stc.testing)
REGISTRIES = (stc.OPERATIONS, FORMATS, PARTITIONS, PLANS)


def public() -> Iterator[tuple[str, object]]:
    """Public functions and classes by the names that users write."""
    for module in MODULES:
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            listed = hasattr(module, "__all__") or getattr(value, "__module__", "") == module.__name__
            if listed and callable(value) and not name.startswith("_"):
                yield f"{module.__name__.replace('sparsetc', 'stc')}.{name}", value


def examples() -> dict[str, str]:
    """Docstrings with examples, those of the methods of public classes too."""
    found = {}
    for name, value in public():
        found[name] = value.__doc__ or ""
        if isinstance(value, type):
            ours = [base for base in value.__mro__ if base.__module__.startswith("sparsetc")]
            members = [(f"{name}.{attribute}", member) for base in ours for attribute, member in vars(base).items()]
            # Properties, class methods and functions all have the docstring; a plain value has that of its type.
            found |= {called: member.__doc__ or "" for called, member in members if not isinstance(member, type)}
    return {name: text for name, text in found.items() if ">>>" in text}


EXAMPLES = examples()


def test_every_public_name_has_an_example():
    assert [name for name, _ in public() if name not in EXAMPLES] == []


@pytest.fixture
def registries_are_restored() -> Iterator[None]:
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.usefixtures("registries_are_restored")
@pytest.mark.filterwarnings("ignore:.*GPU")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where examples write files
    torch.manual_seed(0)
    names = {"__name__": "__main__", "torch": torch, "np": np, "stc": stc}
    test = DocTestParser().get_doctest(EXAMPLES[name], names, name, None, None)
    said: list[str] = []
    DocTestRunner(optionflags=NORMALIZE_WHITESPACE | ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)

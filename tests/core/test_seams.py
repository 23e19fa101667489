"""Seams and ledger on every kind of function, and what they say to foreign patches."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.beds.snapshot import differences, snapshot
from vllm_ext.core.feature import Feature, Judgement, Part, Verdict
from vllm_ext.core.ledger import Conflict, Ledger
from vllm_ext.core.plan import Planned
from vllm_ext.core.seams import Add, Register, Seam, Wrap

SOURCE = """
def add(a, b=1): return a + b
async def later(a): return a
class Base:
    def inherited(self): return "base"
class Thing(Base):
    def method(self, a): return ("method", a)
    @staticmethod
    def static(a): return ("static", a)
    @classmethod
    def made(cls, a): return (cls.__name__, a)
    async def soon(self, a): return ("soon", a)
    async def stream(self, closed):
        try:
            yield 1
            yield 2
        finally:
            closed.append("closed")
    @property
    def value(self): return 1
class Factory:
    _registry = {}
    flat = ()
    @classmethod
    def register(cls, name, module, kind):
        if name in cls._registry: raise ValueError("registered already")
        def loader(): return (module, kind)
        cls._registry[name] = loader
    @classmethod
    def forget(cls, name): pass
Factory.register("stock", "vllm.tiny", "Thing")
"""
USER = "from vllm.tiny import add\nfrom vllm.tiny import add as plus\n"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A stand-in package ``vllm``: seams for kinds of functions vLLM's targets don't have yet."""
    (tmp_path / "vllm").mkdir()
    for name, text in (("__init__", ""), ("tiny", SOURCE), ("user", USER)):
        (tmp_path / "vllm" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("vllm.tiny")
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def double(original: Any, *args: Any, **kwargs: Any) -> Any:
    return (original(*args, **kwargs), "wrapped")


async def double_later(original: Any, *args: Any, **kwargs: Any) -> Any:
    return (await original(*args, **kwargs), "wrapped")


async def double_each(original: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    async with contextlib.aclosing(original(*args, **kwargs)) as items:
        async for item in items:
            yield (item, "wrapped")


def _ledger(*parts: tuple[Seam, ...]) -> Ledger:
    made = tuple(
        Part(f"part{at}", "", seams, lambda: Judgement(Verdict.ACTIVE, ""))
        for at, seams in enumerate(parts)
    )
    feature = Feature("TINY", "test", "", "", (), made)
    armed = Judgement(Verdict.ARMED, "test")
    return Ledger(tuple(Planned(feature, part, armed) for part in made))


def _applied(*seams: Seam) -> Ledger:
    ledger = _ledger(seams)
    judgement = ledger.apply("TINY.part0")
    assert judgement.verdict is Verdict.ACTIVE, judgement.reason
    return ledger


def test_every_kind_of_function_keeps_its_kind(tiny: ModuleType) -> None:
    before = snapshot()
    target = "vllm.tiny:Thing."
    ledger = _applied(
        Wrap("vllm.tiny:add", double),
        Wrap(target + "method", double),
        Wrap(target + "static", double),
        Wrap(target + "made", double),
        Wrap("vllm.tiny:later", double_later),
        Wrap(target + "soon", double_later),
    )
    thing = tiny.Thing()
    assert tiny.add(1, b=2) == (3, "wrapped")
    assert thing.method(1) == (("method", 1), "wrapped")
    assert thing.static(1) == tiny.Thing.static(1) == (("static", 1), "wrapped")
    assert type("Sub", (tiny.Thing,), {}).made(1) == (("Sub", 1), "wrapped")
    assert inspect.iscoroutinefunction(tiny.later) and inspect.iscoroutinefunction(thing.soon)
    assert asyncio.run(tiny.later(1)) == (1, "wrapped")
    assert asyncio.run(thing.soon(1)) == (("soon", 1), "wrapped")
    ledger.undo("TINY.part0")
    assert differences(before, snapshot()) == []


def test_references_taken_by_name_are_rebound_and_restored(tiny: ModuleType) -> None:
    user = importlib.import_module("vllm.user")
    before = snapshot()
    ledger = _applied(Wrap("vllm.tiny:add", double))
    assert user.add is user.plus is tiny.add
    assert user.plus(1) == (2, "wrapped")
    assert "2 other references rebound" in ledger.entries["TINY.part0"].judgement.reason
    ledger.undo("TINY.part0")
    assert differences(before, snapshot()) == []


def test_an_asynchronous_generator_stays_one_and_is_closed_at_once(tiny: ModuleType) -> None:
    before = snapshot()
    ledger = _applied(Wrap("vllm.tiny:Thing.stream", double_each))
    thing = tiny.Thing()
    assert inspect.isasyncgenfunction(thing.stream)

    async def read(most: int) -> tuple[list[Any], list[str]]:
        found: list[Any] = []
        closed: list[str] = []
        async with contextlib.aclosing(thing.stream(closed)) as items:
            async for item in items:
                found.append(item)
                if len(found) == most:
                    break
        return found, closed

    assert asyncio.run(read(9)) == ([(1, "wrapped"), (2, "wrapped")], ["closed"])
    assert asyncio.run(read(1)) == ([(1, "wrapped")], ["closed"])
    ledger.undo("TINY.part0")
    assert differences(before, snapshot()) == []
    assert asyncio.run(read(9)) == ([1, 2], ["closed"])


def test_two_parts_on_one_target_are_undone_in_any_order(tiny: ModuleType) -> None:
    user = importlib.import_module("vllm.user")
    for order in (("part0", "part1"), ("part1", "part0")):
        before = snapshot()
        ledger = _ledger((Wrap("vllm.tiny:add", double),), (Wrap("vllm.tiny:add", double),))
        for name in ("TINY.part0", "TINY.part1"):
            assert ledger.apply(name).verdict is Verdict.ACTIVE
        assert user.add(1) == ((2, "wrapped"), "wrapped")
        ledger.undo("TINY." + order[0])
        assert user.add(1) == (2, "wrapped")
        ledger.undo("TINY." + order[1])
        assert differences(before, snapshot()) == []


def test_add_gives_a_class_what_it_lacks_and_takes_it_away(tiny: ModuleType) -> None:
    def build(owner: Any) -> Any:
        def inherited(self: Any) -> Any:
            return ("added", super(owner, self).inherited())

        return inherited

    before = snapshot()
    ledger = _applied(Add("vllm.tiny:Thing.inherited", build))
    assert tiny.Thing().inherited() == ("added", "base")
    assert tiny.Thing.inherited.__qualname__ == "Thing.inherited"
    ledger.undo("TINY.part0")
    assert differences(before, snapshot()) == []


@pytest.mark.parametrize(
    ("seam", "says"),
    [
        (Wrap("vllm.tiny:gone", double), "is not defined there"),
        (Wrap("vllm.tiny:Gone.method", double), "vllm.tiny:Gone is not a class"),
        (Wrap("vllm.tiny:Thing.inherited", double), "is not defined there"),
        (Add("vllm.tiny:Thing.method", lambda owner: None), "exists already"),
        (Wrap("vllm.absent:add", double), "module vllm.absent is not loaded"),
    ],
)
def test_what_cannot_be_patched_is_named_and_the_rest_rolled_back(
    tiny: ModuleType, seam: Seam, says: str
) -> None:
    before = snapshot()
    ledger = _ledger((Wrap("vllm.tiny:add", double), seam))
    judgement = ledger.apply("TINY.part0")
    assert judgement.verdict is Verdict.FAILED and says in judgement.reason
    assert differences(before, snapshot()) == []


def _foreign(original: Any) -> Any:
    @functools.wraps(original)
    def foreign(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return foreign


def test_a_foreign_patch_before_us_is_named_and_left_alone(tiny: ModuleType) -> None:
    tiny.Thing.method = _foreign(tiny.Thing.method)
    before = snapshot()
    ledger = _ledger((Wrap("vllm.tiny:add", double), Wrap("vllm.tiny:Thing.method", double)))
    judgement = ledger.apply("TINY.part0")
    assert judgement.verdict is Verdict.CONFLICT
    assert "test_seams._foreign" in judgement.reason and "line" in judgement.reason
    assert differences(before, snapshot()) == []


def test_a_foreign_class_before_us_is_named(tiny: ModuleType) -> None:
    tiny.Thing = type("Other", (tiny.Thing,), {"method": lambda self, a: a})
    judgement = _ledger((Wrap("vllm.tiny:Thing.method", double),)).apply("TINY.part0")
    assert judgement.verdict is Verdict.CONFLICT
    assert "the class was replaced by tests.core.test_seams.Other" in judgement.reason


@pytest.mark.parametrize("keeps", ["by closure", "in a lambda", "by global", "in a dict"])
def test_a_foreign_wrapper_after_us_is_named_and_we_stay_active(
    tiny: ModuleType, keeps: str
) -> None:
    ledger = _applied(Wrap("vllm.tiny:Thing.method", double))
    ours = tiny.Thing.method
    if keeps == "by closure":
        tiny.Thing.method = _foreign(ours)
    elif keeps == "in a lambda":
        tiny.Thing.method = lambda self, a: ours(self, a)
    else:
        held = {"before": ours} if keeps == "in a dict" else ours
        call = "kept['before']" if keeps == "in a dict" else "kept"
        space: dict[str, Any] = {"kept": held, "__name__": "plugin_of_somebody"}
        exec(f"def method(self, a): return {call}(self, a)", space)
        tiny.Thing.method = space["method"]
    (entry,) = ledger.reread()
    assert entry.judgement.verdict is Verdict.ACTIVE
    assert "was wrapped after us by" in entry.judgement.reason
    assert ledger.reread() == [], "the same finding is told twice"
    with pytest.raises(Conflict, match="now holds"):
        ledger.undo("TINY.part0")
    tiny.Thing.method = ours
    (entry,) = ledger.reread()
    assert entry.judgement == entry.applied, "the stranger is gone, so is its name"


def test_a_foreign_replacement_after_us_is_a_conflict_while_it_stands(tiny: ModuleType) -> None:
    ledger = _applied(Wrap("vllm.tiny:Thing.method", double))
    ours = tiny.Thing.method
    # functools.wraps leaves a trace of ours on a function that never calls it.
    tiny.Thing.method = functools.wraps(ours)(_replacement)
    (entry,) = ledger.reread()
    assert entry.judgement.verdict is Verdict.CONFLICT
    assert "was replaced after us by tests.core.test_seams._repl" in entry.judgement.reason
    tiny.Thing.method = ours
    (entry,) = ledger.reread()
    assert entry.judgement.verdict is Verdict.ACTIVE


def _replacement(self: Any, a: Any) -> Any:
    return "replaced"


@pytest.mark.parametrize("how", ["another class", "a subclass", "reloaded", "gone"])
def test_a_class_that_is_replaced_after_us_is_a_conflict(tiny: ModuleType, how: str) -> None:
    ledger = _applied(Wrap("vllm.tiny:Thing.method", double))
    if how == "reloaded":
        importlib.reload(tiny)
    elif how == "gone":
        del tiny.Thing
    else:
        bases = (tiny.Thing,) if how == "a subclass" else ()
        tiny.Thing = type("Other", bases, {"method": _replacement})
    (entry,) = ledger.reread()
    assert entry.judgement.verdict is Verdict.CONFLICT
    assert "vllm.tiny:Thing" in entry.judgement.reason


def test_an_object_that_answers_for_others_is_not_asked(tiny: ModuleType) -> None:
    class Proxy:
        """Like a web framework's request: any attribute of it is an error outside a request."""

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("outside of a request")

        def __call__(self, *args: Any) -> Any:
            return args

    proxy = Proxy()
    ledger = _applied(Wrap("vllm.tiny:Thing.method", double))
    tiny.Thing.method = lambda self, a: proxy(a)
    (entry,) = ledger.reread()
    assert entry.judgement.verdict is Verdict.CONFLICT


def test_a_vendor_edit_below_the_class_is_named(tiny: ModuleType) -> None:
    code = compile("def _vendor(self, a): return a", tiny.__file__ or "", "exec")
    exec(code, vars(tiny))
    tiny.Thing.method = tiny._vendor
    judgement = _ledger((Wrap("vllm.tiny:Thing.method", double),)).apply("TINY.part0")
    assert judgement.verdict is Verdict.CONFLICT and "_vendor" in judgement.reason


def test_two_threads_apply_a_part_once(tiny: ModuleType) -> None:
    ledger = _ledger((Wrap("vllm.tiny:add", double),))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: ledger.apply("TINY.part0"), range(64)))
    assert tiny.add(1) == (2, "wrapped")


ENTRY = "vllm.tiny:Factory._registry"
MINE = ("mine", "my.module", "Mine")


def _register(name: str = "mine", through: str = "register") -> Register:
    return Register(f"{ENTRY}[{name}]", f"vllm.tiny:Factory.{through}", (name, *MINE[1:]))


def test_an_entry_is_registered_by_the_factory_itself_and_taken_away(tiny: ModuleType) -> None:
    before = snapshot()
    ledger = _applied(_register())
    assert list(tiny.Factory._registry) == ["stock", "mine"]
    assert tiny.Factory._registry["mine"]() == ("my.module", "Mine")
    assert f"{ENTRY}[mine]" in differences(before, snapshot())
    ledger.undo("TINY.part0")
    assert list(tiny.Factory._registry) == ["stock"]
    assert differences(before, snapshot()) == []


def test_a_name_that_is_taken_is_a_conflict_and_stays(tiny: ModuleType) -> None:
    tiny.Factory.register(*MINE)
    before = snapshot()
    ledger = _ledger((_register(),))
    judgement = ledger.apply("TINY.part0")
    assert judgement.verdict is Verdict.CONFLICT
    assert "Factory._registry[mine] is already vllm.tiny.Factory.register" in judgement.reason
    assert differences(before, snapshot()) == []
    for other in ((_register("stock"),), (_register("new"), _register("new"))):
        judgement = _ledger(other).apply("TINY.part0")
        assert judgement.verdict in (Verdict.CONFLICT, Verdict.FAILED)
        assert differences(before, snapshot()) == []


def test_an_entry_replaced_after_us_is_a_conflict(tiny: ModuleType) -> None:
    ledger = _applied(_register())
    ours = tiny.Factory._registry["mine"]
    tiny.Factory._registry["mine"] = lambda: "theirs"
    (changed,) = ledger.reread()
    assert changed.judgement.verdict is Verdict.CONFLICT
    assert "was replaced after us" in changed.judgement.reason
    with pytest.raises(Conflict):
        ledger.undo("TINY.part0")
    tiny.Factory._registry["mine"] = ours
    ledger.undo("TINY.part0")


def test_what_is_no_registry_or_registers_nothing_is_refused(tiny: ModuleType) -> None:
    before = snapshot()
    nothing = _register(through="forget")
    object.__setattr__(nothing, "arguments", ("mine",))
    flat = Register("vllm.tiny:Factory.flat[mine]", "vllm.tiny:Factory.register", MINE)
    for seam, told in ((nothing, "made no entry 'mine'"), (flat, "is not a registry")):
        judgement = _ledger((seam,)).apply("TINY.part0")
        assert judgement.verdict is Verdict.FAILED
        assert told in judgement.reason
        assert differences(before, snapshot()) == []

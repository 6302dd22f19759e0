"""What the kernel should hold, and what it holds, as maps of named objects to text. Pure.

An *object* is whatever the kernel holds by a name: an element of a set, a chain with its rules, a set. A
*value* (a forwarding) compiles to objects of its own, and to some that it shares with others. A *shared*
object exists while a value uses it; it may require others, which it shares in turn. The *frame* exists while
there is any value. Objects of values are compiled when they are needed, and kept only until they are
committed.

The engine is the only record of what is written: `written`, and the objects `left` over. It may be in doubt,
about some names or everything; then the kernel is read, and `compare` takes the place of `difference`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

ObjectId = tuple[str, str]
"""Kind and name: a set and the key of an element in it; `chain` or `set` and its name."""
Objects = Mapping[ObjectId, str]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Shared(NamedTuple):
    """An object that several values may use. Where its users differ in its text, there is none."""

    text: str | None = ""
    """None: nothing by itself; it stands for what it requires."""
    requires: tuple[tuple[ObjectId, Shared], ...] = ()
    """The objects that exist while this one does."""


PLAIN = Shared()


class Compiled(NamedTuple):
    """The objects of one value."""

    own: Objects
    shared: Mapping[ObjectId, Shared]


NOTHING = Compiled({}, {})


@dataclass(slots=True)
class Difference:
    """Objects to remove, with their texts, and to add. One whose text changes is in both."""

    removed: dict[ObjectId, str] = field(default_factory=dict)
    added: dict[ObjectId, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.removed or self.added)

    def note(self, name: ObjectId, before: str | None, after: str | None) -> None:
        """Add the change of one object; None: there is none."""
        if before != after:
            if before is not None:
                self.removed[name] = before
            if after is not None:
                self.added[name] = after


class Engine(Generic[K, V]):
    """The wanted values of one table, and what is written of them."""

    def __init__(
        self,
        compile_value: Callable[[V], Compiled],
        frame: Callable[[Container[ObjectId]], Objects],
        lasting: Collection[str] = (),
    ) -> None:
        """`frame` returns the objects that exist while any value does, for the shared objects in use.
        `lasting`: kinds of objects that are not removed with their last user: they are `left`."""
        self._compile, self._frame, self._lasting = compile_value, frame, lasting
        self.wanted: dict[K, V] = {}
        self.written: dict[K, V] = {}
        """The values as they were last written."""
        self.dirty: dict[K, None] = {}
        """Keys whose values may differ from those written."""
        self.left: dict[ObjectId, str] = {}
        """Lasting objects that the kernel has and nothing wants."""
        self.unknown = True
        """What the kernel holds has to be read."""
        self.doubted: set[str] = set()
        """Names of kinds or objects that another program may have changed."""
        self._users: Counter[ObjectId] = Counter()
        """Numbers of users of wanted shared objects."""
        self._texts: dict[ObjectId, str | None] = {}
        """Texts of those that have one."""
        self._disputed: dict[ObjectId, Counter[str | None]] = {}
        """Numbers of users by text, where these differ."""
        self._before: dict[ObjectId, str | None] = {}
        """Shared objects with another number of users: their texts when all was last written."""
        self._framed: Objects = {}
        """The frame when all was last written."""
        self._forms: dict[K, list[tuple[V, Compiled]]] = {}
        """Compiled values, until they are written."""

    def update(self, key: K, value: V | None) -> None:
        """Want another value, or none. When compiling it raises, nothing has changed."""
        after = self._compiled(key, value)
        before = self._compiled(key, self.wanted.get(key))
        self._use(after.shared.items(), 1)
        self._use(before.shared.items(), -1)
        if value is None:
            self.wanted.pop(key, None)
        else:
            self.wanted[key] = value
        self.dirty[key] = None

    def compile_ahead(self, key: K, value: V | None) -> None:
        """Compile what the next `update` of this key requires. May run in a thread."""
        self._compiled(key, value)
        self._compiled(key, self.wanted.get(key))

    def forms(self, key: K) -> tuple[Compiled, Compiled]:
        """The objects of a value as it is written, and as it is wanted."""
        return self._compiled(key, self.written.get(key)), self._compiled(key, self.wanted.get(key))

    def difference(self) -> Difference:
        """From what was written to what is wanted."""
        change, gone = Difference(), dict[ObjectId, str]()
        for name, before in self._before.items():
            before = self.left.get(name) if before is None else before
            self._note(change, name, before, self._shared_text(name))
        frame = self.frame()
        if frame is not self._framed:
            for name in {**self._framed, **frame}:
                before = self._framed.get(name, self.left.get(name))
                self._note(change, name, before, frame.get(name))
        own = dict[ObjectId, str]()
        for key in self.dirty:
            before_form, after_form = self.forms(key)
            gone.update(before_form.own)
            own.update(after_form.own)
        for name, text in gone.items():
            change.note(name, text, own.get(name))
        for name, text in own.items():
            if name not in gone:
                change.added[name] = text
        return change

    def _note(self, change: Difference, name: ObjectId, before: str | None, after: str | None) -> None:
        if after is not None or name[0] not in self._lasting:
            change.note(name, before, after)

    def compare(
        self, kernel: Objects, covers: Callable[[ObjectId], bool] | None = None
    ) -> tuple[Difference, dict[ObjectId, str]]:
        """From what was read to what is wanted, and lasting objects that nothing wants. `covers` tells what
        has been read (None: everything); all else is as it was written. Changes nothing."""
        if not kernel and covers is None:  # a load
            return Difference({}, dict(self.objects())), {}
        change, rest = Difference(), dict(kernel)
        for name, text in self.objects():
            if covers is None or covers(name):
                change.note(name, rest.pop(name, None), text)
        left = {name: text for name, text in rest.items() if name[0] in self._lasting}
        change.removed.update((name, text) for name, text in rest.items() if name not in left)
        if covers is not None:
            left.update((name, text) for name, text in self.left.items() if not covers(name))
            known = self.difference()
            change.removed.update((n, text) for n, text in known.removed.items() if not covers(n))
            change.added.update((n, text) for n, text in known.added.items() if not covers(n))
        return change, left

    def observe(self, left: dict[ObjectId, str], covers: Callable[[ObjectId], bool] | None = None) -> None:
        """What `compare` has found left over is so: it was read."""
        self.left, self._framed = left, {}
        for name in self._before:
            if covers is None or covers(name):
                self._before[name] = None

    def objects(self) -> Iterator[tuple[ObjectId, str]]:
        """Everything wanted."""
        yield from self.frame().items()
        for name in self._users:
            if (text := self._shared_text(name)) is not None:
                yield name, text
        for key, value in self.wanted.items():
            yield from self._compiled(key, value, keep=key in self.dirty).own.items()

    def objects_of(self, keys: Iterable[K]) -> dict[ObjectId, str]:
        """The wanted objects of these values, and all that they use."""
        found, todo = dict(self.frame()), list[tuple[ObjectId, Shared]]()
        for key in keys:
            form = self._compiled(key, self.wanted.get(key))
            found.update(form.own)
            todo += form.shared.items()
        while todo:
            name, shared = todo.pop()
            if name not in found and (text := self._shared_text(name)) is not None:
                found[name] = text
            todo += shared.requires
        return found

    def keys_of(self, change: Difference) -> list[K]:
        """The values with an object in a difference."""
        names = change.removed.keys() | change.added.keys()
        return [
            key
            for key in {**self.wanted, **self.dirty}
            if any(not names.isdisjoint(part) for form in self.forms(key) for part in form)
        ]

    def frame(self) -> Objects:
        """The objects that exist while there is any value."""
        return self._frame(self._users) if self.wanted else {}

    def text_of(self, name: ObjectId) -> str | None:
        """The wanted text of an object of the frame, or a shared one; None if there is none."""
        text = self.frame().get(name)
        return self._shared_text(name) if text is None else text

    @property
    def in_use(self) -> bool:
        """Whether the kernel holds the frame, as far as it is known."""
        return bool(self._framed)

    def commit(self) -> None:
        """The kernel holds all that is wanted, and what is left."""
        frame = self.frame()
        changed = self._framed.items() if frame is not self._framed else ()
        for name, before in (*changed, *self._before.items()):
            if before is not None and name[0] in self._lasting:
                self.left.setdefault(name, before)
        if self.left:
            self.left = {name: text for name, text in self.left.items() if self.text_of(name) is None}
        for key in self.dirty:
            if key in self.wanted:
                self.written[key] = self.wanted[key]
            else:
                self.written.pop(key, None)
        self._framed, self.unknown = frame, False
        for kept in (self.dirty, self._before, self._forms):
            kept.clear()
        if not self.wanted:
            self.left.clear()

    def take_doubt(self) -> set[str] | None:
        """The names in doubt, None for everything; they are no longer, but all is unknown until it is
        committed."""
        doubted, unknown = self.doubted, self.unknown
        self.doubted, self.unknown = set(), True
        return None if unknown else doubted

    def changed_options(self) -> None:
        """All values compile to something else from now on. What the kernel holds has to be read."""
        self._users.clear()
        for known in (self._texts, self._disputed, self._before, self._forms, self.left):
            known.clear()
        for key, value in self.wanted.items():
            self._use(self._compiled(key, value, keep=False).shared.items(), 1)
        self._framed, self.unknown = {}, True

    def _shared_text(self, name: ObjectId) -> str | None:
        if name not in self._users or name in self._disputed:
            return None
        return self._texts.get(name, "")

    def _compiled(self, key: K, value: V | None, *, keep: bool = True) -> Compiled:
        if value is None:
            return NOTHING
        forms = self._forms.get(key, ())
        for known, form in forms:
            if known is value:
                return form
        form = self._compile(value)
        if keep:
            self._forms.setdefault(key, []).append((value, form))
        return form

    def _use(self, shared: Iterable[tuple[ObjectId, Shared]], change: int) -> None:
        """Count one user more or less of each of these."""
        users = self._users
        for name, (text, requires) in shared:
            if name not in self._before:
                self._before[name] = self._shared_text(name) if name in users else None
            number = users[name] + change
            if number:
                users[name] = number
            else:
                del users[name]
            known = self._texts.get(name, "")
            if known != text or (text != "" and number <= 1) or name in self._disputed:
                self._use_text(name, text, change, number)
            came_or_went = number == (1 if change > 0 else 0)
            if requires and came_or_went:
                self._use(requires, change)

    def _use_text(self, name: ObjectId, text: str | None, change: int, users: int) -> None:
        """One more or less of the users wants this text."""
        known = self._texts.get(name, "")
        if not users:
            self._texts.pop(name, None)
        elif users == 1 and change > 0:
            self._texts[name] = text
        elif name in self._disputed or known != text:
            others = Counter({known: users - change})
            texts = self._disputed.setdefault(name, others)
            texts[text] += change
            if not texts[text]:
                del texts[text]
            if len(texts) == 1:
                (self._texts[name],) = self._disputed.pop(name)

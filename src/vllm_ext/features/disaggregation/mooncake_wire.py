"""Further fields on Mooncake's messages, which peers that don't know them leave aside.

vLLM's messages are msgspec structs that travel as maps. A struct with one more field is made as a
subclass, encoded where vLLM hands its own struct to the worker's encoder, and decoded where the
worker's decoder expects vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_field(kind: Any, name: str, annotation: Any, default: Any) -> Any:
    """The message type ``kind`` with one more field; ``kind`` itself if it has it already."""
    import msgspec

    if name in kind.__struct_fields__:
        return kind
    return msgspec.defstruct(
        kind.__name__, [(name, annotation, default)], bases=(kind,), omit_defaults=True
    )


class Encoder:
    """An encoder that fills in a field of one kind of message on its way out.

    ``fill(message)`` gives the value; the default is left out by msgspec.
    """

    def __init__(
        self,
        below: Any,
        kind: Any,
        field: tuple[str, Any, Any],
        fill: Callable[[Any], Any],
    ) -> None:
        self._below, self._kind, self._field, self._fill = below, kind, field, fill
        self._kinds: dict[Any, Any] = {}

    def encode(self, message: Any) -> bytes:
        """The bytes of a message, whichever it is."""
        if isinstance(message, self._kind):
            value = self._fill(message)
            if value != self._field[2]:
                message = self._extended(message, value)
        encoded: bytes = self._below.encode(message)
        return encoded

    def _extended(self, message: Any, value: Any) -> Any:
        kind = type(message)
        if kind not in self._kinds:
            self._kinds[kind] = with_field(kind, *self._field)
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        return self._kinds[kind](**{**fields, self._field[0]: value})


def extend(
    worker: Any,
    decoder: str,
    field: tuple[str, Any, Any],
    fill: Callable[[Any], Any],
) -> None:
    """Have a worker send and understand one more field of the messages its ``decoder`` is for.

    ``field``: name, annotation and default, which stands for a peer that sends none.
    """
    import msgspec

    kind = getattr(worker, decoder).type
    worker._encoder = Encoder(worker._encoder, vllm_type(kind), field, fill)
    setattr(worker, decoder, msgspec.msgpack.Decoder(with_field(kind, *field)))


def vllm_type(kind: Any) -> Any:
    """vLLM's own message type behind one that may have been extended."""
    return next(base for base in kind.__mro__ if str(base.__module__).startswith("vllm."))

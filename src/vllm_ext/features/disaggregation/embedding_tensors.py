"""Embedding tensors of a request, judged in the frontend: readable, and of their item's size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pickle import UnpicklingError
from typing import Any

from vllm_ext.core.feature import effect


def check_sizes(
    original: Callable[..., Any], self: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Process a prompt unless one of its embedding tensors would fail the worker.

    vLLM cuts the tensor of a request into items by what their metadata says, and the worker splits
    it up by the same; a tensor that ends too early leaves it with fewer rows than it asks for.
    Raises VLLMValidationError (HTTP 400).
    """
    for modality, items in inputs.mm_data_items.items():
        for wrong in misfits(self.info, modality, items):
            from vllm.exceptions import VLLMValidationError

            effect("CONSUMER_EMBEDS.tensor_sizes")
            raise VLLMValidationError(wrong, parameter=f"{modality}_embeds")
    return original(self, inputs, *args, **kwargs)


def misfits(info: Any, modality: str, items: Any) -> Iterator[str]:
    """What is wrong with the embedding items of a modality, in sentences.

    ``items`` other than dictionaries of tensors are judged by vLLM itself, and models that don't
    declare what is in them not at all.
    """
    configured = getattr(items, "fields_config", None)
    roles = info.data_parser.embedding_fields.get(modality)
    if configured is None or not roles:
        return
    for name, tensor in items.data.items():
        if not hasattr(tensor, "dtype") or name not in configured:
            continue
        # Where items are stacked, what is in a row is the model's business.
        slices = getattr(configured[name].field, "slices", None)
        if roles.get(name) == "metadata":
            yield from _misfit_metadata(name, tensor)
        elif slices is not None and name in roles:
            yield from _misfit(info, name, tensor, slices)
        elif slices is not None:
            yield f"{name} is no embedding; expected are {', '.join(roles)}."


def _misfit_metadata(name: str, tensor: Any) -> Iterator[str]:
    if not (tensor.is_floating_point() or bool((tensor > 0).all())):
        yield f"{name} has a number that isn't positive; each must be at least 1."
    elif name == "image_grid_thw" and bool((tensor[..., 0] != 1).any()):
        yield f"{name} has more than one frame; an image has one."


def _misfit(info: Any, name: str, tensor: Any, slices: Any) -> Iterator[str]:
    # One slice for each item, or one for each dimension of each item: rows are the first.
    firsts = (item if isinstance(item, slice) else item[0] for item in slices)
    rows = max((first.stop for first in firsts), default=0)
    columns = width(info)
    if tensor.ndim != 2 or (columns and tensor.shape[1] != columns):
        expected = f"{rows} by {columns}" if columns else f"{rows} rows in two dimensions"
        yield f"{name} has the shape {tuple(tensor.shape)}; expected is {expected}."
    elif len(tensor) < rows:
        yield f"{name} has {len(tensor)} rows; by its metadata, its items have {rows}."


def width(info: Any) -> int | None:
    """Numbers in a row of an embedding of this model; None where vLLM doesn't know it.

    Models with deepstack have the rows for their deeper layers behind the one for the first.
    """
    first: int | None = info.data_parser.expected_hidden_size
    vision = getattr(info.get_hf_config(), "vision_config", None)
    deeper = getattr(vision, "deepstack_visual_indexes", None) or ()
    return first and first * (1 + len(deeper))


async def render(
    original: Callable[..., Any], self: Any, conversations: Any, *args: Any, **kwargs: Any
) -> Any:
    """Render chats; where an embedding can't be read, say so to its client (HTTP 400).

    What vLLM raises then may be anything that torch or a model's parser raises, and is HTTP 500.
    """
    named = [part for part in parts(conversations) if of_interest(part)]
    for part in named:
        check_uuid(part.get("uuid"))
    try:
        return await original(self, conversations, *args, **kwargs)
    except Exception as error:
        if not named or not _unread(error):
            raise
        _refuse(error)


def check_uuid(uuid: Any) -> None:
    """Refuse a uuid that can't be sent to the engine: one with half a surrogate pair."""
    try:
        str(uuid).encode()
    except UnicodeEncodeError as error:
        from vllm.exceptions import VLLMValidationError

        effect("CONSUMER_EMBEDS.unreadable")
        raise VLLMValidationError(
            f"The uuid {ascii(uuid)[:80]} is no text: it has half a surrogate pair.",
            parameter="uuid",
        ) from error


def _unread(error: Exception) -> bool:
    """Whether an error comes from reading what was sent; vLLM answers its own itself."""
    kinds = (LookupError, AttributeError, AssertionError, EOFError, RuntimeError, UnpicklingError)
    # A server without memory is no fault of its clients; torch's error is a RuntimeError.
    return isinstance(error, kinds) and type(error).__name__ != "OutOfMemoryError"


def _refuse(error: Exception) -> None:
    from vllm.exceptions import VLLMValidationError

    logging.getLogger("vllm.renderers.base").info("Unreadable embedding input", exc_info=error)
    effect("CONSUMER_EMBEDS.unreadable")
    reason = (str(error).strip() or "nothing said").splitlines()[0][:200]
    raise VLLMValidationError(
        f"An embedding input of this request can't be read ({type(error).__name__}: {reason}). "
        "Expected is a tensor as torch.save writes it, in base64, or a dictionary of such."
    ) from error


def parts(conversations: Any) -> Iterator[dict[str, Any]]:
    """The parts of all messages whose content is a list."""
    for conversation in conversations:
        for message in conversation:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                yield from (part for part in content if isinstance(part, dict))


def of_interest(part: dict[str, Any]) -> bool:
    """Whether a part is an embedding input, or names one by its uuid."""
    return str(part.get("type", "")).endswith("_embeds") or part.get("uuid") is not None

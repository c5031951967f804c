"""POST /tokenize, POST /detokenize and GET /tokenizer_info: the tokenizer of the model."""

import asyncio
from typing import Any

from megalith.errors import DataError
from megalith.serve.chat import read_messages, render_messages
from megalith.serve.completions import check_token_ids, encode_text
from megalith.serve.errors import invalid
from megalith.serve.sampling_fields import read_bool
from megalith.serve.state import RequestContext, ServerState
from megalith.serve.tools import read_tools


async def tokenize(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """Return the token ids of a text or a conversation.

    Raises:
        ApiError: the request is invalid.
    """
    body, model = context.body, state.check_ready()
    if body.get("model") is not None:
        state.find_model(body["model"])
    if "messages" in body:
        add = body.get("add_generation_prompt") is None or read_bool(body, "add_generation_prompt")
        messages = read_messages(body["messages"])
        tools = read_tools(body.get("tools"))
        rendered = await render_messages(
            model, messages, body, add_generation_prompt=add, tools=tools
        )
        ids = rendered.token_ids
    else:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise invalid(
                f"prompt={prompt!r:.60} must be a string. Use messages for a chat.", "prompt"
            )
        add = body.get("add_special_tokens") is None or read_bool(body, "add_special_tokens")
        ids = await encode_text(prompt, model, "prompt")
        bos = model.tokenizer.bos
        if not add and bos is not None and ids[:1] == [bos]:
            ids = ids[1:]
    return {"tokens": ids, "count": len(ids), "max_model_len": model.info.max_model_len}


async def detokenize(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """Return the text of token ids.

    Raises:
        ApiError: the request is invalid.
    """
    model, tokens = state.check_ready(), context.body.get("tokens")
    if tokens is None:
        raise invalid("tokens is missing. Use a list of token ids, such as [17, 4].", "tokens")
    if tokens == []:
        return {"prompt": ""}
    check_token_ids(tokens, model, "tokens")
    return {"prompt": await asyncio.to_thread(model.tokenizer.decode, tokens)}


async def get_tokenizer_info(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """Return the special tokens and the chat template.

    Raises:
        ApiError: the model is not ready.
    """
    model = state.check_ready()
    texts = {token: text for text, token in model.tokenizer.specials.items()}
    specials = {} if model.template is None else model.template.specials
    try:
        eos = texts.get(model.tokenizer.eod)
    except DataError:  # the tokenizer has no end token
        eos = None
    bos = model.tokenizer.bos
    return {
        "eos_token": specials.get("eos_token", eos),
        "bos_token": specials.get("bos_token", None if bos is None else texts.get(bos)),
        "pad_token": specials.get("pad_token"),
        "chat_template": None if model.template is None else model.template.source,
    }

"""``ModelText``: what an application holds of a model's text."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

from tokenizers import Tokenizer

from anyengine.brief import brief
from anyengine.client.engine_client import EngineClient
from anyengine.client.prompts import as_token_ids
from anyengine.errors import ModelError, RequestRefusedError
from anyengine.params import SamplingParams
from anyengine.process.threads import run_in_thread
from anyengine.sync_client.sync_engine_client import SyncEngineClient
from anyengine.text import model_files
from anyengine.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from anyengine.text.outputs import TextCompletion
from anyengine.text.sync_text_stream import SyncTextStream
from anyengine.text.text_request import ENCODED_IN_PLACE, Prompt, TextOptions, TextRequest
from anyengine.text.text_stream import TextStream
from anyengine.text.vocabulary import TokenBytes, decoding_of

if TYPE_CHECKING:
    from anyengine.text.chat_template import ChatTemplate

_DEFAULT_SAMPLING = SamplingParams()


class ModelText:
    """A model's tokenizer and its chat templates. It never changes; any number of tasks and threads may use it.

    :param tokenizer: belongs to this object from here on
    :param chat_templates: Jinja templates by name; ``"default"``, and ``"tool_use"`` for chats with tools
    :param template_variables: what templates refer to besides the conversation, as ``bos_token``
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_templates: Mapping[str, str] | None = None,
        template_variables: Mapping[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._sources = dict(chat_templates or {})
        self._variables = dict(template_variables or {})
        self._templates: dict[str, ChatTemplate] = {}
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(token_id for token_id, token in added if token.special)
        decoding = decoding_of(tokenizer)
        self._shown = None if decoding is None else TokenBytes(tokenizer, decoding)
        self._plain = None if decoding is None else TokenBytes(tokenizer, decoding, self._special)

    @classmethod
    async def load(cls, model: str | os.PathLike[str]) -> Self:
        """Read a model's files, in a worker thread.

        :param model: a directory in Hugging Face's format, or ``"default"`` for the bundled model, which is there once
            an engine has loaded it
        :raises ModelError: if it is not a model's directory, or a file is missing or cannot be read
        """
        return await run_in_thread(cls.load_sync, model, name="load-text")

    @classmethod
    def load_sync(cls, model: str | os.PathLike[str]) -> Self:
        """Read a model's files and compile its chat templates; it takes some tenths of a second.

        Parameters and errors as :meth:`load`.
        """
        directory = model_files.model_directory(model)
        tokenizer = model_files.read_tokenizer(directory)
        config = model_files.read_config(directory)
        text = cls(
            tokenizer,
            chat_templates=model_files.read_chat_templates(directory, config),
            template_variables=model_files.special_tokens(config),
        )
        for name in text._sources.keys() & {"default", "tool_use"}:
            with contextlib.suppress(ModelError):  # who has no chats need not know; encode_chat says what is wrong
                text._template(name)
        return text

    # ---- to tokens ----

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text. Special tokens that it spells out are taken for what they are.

        A million characters take about a second; other threads run meanwhile. For more than 4,096 of them the library
        ``tokenizers`` starts native threads, one for each processor, which stay; ``TOKENIZERS_PARALLELISM=false`` in
        the environment keeps it from that.

        :param add_special_tokens: whether the model's own tokens around a text, as for its beginning, are added
        :raises TypeError: if ``text`` is not a string
        :raises RequestRefusedError: if it holds half of a surrogate pair
        """
        if not isinstance(text, str):
            raise TypeError(f"text={brief(text)} ({type(text).__name__}): expected a string")
        try:
            if len(text) <= ENCODED_IN_PLACE:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            # A batch of one: unlike encode, encode_batch_fast gives up the GIL.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError):
            place = next((index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if place is None:
                raise
            raise RequestRefusedError(f"the text holds half of a surrogate pair ({text[place]!r}) at {place}") from None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The tokens of a conversation, by the model's chat template.

        :param messages: each with ``"role"``, ``"content"`` and whatever else the template knows; a content may be a
            list of text parts, ``{"type": "text", "text": "..."}``, which are lines of one text unless the template
            takes such lists itself
        :param tools: the functions that the model may call, as JSON schemas; refused if the template does not show them
            to the model
        :param add_generation_prompt: whether the assistant speaks next
        :param variables: more that the template refers to, as ``enable_thinking``; refused if it does not
        :raises TypeError: if ``messages`` is not a list of mappings
        :raises ModelError: if the model has no chat template, or one that is malformed, or a package is missing
        :raises RequestRefusedError: if a message has no role or one that nobody knows, or parts that are no text, if
            the template refuses the conversation, leaves out the tools, or does not refer to one of the variables
        """
        template = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
        text = template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)
        return self.encode(text, add_special_tokens=False)  # the template has written the special tokens

    def _template(self, name: str) -> ChatTemplate:
        if name not in self._templates:
            if name not in self._sources:
                raise ModelError(
                    "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), "
                    "so it takes text and no messages"
                )
            try:
                from anyengine.text.chat_template import ChatTemplate  # Jinja takes longer to import than all else here
            except ModuleNotFoundError as error:
                raise ModelError(
                    f"a chat template needs the package {error.name!r}: pip install {error.name}"
                ) from error

            self._templates[name] = ChatTemplate(self._sources[name], self._variables)
        return self._templates[name]

    # ---- to text ----

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens. One that the model does not have has none.

        :raises TypeError: if one is no integer
        :raises RequestRefusedError: if one is not from 0 to 2**32 - 1
        """
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.feed(as_token_ids("token_ids", list(token_ids))) + detokenizer.finish()

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one text.

        :param prompt_token_ids: the tokens that it continues, if it does: some tokenizers begin a text differently
        """
        table = self._plain if skip_special_tokens else self._shown
        if table is not None:
            return ByteDetokenizer(table, prompt_token_ids)
        return WindowDetokenizer(
            self._tokenizer, self._special if skip_special_tokens else frozenset(), prompt_token_ids
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special or not; perhaps a part of a character. Empty if there is no such token.

        Servers show the tokens of log-probabilities by it.

        :raises TypeError: if it is no integer
        :raises RequestRefusedError: if it is not from 0 to 2**32 - 1
        """
        (token_id,) = as_token_ids("token_ids", [token_id])
        if self._shown is not None:
            return self._shown[token_id]
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    # ---- requests ----

    def open_stream(
        self,
        client: EngineClient,
        prompt: Prompt,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        **options: Unpack[TextOptions],
    ) -> TextStream:
        """One request, as an async context manager that iterates over its outputs, each with its text.

        Entering it encodes the prompt, in a worker thread if it is long, and sends the request. A stop string aborts
        the request in the engine as soon as the token that completes it has come.

        :param prompt: text to go on from, the messages of a chat to answer, or token ids to go on from
        :param options: ``stop`` and others, see :class:`TextOptions`
        :raises TypeError: if an argument has the wrong type, here or when it is entered
        :raises RequestRefusedError: if a stop string is empty; when it is entered, if the prompt cannot be encoded (see
            :meth:`encode` and :meth:`encode_chat`), and as :meth:`EngineClient.open_request`
        :raises ModelError: when it is entered, if messages are given and the model has no chat template
        """
        if not isinstance(client, EngineClient):
            raise TypeError(
                f"client={brief(client)}: expected an EngineClient; open_sync_stream takes the blocking one"
            )
        return TextStream(client, TextRequest(self, prompt, sampling_params, **options))

    async def generate(
        self,
        client: EngineClient,
        prompt: Prompt,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        **options: Unpack[TextOptions],
    ) -> TextCompletion:
        """One request to its end. Parameters and errors as :meth:`open_stream`; cancelling it aborts the request.

        :raises EngineDeadError: if the engine dies before the last token
        """
        async with self.open_stream(client, prompt, sampling_params, **options) as stream:
            return await stream.completion()

    def open_sync_stream(
        self,
        client: SyncEngineClient,
        prompt: Prompt,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        **options: Unpack[TextOptions],
    ) -> SyncTextStream:
        """One request, as a context manager that iterates over its outputs, each with its text.

        Parameters and errors as :meth:`open_stream`.
        """
        if not isinstance(client, SyncEngineClient):
            raise TypeError(f"client={brief(client)}: expected a SyncEngineClient; open_stream takes the async one")
        return SyncTextStream(client, TextRequest(self, prompt, sampling_params, **options))

    def generate_sync(
        self,
        client: SyncEngineClient,
        prompt: Prompt,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        **options: Unpack[TextOptions],
    ) -> TextCompletion:
        """One request to its end, as a blocking call. Parameters and errors as :meth:`generate`."""
        with self.open_sync_stream(client, prompt, sampling_params, **options) as stream:
            return stream.completion()

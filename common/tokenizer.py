"""Text to token ids and back, and the chat format of DeepSeek-V4. Knows vocabularies; never sees a request or a tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import deepseek_recipe
import tokenizers
from tokenizers.decoders import DecodeStream

from common.errors import CheckpointError, InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """ "system", "user" or "assistant"."""
    content: str


class Tokenizer:
    """A checkpoint's tokenizer. Safe to share between threads; nothing in it changes."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_encoding: deepseek_recipe.DeepseekV4Encoding,
        *,
        bos_token_id: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_encoding = chat_encoding
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.vocab_size = tokenizer.get_vocab_size()
        self._longest_token_chars = max(len(token) for token in tokenizer.get_vocab())

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load tokenizer.json and the special ids of config.json. Raises CheckpointError when one is missing."""
        tokenizer_path = folder / "tokenizer.json"
        config_path = folder / "config.json"
        for path in (tokenizer_path, config_path):
            if not path.is_file():
                raise CheckpointError(f"{path} does not exist")
        config = json.loads(config_path.read_text(encoding="utf-8"))
        bos, eos = config.get("bos_token_id"), config.get("eos_token_id")
        if bos is None or eos is None:
            raise CheckpointError(f"{config_path} lacks bos_token_id or eos_token_id")
        # Both read the file: one for plain text, the other's encoder for the chat format.
        tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
        recipe = deepseek_recipe.Tokenizer.from_file(str(tokenizer_path))
        return cls(
            tokenizer,
            deepseek_recipe.DeepseekV4Encoding().with_tokenizer(recipe),
            bos_token_id=bos,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of plain text, after the begin-of-sequence token if asked for.

        Text that spells a special token becomes that token: whoever wants plain text only sends chat messages.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self.bos_token_id, *ids] if add_special_tokens else ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation in non-thinking mode, up to where the assistant's answer begins.

        What users write is plain text, special tokens spelt out included. Raises InvalidRequest when a role is unknown
        or the last turn is not the user's.
        """
        if not messages or messages[-1].role != "user":
            raise InvalidRequest("the last chat message must be of role 'user'")
        conversation = deepseek_recipe.Conversation(
            [_recipe_message(message) for message in messages], thinking_mode=False
        )
        return self._chat_encoding.encode(conversation)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no character are shown as U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def least_tokens(self, text: str) -> int:
        """A bound that needs no encoding: a text of so many characters has at least as many tokens."""
        return -(-len(text) // self._longest_token_chars)

    def detokenizer(self) -> Detokenizer:
        """A new incremental detokenizer at the beginning of a text."""
        return Detokenizer(self._tokenizer)


class Detokenizer:
    """Text of tokens that arrive one by one. Never gives half a character; special tokens have no text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []
        """Tokens whose text is not final: the last of their bytes may begin a character."""

    def push(self, token_id: int) -> str:
        """Text that became final with this token; may be empty."""
        text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            self._held.append(token_id)
            return ""
        self._held.clear()
        return text

    def flush(self) -> str:
        """Text of what is held, an incomplete character as U+FFFD. The text ends here."""
        held, self._held = self._held, []
        return self._tokenizer.decode(held, skip_special_tokens=True) if held else ""


def _recipe_message(message: ChatMessage) -> deepseek_recipe.Message:
    match message.role:
        case "system":
            return deepseek_recipe.SystemMessage(message.content)
        case "user":
            return deepseek_recipe.UserMessage(message.content)
        case "assistant":
            return deepseek_recipe.AssistantMessage(message.content)
        case role:
            raise InvalidRequest(f"role {role!r} is unknown; use system, user or assistant")
